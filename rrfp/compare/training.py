"""One training of a comparison: a user's own command with the flags of one mode, run to its end, its log and its trace read."""

import os
import re
import selectors
import shlex
import signal
import subprocess
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rrfp.compare.group import Outcome
from rrfp.errors import ConfigurationError, RRFPError
from rrfp.megatron.arguments import add_arguments
from rrfp.mode import mode_name, parse_mode
from rrfp.policy import Policy
from rrfp.trace.breakdown import Breakdown, combine
from rrfp.trace.files import Call, Timeline, read

MEGATRON, DEFAULT = "megatron-1f1b", "default"
SPLIT = "--rrfp-split-backward"
CHOSEN = ("--pipeline-schedule", "--rrfp-hint", "--rrfp-mode", "--rrfp-limit", "--rrfp-order", "--rrfp-lanes", SPLIT, "--rrfp-trace",
          "--exit-interval")
"""Flags that a comparison gives by itself."""
TRAINLESS = ("--dry-run", "--presets", "--help", "-h")
"""With these a command (`scripts/pretrain_gpt.sh`, a training script) prints something and ends."""
_LINE = re.compile(r"iteration\s+(\d+)/\s*(\d+) \|((?:[^|\n]+: [^|\n]+\|)+)")
"""Every field ends in `|`: what another rank prints behind the last one, on the same line, is none."""
_ELAPSED = "elapsed time per iteration (ms)"
_VARYING = re.compile(r"time|throughput|energy|power|memory", re.IGNORECASE)
_MEMORY = re.compile(r"max allocated: ([\d.]+)")
_STOP = 45.0
"""Seconds that a command gets to stop its workers (torchrun takes up to 30) before it is killed."""


class TrainingFailed(RRFPError):
    """A training ended otherwise than it should; the message is what it said, and where its whole output is."""


@dataclass(frozen=True)
class Step:
    """What Megatron logged of an iteration. milliseconds: of the whole iteration. fields: all others that are equal if the numbers are."""

    milliseconds: float
    fields: Mapping[str, str]


@dataclass(frozen=True)
class Trained:
    """A training that has ended well, one entry per iteration.

    steps: of the log. calls: of the trace.
    timeline: of the job's first pipeline. gigabytes: the most that a rank had allocated (on a CPU: had resident), 0 if the log doesn't say.
    """

    steps: tuple[Step, ...]
    calls: tuple["TracedCall", ...]
    timeline: Timeline
    gigabytes: float = 0.0


@dataclass(frozen=True)
class TracedCall:
    """A training call of all pipelines of a job together.

    number: in the trace. outcome: as of any other call that is compared; `overruns` only where actions are emulated. actions: how many ran.
    emulated: whether they slept up to a drawn duration.
    """

    number: int
    outcome: Outcome
    actions: int
    emulated: bool


# --------------------------------------------------------------------------------------------------------------- modes
def parse_modes(texts: Sequence[str]) -> dict[str, Policy | None]:
    """Modes by name, in order, each once; None: Megatron's own, or what `--pipeline-schedule rrfp` alone runs (`default`).

    Raises:
        ConfigurationError: a mode that does not exist, or that training doesn't have.
    """
    modes: dict[str, Policy | None] = {}
    for text in texts:
        if text in (MEGATRON, DEFAULT):
            modes[text] = None
        elif text.partition(":")[0] not in ("ready", "strict"):
            raise ConfigurationError(f"--modes {text}: is no mode of a training; use {MEGATRON}, {DEFAULT}, ready:HINT:LIMIT or strict:HINT:LIMIT")
        else:
            policy = parse_mode(text)
            modes[mode_name(policy)] = policy
    return modes


def flags_of(name: str, policy: Policy | None) -> list[str]:
    """What the training is given to run a mode."""
    if policy is None:
        return ["--pipeline-schedule", "1f1b" if name == MEGATRON else "rrfp"]
    flags = ["--pipeline-schedule", "rrfp", "--rrfp-mode", policy.mode, "--rrfp-hint", policy.hint, "--rrfp-limit", policy.limit,
             "--rrfp-order", policy.order, "--rrfp-lanes", str(policy.lanes)]
    return [*flags, SPLIT] if policy.split else flags


def needs(policy: Policy | None) -> str | None:
    """What a mode takes that this version's training does not have, or None."""
    if policy is not None and policy.split and SPLIT not in add_arguments(ArgumentParser())._option_string_actions:
        return f"needs {SPLIT}"
    return None


def check_command(command: Sequence[str]) -> None:
    """Raises ConfigurationError for a command that can't be compared with itself."""
    if not command:
        raise ConfigurationError("no command: write it behind --, for example -- bash scripts/pretrain_gpt.sh --cpu")
    for word in command:
        option = word.partition("=")[0]
        if option in TRAINLESS:
            raise ConfigurationError(f"{option} in the command: it trains nothing then, and there is nothing to compare; leave it out, or run by"
                                     f" itself `{shlex.join(command)}`")
        if option in CHOSEN:
            raise ConfigurationError(f"{option} in the command: the comparison gives it to every run by itself; leave it out (--modes chooses)")
        if option == "--save":
            raise ConfigurationError("--save in the command: every run would write there, and the next might begin from it; leave it out")


# ----------------------------------------------------------------------------------------------------------------- run
def train(command: Sequence[str], flags: Sequence[str], folder: Path, *, iterations: int, timeout: float, progress: Callable[[str], None]) -> Trained:
    """Run it once, for so many iterations, in the environment and directory of this process.

    Args:
        command, flags: both together are run. Megatron gets `--exit-interval` beside them: everything that depends on --train-iters stays.
        folder: for its log and its trace; what another run left there is removed.
        timeout: seconds without a line of output after which it has failed.
        progress: takes a line for every iteration.

    Raises:
        TrainingFailed: it did not end well, or not after that many iterations.
    """
    log, trace = folder / "log.txt", folder / "trace"
    for old in trace.glob("**/rank*.jsonl"):
        old.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    whole = [*command, *flags, "--rrfp-trace", str(trace), "--exit-interval", str(iterations)]
    environment = {"RRFP_REPORT_DIR": str(folder)} | os.environ

    def said(line: str) -> None:
        if found := _LINE.search(line):
            fields = _fields(found[3])
            progress(f"iteration {found[1]}/{iterations}, {fields.get(_ELAPSED, '?')} ms, loss {fields.get('lm loss', '?')}")

    try:
        status = _run(whole, log, environment=environment, timeout=timeout, said=said)
    except OSError as error:
        raise TrainingFailed(f"{whole[0]}: can't be run ({error.strerror})") from None
    text = log.read_text(errors="replace")
    steps = read_log(text)
    if status != 0 or len(steps) != iterations:
        why = f"exit status {status}" if status is not None else f"nothing was printed for {timeout:g} s (--timeout)"
        if status == 0:
            why = f"it logged {len(steps)} iterations instead of {iterations}; its --train-iters must be at least that, its --log-interval 1"
        own = [line for line in text.splitlines() if line.startswith(("rrfp:", "[rrfp]"))]
        tail = [line for line in own if "rank" not in line][:1] or own[-1:] or text.splitlines()[-1:]
        raise TrainingFailed(f"{tail[0] if tail else 'no output'} ({why}; whole output: {log})")
    calls, timeline = read_trace(trace)
    if len(calls) != iterations:
        raise TrainingFailed(f"its trace holds {len(calls)} complete training calls instead of {iterations}: {trace}")
    return Trained(steps, calls, timeline, max((float(found) for found in _MEMORY.findall(text)), default=0.0) / 1024)


def _run(command: Sequence[str], log: Path, *, environment: Mapping[str, str], timeout: float, said: Callable[[str], None]) -> int | None:
    """The exit status; None if nothing was printed for `timeout` seconds. Whatever happens, no process of it is left."""
    with (
        open(log, "wb") as file,
        selectors.DefaultSelector() as selector,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True) as process,
    ):
        try:
            selector.register(process.stdout, selectors.EVENT_READ)
            heard, rest = time.monotonic(), b""
            while (left := heard + timeout - time.monotonic()) > 0:
                if not selector.select(min(left, 1.0)):
                    if process.poll() is not None:
                        break  # something it left behind holds the pipe
                    continue
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    break
                file.write(chunk)
                heard = time.monotonic()
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    said(line.decode(errors="replace"))
            else:
                return None
            return process.wait(max(1.0, left))
        except subprocess.TimeoutExpired:
            return None
        finally:
            _stop(process)


def _stop(process: subprocess.Popen) -> None:
    """Ends the command and what it started: torchrun gives a signal on to its workers, which are sessions of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_STOP)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


# --------------------------------------------------------------------------------------------------------------- read
def read_log(text: str) -> tuple[Step, ...]:
    """The iterations that Megatron logged."""
    steps = []
    for found in _LINE.finditer(text):
        fields = _fields(found[3])
        if _ELAPSED in fields:
            numbers = {name: value for name, value in fields.items() if not _VARYING.search(name)}
            steps.append(Step(float(fields[_ELAPSED]), numbers))
    return tuple(steps)


def read_trace(directory: Path) -> tuple[tuple[TracedCall, ...], Timeline]:
    """The training calls that every rank of every pipeline completed, and the first pipeline's timeline.

    Raises:
        ConfigurationError: there is no trace.
    """
    folders = [directory] if any(directory.glob("rank*.jsonl")) else sorted({path.parent for path in directory.glob("*/rank*.jsonl")})
    timelines = [read(folder) for folder in folders or [directory]]
    ranks, found = sum(len(timeline.ranks) for timeline in timelines), []
    by_call: dict[int, list] = defaultdict(list)
    for timeline in timelines:
        for each in timeline.breakdowns():
            if not each.forward_only:
                by_call[each.call].append(each)
    for number, each in sorted(by_call.items()):
        if len(each) == ranks:
            found.append(_traced(number, each, [list(timeline.of_call(number).values()) for timeline in timelines]))
    return tuple(found), timelines[0]


def _traced(number: int, breakdowns: Sequence[Breakdown], pipelines: Sequence[Sequence[Call]]) -> TracedCall:
    held = combine(breakdowns).peak_in_flight
    seconds = max(max(call.end for call in calls) - min(call.begin for call in calls) for calls in pipelines)
    emulated = any(each.emulated for each in breakdowns)
    late = sum(ran.padded == 0 for calls in pipelines for call in calls for ran in call.actions) if emulated else 0
    outcome = Outcome(seconds, [held[stage] for stage in sorted(held)], [each.parts() for each in breakdowns], late)
    return TracedCall(number, outcome, sum(sum(each.counts.values()) for each in breakdowns), emulated)


def _fields(text: str) -> dict[str, str]:
    """`lm loss: 5.5E+00 | loss scale: 1.0 |` as a dictionary."""
    pairs = (part.rpartition(": ") for part in text.split("|"))
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip()}

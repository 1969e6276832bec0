"""From a preset and a user's arguments to the command that trains: what scripts/pretrain_gpt.sh and scripts/pretrain_vlm.sh run.

    python scripts/recipe.py gpt|vlm [--cpu] [--preset NAME[:TP/PP/DP]] [--dry-run] [--presets] [arguments of Megatron and of RRFP]

`--dry-run` takes the options of `rrfp balance` beside it (--images, --suggest, --json).

A preset is a file of arguments, `scripts/presets/NAME.args`: first those of the model, then `[TP/PP/DP]` headings with those of one
parallel layout each; the first layout is the default. Without a preset: the tiny model of scripts/tiny_KIND.args. What the user gives
comes last and wins. Only the standard library and `rrfp.balance` are needed, and no torch, to see what would run.
"""

import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rrfp.balance.command import options_of, show  # noqa: E402
from rrfp.cli import status_of  # noqa: E402
from rrfp.errors import ConfigurationError  # noqa: E402
from rrfp.multimodal.arguments import check_given  # noqa: E402

PRESETS = ROOT / "scripts/presets"
OWN_DATA = ("--data-path", "--train-data-path", "--data-args-path", "--per-split-data-args-path")
"""A user who names data replaces a preset's mock data."""
GPUS_PER_MACHINE = 8
FLAGS = ("--cpu", "--dry-run", "--presets")
SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")


@dataclass(frozen=True)
class Preset:
    """A model with the parallel layouts that it is offered in.

    title: the file's first comment. arguments: of the model. layouts: TP/PP/DP -> its own arguments, sizes included; never empty.
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    layouts: Mapping[str, tuple[str, ...]]

    @property
    def kind(self) -> str:
        """`gpt`, or `vlm` for a language model `+` a vision tower."""
        return "vlm" if "+" in self.name else "gpt"


@dataclass(frozen=True)
class Recipe:
    """What is to run. script: the training script. arguments: all of its arguments. world: processes. cpu: without GPUs."""

    script: str
    arguments: tuple[str, ...]
    world: int
    cpu: bool = False


# ------------------------------------------------------------------------------------------------------------ presets
def read_preset(path: Path) -> Preset:
    """Raises ConfigurationError, naming file and line, for what is neither an argument, a comment nor a heading."""
    title, common, layouts, current = "", [], {}, None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not title and line.startswith("#"):
            title = line.lstrip("# ").strip()
        if heading := re.fullmatch(r"\[(\d+)/(\d+)/(\d+)\]", text):
            tensor, pipeline, _ = heading.groups()
            current = layouts[text[1:-1]] = ["--tensor-model-parallel-size", tensor, "--pipeline-model-parallel-size", pipeline]
            if int(tensor) > 1:
                current.append("--sequence-parallel")
        elif text.startswith("--"):
            (common if current is None else current).extend(shlex.split(text))
        elif text:
            raise ConfigurationError(f"{path}, line {number}: {text!r} is neither an argument (--...) nor a layout ([TP/PP/DP])")
    if not layouts:
        raise ConfigurationError(f"{path}: has no layout; add one, for example [1/8/1]")
    return Preset(path.stem, title, tuple(common), {name: tuple(arguments) for name, arguments in layouts.items()})


def presets() -> dict[str, Preset]:
    """All presets by name."""
    return {path.stem: read_preset(path) for path in sorted(PRESETS.glob("*.args"))}


def names(kind: str) -> list[str]:
    """What --preset takes."""
    return ["tiny", *(name for name, preset in presets().items() if preset.kind == kind)]


def chosen(text: str, kind: str) -> tuple[Preset, str]:
    """`NAME` or `NAME:TP/PP/DP` -> the preset and its layout. Raises ConfigurationError, with the way out."""
    name, _, layout = text.partition(":")
    known = presets()
    if name not in known:
        raise ConfigurationError(f"--preset {text}: no such preset; choose one of {', '.join(names(kind))}")
    preset = known[name]
    if preset.kind != kind:
        raise ConfigurationError(f"--preset {text}: is for scripts/pretrain_{preset.kind}.sh")
    # TP/PP stands for TP/PP/1, as the paper writes it.
    layout = next(iter(preset.layouts)) if not layout else layout if layout.count("/") == 2 else f"{layout}/1"
    if layout not in preset.layouts:
        raise ConfigurationError(f"--preset {text}: is not prepared for that TP/PP/DP; choose one of {', '.join(preset.layouts)}, or give the sizes "
                                 "as Megatron's arguments")
    return preset, layout


# ------------------------------------------------------------------------------------------------------------ recipes
def recipe(kind: str, own: Sequence[str], *, preset: str, cpu: bool, environment: Mapping[str, str], data: Sequence[str] = ()) -> Recipe:
    """What runs.

    Args:
        own: the user's arguments.
        preset: `tiny`, or as `chosen` takes it.
        environment: STAGES (of `tiny`), SCRIPT, REPLICAS (data-parallel, if not the layout's).
        data: arguments of the tiny model's data.

    Raises:
        ConfigurationError: no such preset, or a number that is none.
    """
    script = environment.get("SCRIPT") or str(ROOT / f"scripts/pretrain_{kind}.py")
    if preset == "tiny":
        stages = str(_number(environment, "STAGES", 4))
        arguments = [*tiny(kind), *data, "--pipeline-model-parallel-size", stages]
        replicas = 1
    else:
        found, layout = chosen(preset, kind)
        arguments, replicas = [*found.arguments, *found.layouts[layout]], int(layout.split("/")[2])
        if "--mock-data" in arguments and any(word.partition("=")[0] in OWN_DATA for word in own):
            arguments.remove("--mock-data")
    arguments += own
    world = _number(environment, "REPLICAS", replicas)
    for option in SIZES:
        world *= _last(arguments, option)
    return Recipe(script, tuple(arguments), world, cpu)


def tiny(kind: str) -> list[str]:
    """Arguments of the model that trains on a CPU."""
    return shlex.split((ROOT / f"scripts/tiny_{kind}.args").read_text(), comments=True)


def command(run: Recipe, environment: Mapping[str, str]) -> list[str]:
    """The command line for this machine.

    More processes than a machine has GPUs (NPROC, default 8) run on several machines, this being NODE_RANK of NNODES, MASTER_ADDR the first.

    Raises:
        ConfigurationError: the processes can't be spread evenly.
    """
    per_machine = _number(environment, "NPROC", run.world if run.cpu else GPUS_PER_MACHINE)
    machines = _number(environment, "NNODES", -(-run.world // per_machine))
    if run.world % machines:
        raise ConfigurationError(f"NNODES={machines}: {run.world} processes can't be spread evenly over that many machines; set NNODES and NPROC")
    if run.world > machines * per_machine:
        raise ConfigurationError(f"NNODES={machines}: {run.world} processes are more than {per_machine} on a machine; set NNODES and NPROC")
    start = ["torchrun", "--nproc-per-node", str(run.world // machines)]
    if machines == 1:
        start.insert(1, "--standalone")
    else:
        start += ["--nnodes", str(machines), "--node-rank", environment.get("NODE_RANK", "$NODE_RANK"), "--master-addr",
                  environment.get("MASTER_ADDR", "$MASTER_ADDR"), "--master-port", environment.get("MASTER_PORT", "29500")]
    return [*start, "-m", "rrfp", *(["--cpu"] if run.cpu else []), run.script, *run.arguments]


def printed(line: Sequence[str]) -> str:
    """A command as one would type it, an option a line."""
    # `$NODE_RANK` stays for the shell to fill in.
    words = [word if re.fullmatch(r"\$[A-Z_]+", word) else shlex.quote(word) for word in line]
    text, script = [words[0]], next((at for at, word in enumerate(words) if word.endswith(".py")), 0)
    for at, word in enumerate(words[1:], 1):
        text.append((" \\\n    " if at > script and word.startswith("--") else " ") + word)
    return "".join(text)


def _last(arguments: Sequence[str], option: str) -> int:
    """The value that wins. Raises ConfigurationError if it is no number above 0."""
    values = [arguments[at + 1] if at + 1 < len(arguments) else "" for at, word in enumerate(arguments) if word == option]
    values += [word.partition("=")[2] for word in arguments if word.startswith(f"{option}=")]
    if not values:
        return 1
    if not values[-1].isdecimal() or values[-1] == "0":
        raise ConfigurationError(f"{option} {values[-1]}: must be a whole number of at least 1")
    return int(values[-1])


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal() or text == "0":
        raise ConfigurationError(f"{name}={text}: must be a whole number of at least 1")
    return int(text)


# -------------------------------------------------------------------------------------------------------- command line
def main(argv: Sequence[str]) -> int:
    """Prints or runs. Returns the exit status of a dry run or a refusal; a training replaces this process."""
    return status_of("rrfp", lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    if not argv or argv[0] not in ("gpt", "vlm"):
        raise ConfigurationError(f"{argv[0] if argv else 'nothing'}: must be gpt or vlm")
    kind, asked = argv[0], _options(argv[1:], argv[0])
    if "--presets" in asked.flags:
        if len(argv) > 2:
            raise ConfigurationError("--presets: prints a list and does nothing else; give it alone")
        print("\n".join(_overview(kind)))
        return 0
    own, preset, dry = asked.own, asked.preset, "--dry-run" in asked.flags
    if not dry and (given := [name for name, value in vars(asked.shown).items() if value]):
        raise ConfigurationError(f"--{given[0]}: says what --dry-run shows; add --dry-run, or leave it out")
    data = _tiny_data(kind, make=not dry) if preset == "tiny" else []
    run = recipe(kind, own, preset=preset, cpu="--cpu" in asked.flags, environment=os.environ, data=data)
    line = command(run, os.environ)
    if dry:
        print(printed(line) + "\n")
        show(asked.shown, run.arguments)
        return 0
    if preset != "tiny" and kind == "vlm" and not any(word.partition("=")[0] == "--vlm-data" for word in own):
        raise ConfigurationError(f"--preset {preset}: trains on your images; give --vlm-data DIR (docs/multimodal.md), or see what would run "
                                 "with --dry-run")
    if missing := [word for word in line if word in ("$NODE_RANK", "$MASTER_ADDR")]:
        raise ConfigurationError(f"{missing[0][1:]} is not set: {run.world} processes are for several machines; run this on each of them with "
                                 "NODE_RANK=0, 1, ... and MASTER_ADDR=<the first one>, or see what would run with --dry-run")
    if kind == "vlm":
        check_given(run.arguments)  # here, where it takes no seconds: processes would say it after they have met
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.flush()
    os.execvp(line[0], line)


@dataclass
class _Asked:
    """The command line taken apart. flags: those of FLAGS that are given. shown: options of `rrfp balance`. own: all others."""

    preset: str = "tiny"
    flags: set[str] = field(default_factory=set)
    shown: Namespace = field(default_factory=Namespace)
    own: list[str] = field(default_factory=list)


def _options(argv: Sequence[str], kind: str) -> _Asked:
    """Ours, wherever they stand, and the rest. Raises ConfigurationError for one of ours without its value, or with one too many."""
    words, own, asked = list(argv), [], _Asked()
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if option in FLAGS:
            if equals:
                raise ConfigurationError(f"{word}: takes no value; give {option}, or leave it out")
            asked.flags.add(option)
        elif option == "--preset":
            asked.preset = value if equals else words.pop(0) if words and not words[0].startswith("-") else ""
            if not asked.preset:
                raise ConfigurationError(f"--preset: needs a name behind it; choose one of {', '.join(names(kind))}")
        else:
            own.append(word)
    asked.shown, asked.own = options_of(own, helps=False)
    return asked


def _overview(kind: str) -> list[str]:
    """A line per preset."""
    rows = [("tiny", f"trains on a CPU in a minute; STAGES=4 (scripts/tiny_{kind}.args)")]
    rows += [(name, f"{preset.title}; TP/PP/DP {', '.join(preset.layouts)}") for name, preset in presets().items() if preset.kind == kind]
    width = max(len(name) for name, _ in rows)
    return [f"{name.ljust(width)}  {text}" for name, text in rows]


def _tiny_data(kind: str, *, make: bool) -> list[str]:
    """Arguments of the tiny model's data, which is made if it isn't there yet."""
    if kind != "gpt":
        return []
    folder = Path(os.environ.get("DATA") or ROOT / "runs/data")
    if not (folder / "text.args").is_file():
        if not make:  # what scripts/prepare_data.py will say (under Megatron 0.17 with a vocabulary of 255)
            return ["--data-path", str(folder / "text"), "--data-cache-path", str(folder / "cache"), "--split", "90,5,5", "--tokenizer-type",
                    "NullTokenizer", "--vocab-size", "256"]
        subprocess.run([sys.executable, str(ROOT / "scripts/prepare_data.py"), str(folder)], check=True, stdout=subprocess.DEVNULL)
    return shlex.split((folder / "text.args").read_text())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

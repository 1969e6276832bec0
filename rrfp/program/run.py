"""`rrfp program run`: train with a program under torchrun, and say what it took."""

import argparse
import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from rrfp.errors import ConfigurationError, PipelineError
from rrfp.outputs import check_file, make_directory
from rrfp.program.files import Program, read_program
from rrfp.program.workload import PythonModel

REFUSED = 2
"""The exit status of what is refused, and of what failed."""


@dataclass(frozen=True)
class Row:
    """What one rank did.

    rate: units (tokens or samples) of its replica's batches per second, over all steps but the first, which connects the ranks and warms up.
    peak_bytes: of memory; of gathered_bytes are ZeRO-3's gathered parameters. activations: most held at once, of units.
    """

    rank: int
    pipeline_rank: int
    replica: int
    rate: float
    unit: str
    peak_bytes: int
    gathered_bytes: int
    activations: int


def launch(options: argparse.Namespace) -> None:
    """Become torchrun with as many local processes as the program needs. Does not return."""
    program = _runnable(options)
    if "RANK" in os.environ:
        raise ConfigurationError("--local: starts the processes, and this is one of torchrun's already; leave one of the two out")
    words = [word for word in sys.argv[1:] if word != "--local"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(program.devices), "-m", "rrfp", *words]
    sys.stdout.flush()
    os.execv(sys.executable, command)


def run(options: argparse.Namespace) -> None:
    """Train, as one rank of torchrun's job.

    Raises:
        ConfigurationError: for what cannot run so, with the command that does.
        PipelineError: a rank failed or was lost.
        SystemExit: one of the two, which another rank says.
    """
    try:
        program = _prepare(options)
    except (ConfigurationError, OSError):
        if os.environ.get("LOCAL_RANK", "0") != "0":  # what is refused so early is so in every process of a host
            raise SystemExit(REFUSED) from None
        raise
    import torch
    from torch import distributed as dist

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(None if cuda else "gloo")
    store = dist.distributed_c10d._get_default_store()
    try:
        _train(options, program, cuda=cuda)
    except (ConfigurationError, PipelineError, OSError) as error:
        if not _first_to_say(store, str(error)):
            raise SystemExit(REFUSED) from None
        raise
    finally:
        dist.destroy_process_group()


def _first_to_say(store, text: str) -> bool:
    """Whether no other rank has said it. A rank whose store is gone says what it knows."""
    try:
        return store.add(f"rrfp-program-run/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1
    except RuntimeError:
        return True


def _prepare(options: argparse.Namespace) -> Program:
    """What can be refused before the ranks meet."""
    program = _runnable(options)
    start = f"torchrun --nproc-per-node {program.devices} -m rrfp program run {options.file}"
    if "RANK" not in os.environ:
        raise ConfigurationError(f"{options.file}: runs on {program.devices} processes: start it with `{start}`, or on this host with --local")
    if (world := int(os.environ["WORLD_SIZE"])) != program.devices:
        raise ConfigurationError(f"{options.file}: runs on {program.devices} processes, and this job has {world}: start it with `{start}`")
    check_file("--json", options.json)
    make_directory("--trace", options.trace)
    return program


def _runnable(options: argparse.Namespace) -> Program:
    program = read_program(options.file)
    if not isinstance(program.model, PythonModel):
        has = "describes no model" if program.model is None else "its model is an outline without mathematics"
        raise ConfigurationError(f'{options.file}: {has}; name your own: "model": {{"python": "my_model.py:make"}}, or build the file with --model')
    return program


def _train(options: argparse.Namespace, program: Program, *, cuda: bool) -> None:
    import torch
    from torch import distributed as dist

    from rrfp import program as programs

    workload = program.model.make()
    with programs.compile(
        workload.model, program.directives, loss=workload.loss, example_batch=next(iter(workload.batches(0))), mode=options.mode,
        trace=options.trace, timeout=options.timeout, optimizer=workload.optimizer or torch.optim.AdamW,
    ) as compiled:  # fmt: skip
        workload = replace(workload, model=None)  # every rank has its part
        plan = next(plan for plan in compiled.program.plans if dist.get_rank() in plan.devices)
        replica = plan.devices.index(dist.get_rank())
        batches, losses, amounts, seconds = workload.batches(replica), [], [], []
        for number in range(options.steps):
            batch = _next(batches, number, program.model)
            start = time.perf_counter()
            found = compiled.step(batch)
            seconds.append(time.perf_counter() - start)
            amounts.append(_amount(batch))
            losses.append(compiled.mean(found))
            if dist.get_rank() == 0:
                print(f"step {number + 1}: loss {losses[-1]:.6f}", flush=True)
        timed = slice(1 if options.steps > 1 else 0, None)
        own = Row(dist.get_rank(), plan.rank, replica, sum(amount for amount, _ in amounts[timed]) / sum(seconds[timed]), amounts[0][1],
                  torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                  compiled.peak.gathered, compiled.peak.activations)  # fmt: skip
        rows = _everyone(own, device=found.device)
    if dist.get_rank() == 0:
        print("\n".join(table(rows, cuda=cuda)))
        if options.json is not None:
            document = {"mode": options.mode, "losses": losses, "ranks": [asdict(row) for row in rows]}
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _everyone(own: Row, *, device) -> list[Row]:
    """Each rank's row, sent as numbers: nothing is unpickled. All count in the same unit."""
    import torch
    from torch import distributed as dist

    numbers = asdict(own) | {"unit": 0}
    ours = torch.tensor(list(numbers.values()), dtype=torch.float64, device=device)
    everyone = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, ours)
    named = (dict(zip(numbers, each.tolist(), strict=True)) for each in everyone)
    return [Row(**{name: value if name == "rate" else int(value) for name, value in each.items()} | {"unit": own.unit}) for each in named]


def _next(batches: Iterator[Mapping], number: int, model: PythonModel) -> Mapping:
    try:
        return next(batches)
    except StopIteration:
        # Perhaps not so on every rank: said by whoever it happens to.
        raise PipelineError(f"--steps: model {model.python} has batches for {number} steps only; ask for fewer, or let it go on") from None


def _amount(batch: Mapping) -> tuple[int, str]:
    """How much a batch is: its `tokens`, or else its rows."""
    return (batch["tokens"].numel(), "tokens") if "tokens" in batch else (len(next(iter(batch.values()))), "samples")


def table(rows: list[Row], *, cuda: bool) -> list[str]:
    """Lines of the table at the end."""
    unit = rows[0].unit
    lines = [f"{'rank':>4} {'stage':>5} {'replica':>7} {unit + '/s':>10} {'memory MiB':>10} {'gathered MiB':>12} {'activations':>11}"]
    for row in rows:
        lines.append(f"{row.rank:>4} {row.pipeline_rank:>5} {row.replica:>7} {row.rate:>10.1f} {row.peak_bytes / 2**20:>10.1f}"
                     f" {row.gathered_bytes / 2**20:>12.2f} {row.activations:>11}")
    slowest = {row.replica: row.rate for row in sorted(rows, key=lambda row: -row.rate)}
    where = "allocated on the GPU (torch.cuda.max_memory_allocated)" if cuda else "resident in the process, Python and torch included (getrusage)"
    return [*lines, f"{sum(slowest.values()):.1f} {unit}/s in all; memory: the most {where}; activations: the most held at once, of segments"]

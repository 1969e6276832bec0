"""`rrfp program`: show what a strategy comes down to, write those that ship as files, and train with one."""

import argparse
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rrfp.errors import ConfigurationError, PipelineError
from rrfp.outputs import check_file, check_picture
from rrfp.program.builders import BUILDERS
from rrfp.program.clock import overlap, run
from rrfp.program.dag import ALL_TO_ALL, DAG
from rrfp.program.files import Program, read_dag, write_program
from rrfp.program.hint_rows import stage_rows, stages_of
from rrfp.program.lower import lower
from rrfp.program.memory import memory
from rrfp.program.plan import MODES, Lowered
from rrfp.program.text import print_dag
from rrfp.program.traced import EXPERT_PARTS
from rrfp.program.workload import PythonModel
from rrfp.scheduler.lists import write
from rrfp.values import above_zero, at_least_one


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rrfp program", description=__doc__.split(": ", 1)[1])
    commands = parser.add_subparsers(dest="command", required=True, metavar="show|build|run")
    show = commands.add_parser("show", help="print a program's training DAG as text, and draw it")
    show.add_argument("file", type=Path, metavar="FILE", help="a program (JSON), or the text of a DAG")
    show.add_argument("--picture", type=Path, metavar="PNG", help="draw it: streams over time, at nominal durations")
    show.add_argument("--hint", type=Path, metavar="CSV", help="write its order of stages, for --rrfp-hint, simulate and compare")
    show.add_argument("--summary", action="store_true", help="only what each rank holds and does, not the DAG")
    build = commands.add_parser("build", help="write a strategy that ships as a file, over a model in outline")
    build.add_argument("name", choices=sorted(BUILDERS), metavar="NAME", help=", ".join(BUILDERS))
    build.add_argument("file", type=Path, metavar="FILE")
    build.add_argument("--ranks", type=at_least_one, default=4, metavar="P", help="pipeline ranks (default 4)")
    build.add_argument("--microbatches", type=at_least_one, default=8, metavar="M", help="default 8")
    build.add_argument("--chunks", type=at_least_one, metavar="C", help="of interleaved: stages per rank (default 2)")
    build.add_argument("--replicas", type=at_least_one, default=1, metavar="N", help="data parallelism (default 1)")
    build.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=0, help="of the replicas: what is sharded (default 0: nothing)")
    build.add_argument("--experts", action="store_true", help="each stage has experts, in pieces on the replicas")
    build.add_argument("--model", metavar="FILE.py:FUNCTION", help="your model instead of an outline: a function that returns a Workload")
    run = commands.add_parser("run", help="train with a program whose model is Python, under torchrun")
    run.add_argument("file", type=Path, metavar="FILE", help="a program (JSON)")
    run.add_argument("--steps", type=at_least_one, default=10, metavar="N", help="default 10")
    run.add_argument("--mode", choices=MODES, default="ready", help="strict: the program's order is obeyed; ready (default): it ranks what is ready")
    run.add_argument("--trace", type=Path, metavar="DIR", help="record the steps, one directory for each replica's pipeline, for `rrfp trace`")
    run.add_argument("--json", type=Path, metavar="FILE", help="write losses and the table")
    run.add_argument("--timeout", type=above_zero, default=600.0, metavar="SECONDS", help="without progress, until every rank ends (default 600)")
    run.add_argument("--local", action="store_true", help="start the processes on this host, as torchrun does")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for what is refused, with one line that says why."""
    options = _parser().parse_args(arguments)
    try:
        {"show": _show, "build": _build, "run": _run}[options.command](options)
    except BrokenPipeError:
        raise  # nobody reads on: `rrfp.cli` ends the command quietly
    except (ConfigurationError, PipelineError, OSError) as error:
        print(f"rrfp program: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    from rrfp.program import run

    run.launch(options) if options.local else run.run(options)


def _show(options: argparse.Namespace) -> None:
    check_picture(options.picture)
    check_file("--hint", options.hint)
    dag = read_dag(options.file)
    lowered = lower(dag)
    if options.hint is not None:
        write(stage_rows(dag), options.hint)
    if options.picture is not None:
        from rrfp.program.picture import draw

        draw(dag, run(dag), options.picture, title=options.file.stem)
    if not options.summary:
        print(print_dag(dag), end="")
    print("\n".join(summary(dag, lowered)))


def summary(dag: DAG, lowered: Lowered) -> list[str]:
    """Lines of comment: what each rank does and holds, and how long it takes at nominal durations."""
    clock = run(dag)
    lines = [f"# {len(dag.nodes)} nodes, {len(dag.edges)} edges, {len(lowered.units)} units; {clock.makespan:.1f} forwards of a segment long"]
    if any(node.kind == ALL_TO_ALL for node in dag.nodes.values()):
        lines.append(f"# {100 * overlap(dag, clock.spans):.0f}% of the time of all-to-alls lies under computation")
    for plan in lowered.plans:
        held = memory(lowered, plan.rank)
        devices = ",".join(map(str, plan.devices))
        lines.append(f"# rank {plan.rank} on {devices}: {len(plan.row)} groups, at most {plan.peak} activations of units;"
                     f" {held.total / 2**20:.2f} MiB of parameters {held.parameters / 2**20:.2f}, gradients {held.gradients / 2**20:.2f},"
                     f" optimizer {held.optimizer / 2**20:.2f}, gathered {held.pool / 2**20:.2f}, to scatter {held.scattered / 2**20:.2f}")
    return lines


def _build(options: argparse.Namespace) -> None:
    builder = BUILDERS[options.name]
    check_file("FILE", options.file)
    if options.zero and options.replicas == 1:
        raise ConfigurationError(f"--zero {options.zero}: shards over replicas; give --replicas 2 or more")
    if options.experts and options.replicas == 1:
        raise ConfigurationError("--experts: lie in pieces on the replicas; give --replicas 2 or more")
    more = {}
    if options.chunks is not None:
        if "chunks" not in inspect.signature(builder).parameters:
            raise ConfigurationError(f"--chunks {options.chunks}: {options.name} has a fixed number of stages per rank; leave it out")
        more["chunks"] = options.chunks
    directives = builder(options.ranks, options.microbatches, replicas=options.replicas, zero=options.zero, experts=options.experts, **more)
    stages = stages_of(directives)
    if options.model is None:
        sketch = {"stages": stages, "batch": 2 * options.microbatches, **({"parts": list(EXPERT_PARTS)} if options.experts else {})}
        write_program(options.file, directives, {"sketch": sketch})
        print(f"program: {options.file} (rrfp program show {options.file})")
        return
    path, _, function = options.model.rpartition(":")
    if not path:
        raise ConfigurationError(f"--model {options.model}: names no function; write FILE.py:FUNCTION")
    folder = options.file.parent
    model = PythonModel(f"{os.path.relpath(path, folder)}:{function}", folder=folder)
    if "stages" in inspect.signature(model.function).parameters:
        model = replace(model, arguments={"stages": stages})
    program = Program(tuple(directives), model)
    program.dag()  # what does not fit the model is refused now
    write_program(options.file, directives, {"python": model.python, **({"arguments": model.arguments} if model.arguments else {})})
    print(f"program: {options.file} (torchrun --nproc-per-node {program.devices} -m rrfp program run {options.file})")


if __name__ == "__main__":
    sys.exit(main())

"""What every rank of a real training job does when one of them fails.

Bare processes have no agent that would end the others; under torchrun there is one. At the end a run prints the seconds from each
fault to the end of every survivor: `bash scripts/test.sh tests/end_to_end/test_faults.py -s --all` makes the table of docs/failures.md.
"""

import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

sys.path.insert(0, os.path.dirname(__file__))  # the helpers lie beside the test
import faults_job  # noqa: E402
import job  # noqa: E402
import pretrain_gpt_job  # noqa: E402
from faults_job import EVALUATE, PLACES, RANKS, SCRIPT, Cell, Table, name, run  # noqa: E402

from rrfp.comm.ports import reserve_port  # noqa: E402

TIMEOUT = 5
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture(scope="module")
def data() -> list[str]:
    """Arguments of a tiny GPT on real text, eight microbatches an iteration."""
    return [*pretrain_gpt_job.make_data(), "--distributed-backend", "gloo", "--train-iters", "3",
            "--pipeline-schedule", "rrfp", "--rrfp-timeout", "60"]


@pytest.fixture(scope="module")
def server():
    return job.server(SCRIPT, untouched=False)  # 1F1B, too, runs under `python -m rrfp` here


@pytest.fixture(scope="module")
def table(request):
    table = Table()
    yield table
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\nseconds from the fault to the end of every survivor, median (least to most):\n\n{table}")


def fault(rank: int, what: str, where: str, call: int = 1, microbatch: int = 0) -> dict:
    return {"rank": rank, "what": what, "where": where, "call": call, "microbatch": microbatch}


def others(ended, rank):
    return [end for end in ended if end.rank != rank]


# ------------------------------------------------------------------------------------------------- the grid
CELLS = [Cell(what, place, rank) for rank in range(RANKS) for place in PLACES for what in ("kill", "_exit", "stop", "raise", "exit")]


def reduced(cell: Cell) -> bool:
    """`os._exit` is seen as `kill -9` is: at each place, and on each stage, is enough."""
    return cell.what != "_exit" or cell.rank == list(PLACES).index(cell.place) % RANKS


@pytest.fixture(scope="module")
def grid(request, server, data, tmp_path_factory, full):
    """grid(cell): what became of the ranks. Several jobs run side by side: those that wait for a timeout need no processor."""
    cells = [item.callspec.params["cell"] for item in request.session.items if item.originalname == "test_a_fault"]
    pools = {True: ThreadPoolExecutor(3), False: ThreadPoolExecutor(2)}

    def train(cell):
        more = EVALUATE if cell.place == "evaluation" else []
        timeout = ["--rrfp-timeout", str(TIMEOUT)] if cell.what == "stop" else []
        return run(server, tmp_path_factory.mktemp(str(cell).replace(" ", "-")), [*data, *more, *timeout], fault=cell.fault)

    runs = {cell: pools[cell.what == "stop"].submit(train, cell) for cell in cells if full or reduced(cell)}
    yield lambda cell: runs[cell].result(timeout=280)
    for pool in pools.values():
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_fault(grid, table, full, cell):
    if not (full or reduced(cell)):
        pytest.skip("only with --all: os._exit on every stage")
    ended = grid(cell)
    faults_job.check(cell, ended)
    table.add(cell.what, cell.place, [end.seconds for end in others(ended, cell.rank)])


# ------------------------------------------------------------------------------------------------- tensor parallelism
@pytest.mark.parametrize("what, rank", [("kill", 3), ("kill", 0), ("raise", 1), ("raise", 2)])
def test_a_fault_under_tensor_parallelism(server, data, table, tmp_path, full, what, rank):
    """PP2 x TP2, steady state. A stage's ranks are a domain, ranks of one parity a pipeline; who sees it first tells all."""
    if not full and (what, rank) != ("kill", 3):
        pytest.skip("only with --all: the first of each, and the other end of the pipeline")
    struck = fault(rank, what, "forward", microbatch=5)
    ended = run(server, tmp_path, [*data, "--tensor-model-parallel-size", "2"], fault=struck, pipeline=2)
    stage, lost = rank // 2, ended[rank]
    who = rf"(in another pipeline, )?stage {stage} \(rank {rank}\)"
    seen = rf"( \(0>1, 1>0\): rank {stage}| \(agreement\): rank {rank}|: it) \(process {lost.pid}\)"
    verdict = {"kill": rf"{who} was lost{seen} ended without saying goodbye",
               "raise": rf"{who} failed \({stage}F5\): ValueError: a fault on purpose"}[what]
    assert lost.code == {"kill": -signal.SIGKILL, "raise": 1}[what] and not lost.said
    for end in others(ended, rank):
        assert end.code == 1 and end.seconds < 30
        line = re.fullmatch(rf"\[rrfp\] stage {end.rank // 2} \(rank {end.rank}\): {verdict}", end.said[0])
        assert line, end.said
        assert bool(line[1]) == (end.rank % 2 != rank % 2), "whether it is its own pipeline's"
        assert end.said[0] in end.report
    table.add(what, "PP2 x TP2", [end.seconds for end in others(ended, rank)])


# ------------------------------------------------------------------------------------------------- places outside the schedule
@pytest.mark.parametrize("where, rank", [("optimizer", 3), ("save", 0), ("data", 1)])
def test_a_rank_killed_elsewhere(server, data, table, tmp_path, where, rank):
    saving = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "1"] if where == "save" else []
    ended = run(server, tmp_path, data + saving, fault=fault(rank, "kill", where))
    assert ended[rank].code == -signal.SIGKILL
    for end in others(ended, rank):
        assert end.code == 1 and end.seconds < 30
        assert re.fullmatch(rf"\[rrfp\] {re.escape(name(end.rank))}: {re.escape(name(rank))} was lost \(\d>\d, \d>\d\): "
                            rf"rank {rank} \(process {ended[rank].pid}\) ended without saying goodbye", end.said[0])
        assert end.said[0] in end.report
    table.add("kill", f"{where}", [end.seconds for end in others(ended, rank)])


def test_data_loader_workers_end_with_their_rank(server, data, tmp_path):
    """They are forks of it: they must neither keep it looking alive nor say goodbye for it."""
    ended = run(server, tmp_path, [*data, "--num-workers", "2"], fault=fault(0, "kill", "forward", microbatch=5))
    for end in others(ended, 0):
        assert end.seconds < 30 and f"{name(0)} was lost" in end.said[0]


def test_a_stopped_rank_is_the_one_without_a_sign_of_life(grid):
    """A neighbour's report shows whose sign of life is old."""
    ended = grid(Cell("stop", "steady state", 2))
    hangs = [text for text in (ended[1].report, ended[3].report) if "nothing has moved" in text]
    assert hangs
    for text in hangs:
        silent = dict(re.findall(r"rank (\d): last sign of life ([\d.]+) s ago", text))
        assert float(silent["2"]) > 0.7 * TIMEOUT
        assert all(float(ago) < 0.5 * float(silent["2"]) for rank, ago in silent.items() if rank != "2")


def test_an_action_that_never_returns_is_reported_with_its_stack(server, data, tmp_path, table):
    ended = run(server, tmp_path, [*data, "--rrfp-timeout", str(TIMEOUT)], fault=fault(2, "block", "forward", microbatch=3))
    for end in ended:
        assert end.code == 1
        assert re.fullmatch(rf"\[rrfp\] {re.escape(name(end.rank))}: {re.escape(name(2))} failed \(2F3\): 2F3 has been running for \d s "
                            "and does not return", end.said[0])
        assert end.seconds < TIMEOUT + 30
        assert "threading.Event().wait(300)" in end.report  # the very line, on every rank
    assert all(end.seconds < TIMEOUT + 20 for end in others(ended, 2))
    table.add("an action that never returns", "steady state", [end.seconds for end in others(ended, 2)])


def test_the_traceback_of_an_exception_reaches_all_ranks(grid):
    for end in others(grid(Cell("raise", "steady state", 1)), 1):
        assert f"--- traceback of {name(1)} ---" in end.output and "in strike" in end.output and "in strike" in end.report


def test_a_data_iterator_that_ends_early(server, data, tmp_path, table):
    """And closing the pipeline afterwards leaves no thread, descriptor or shared memory of it."""
    ended = run(server, tmp_path, data, fault={**fault(3, "end", "iterator", microbatch=3), "close": True})
    assert re.search(r"^StopIteration", ended[3].output, re.M)  # as under Megatron, not wrapped
    assert "PipelineError" not in ended[3].output and not ended[3].said
    for end in ended:
        assert end.code == 1
        assert re.search(r"opened [1-9]\d* descriptors; leftovers: none", end.output)
    for end in others(ended, 3):
        assert end.seconds < 30
        # The engine's line, not the hook's: the program lives on and closes the pipeline itself.
        assert f"rrfp.errors.PipelineError: {name(3)} failed (3F3): StopIteration" in end.output.splitlines()
        assert f"{name(3)} failed (3F3): StopIteration" in end.report
    table.add("the data iterator ends early", "steady state", [end.seconds for end in others(ended, 3)])


def test_without_the_watcher_nobody_names_the_lost_rank(server, data, tmp_path):
    """The control: under Megatron's own schedule survivors end too, by an error of the collective that happens to break."""
    ended = run(server, tmp_path, [*data, "--pipeline-schedule", "1f1b"], fault=fault(1, "kill", "optimizer"), deadline=40)
    assert not any("was lost" in end.output or end.report for end in ended)


@pytest.mark.parametrize("forks", ["data loader workers", "asynchronous checkpoints"])
def test_a_normal_end_is_silent_and_quick(server, data, tmp_path, forks):
    more = ["--num-workers", "2"] if forks == "data loader workers" else \
        ["--async-save", "--save", str(tmp_path / "checkpoints"), "--save-interval", "1"]
    ended = run(server, tmp_path, [*data, *more])
    for end in ended:
        assert end.code == 0
        assert not end.report
        said = [line for line in end.output.splitlines() if "[rrfp]" in line]
        assert all(line.startswith(("[rrfp] hint ", "[rrfp] limit ")) for line in said), said
        assert "Traceback" not in end.output
    assert max(end.seconds for end in ended) - min(end.seconds for end in ended) < 30


# ------------------------------------------------------------------------------------------------- NaN
def poisoned(server, folder, data, *more) -> dict:
    """{schedule: what its ranks were}, with a weight of the last of two stages that becomes NaN in the second iteration."""
    nan = fault(1, "nan", "forward", microbatch=3)
    return {schedule: run(server, folder / schedule, [*data, *more, "--pipeline-schedule", schedule], fault=nan, ranks=2)
            for schedule in ("1f1b", "rrfp")}


def test_a_nan_ends_the_job_with_the_error_of_megatron(server, data, tmp_path):
    """--check-for-nan-in-loss-and-grad is Megatron's default."""
    theirs, ours = poisoned(server, tmp_path, data, "--rerun-mode", "disabled").values()
    raised = [re.findall(r"^(?:\[rank\d\]: )?RuntimeError: (Rank .*)", ended[1].output, re.M)[-1:] for ended in (theirs, ours)]
    assert raised[0] == raised[1] and "nan" in raised[0][0], raised
    assert [end.code for end in theirs] == [end.code for end in ours] == [1, 1]


def test_a_nan_passes_through_if_megatron_lets_it(server, data, tmp_path):
    theirs, ours = poisoned(server, tmp_path, data, "--no-check-for-nan-in-loss-and-grad").values()
    logs = [pretrain_gpt_job.log(ended[1].output) for ended in (theirs, ours)]
    assert logs[0] == logs[1] and len(logs[0]) == 3
    assert [pretrain_gpt_job.value(line, "lm loss") is None for line in logs[0]] == [False, True, True], logs[0]  # NaN is not a number
    assert [end.code for end in ours] == [0, 0]


# ------------------------------------------------------------------------------------------------- restart
KILLED = [fault(0, "kill", "forward", microbatch=5), fault(3, "kill", "finalize"), fault(1, "kill", "backward", microbatch=7)]


def saving(folder: Path) -> list[str]:
    """Five iterations, each saved; go on from what is there."""
    where = str(folder / "saved")
    return ["--train-iters", "5", "--save-interval", "1", "--ckpt-format", "torch_dist", "--save", where, "--load", where]


@pytest.fixture(scope="module")
def uninterrupted(server, data, tmp_path_factory):
    """uninterrupted(ranks): log and folder of the training that nothing happens to; run once."""
    runs = {}

    def train(ranks):
        if ranks not in runs:
            folder = tmp_path_factory.mktemp("uninterrupted")
            ended = run(server, folder, data + saving(folder), ranks=ranks)
            assert [end.code for end in ended] == [0] * ranks
            runs[ranks] = pretrain_gpt_job.log(ended[-1].output), folder
        return runs[ranks]

    return train


def same_as_uninterrupted(log: list[list[str]], folder: Path, uninterrupted) -> None:
    """`log` of each start: they go on where the last checkpoint was, and lines and checkpoints are those of the one run."""
    whole, other = uninterrupted
    numbers = [[int(re.match(r"iteration +(\d+)/", line)[1]) for line in lines] for lines in log]
    assert numbers == [[1], [2], [3], [4, 5]]
    # Megatron's second line of any run averages in the first line's loss: it is another one in the run that goes through.
    same = [(start, lines[0]) for start, lines in enumerate(log) if start != 1]
    assert same == [(start, line) for start, line in enumerate(whole[:4]) if start != 1]
    for iteration in (1, 2, 3, 5):
        saved = f"saved/iter_{iteration:07}"
        assert pretrain_gpt_job.different(folder / saved, other / saved) == []


def test_a_job_restarts_at_once_three_times(server, data, tmp_path, uninterrupted):
    """On the same port, from its last checkpoint, as soon as its last rank has ended."""
    port, log = reserve_port(), []
    for start, kill in enumerate([*KILLED, {}]):
        ended = run(server, tmp_path / str(start), data + saving(tmp_path), fault=kill, port=port)
        assert [end.code for end in ended] == ([-9 if end.rank == kill["rank"] else 1 for end in ended] if kill else [0] * RANKS)
        log.append(pretrain_gpt_job.log(ended[-1].output))
    same_as_uninterrupted(log, tmp_path, uninterrupted(RANKS))


# ------------------------------------------------------------------------------------------------- under torchrun
def test_torchrun_restarts_the_job_three_times(data, tmp_path, full, uninterrupted):
    """A fault of another kind in each start; the fourth ends well. What was in the job's store of an earlier start does no harm."""
    ranks = RANKS if full else 2
    struck = [fault(1, "kill", "forward", microbatch=5), fault(0, "raise", "forward", microbatch=5), fault(ranks - 1, "exit", "finalize")]
    done, _ = faults_job.torchrun(tmp_path, data + saving(tmp_path), faults=[*struck, {}], ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = [faults_job.torchrun_outputs(tmp_path, start) for start in range(4)]
    assert all(len(ranks_of) == ranks for ranks_of in outputs)
    same_as_uninterrupted([pretrain_gpt_job.log(ranks_of[-1]) for ranks_of in outputs], tmp_path, uninterrupted(ranks))


TORCHRUN = {"kill": "SIGKILL", "_exit": "exitcode  : 3", "stop": "was lost", "raise": "ValueError: a fault on purpose", "exit": "SystemExit"}


@pytest.mark.parametrize("what", list(TORCHRUN))
def test_under_torchrun_a_report_and_the_summary_name_the_rank(data, tmp_path, table, full, what):
    """The agent ends the survivors at once; what they printed may be lost, the files are not."""
    if what == "_exit" and not full:
        pytest.skip("only with --all: seen as kill -9 is")
    ranks, rank = (RANKS, 1) if full else (2, 1)
    timeout = ["--rrfp-timeout", str(TIMEOUT)] if what == "stop" else []
    done, seconds = faults_job.torchrun(tmp_path, data + timeout, faults=[fault(rank, what, "forward", microbatch=5)], ranks=ranks)
    assert done.returncode == 1
    summary = done.stderr[done.stderr.index("FAILED"):]
    table.add(what, "steady state, under torchrun", [seconds])
    assert TORCHRUN[what] in summary or f"PipelineError: {name(rank)} was lost" in summary
    # Whoever had the time to write says who it was.
    reports = [text for each in range(ranks) if each != rank and (text := faults_job.report(tmp_path, each))]
    assert all(name(rank) in text.splitlines()[1] for text in reports) and (reports or what in ("raise", "exit", "_exit", "kill"))

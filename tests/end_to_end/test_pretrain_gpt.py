"""Whole trainings of a GPT by readiness, and the same under Megatron untouched apart from CPU mode: equal digit for digit.

The script is the unmodified pretrain_gpt.py of the newest checkout at MEGATRON_LM, or scripts/pretrain_gpt.py where there is
none. Dropout is on (Megatron's default, 0.1) in all of them.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

sys.path.insert(0, os.path.dirname(__file__))  # the helpers lie beside the test
import pretrain_gpt_job as job  # noqa: E402
from pretrain_gpt_job import ROOT, Trainings, value  # noqa: E402

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture(scope="module")
def data() -> list[str]:
    """Arguments of a tiny GPT on real text, without its batch size and number of iterations."""
    arguments = job.make_data()
    for name in ("--global-batch-size", "--train-iters"):
        at = arguments.index(name)
        del arguments[at : at + 2]
    return arguments


@pytest.fixture(scope="module")
def script() -> Path:
    if not job.trees():
        return job.OWN_SCRIPT
    return job.ready_tree(job.trees()[0]) / "pretrain_gpt.py"


@pytest.fixture(scope="module")
def server(script, data):
    return Trainings(script, data)


# 2 microbatches become 8 in the third iteration (thresholds are tokens), evaluation takes 6.
GROWING = ["--step-batch-size-schedule", "0:4 256:16", "--eval-global-batch-size", "12"]
# The same in 0.17, where evaluation takes as many as training in the end.
GROWING_017 = "--rampup-batch-size 4 12 8 --global-batch-size 16 --train-samples 40".split()
EIGHT = ["--global-batch-size", "16"]
WHOLE = [
    *GROWING,
    *"--train-iters 6 --eval-interval 3 --eval-iters 2 --save-interval 3 --ckpt-format torch_dist --num-workers 2".split(),
]
KINDS = {
    2: "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split(),
    4: ["--untie-embeddings-and-output-weights"],
}


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory):
    """whole(way, ranks): that training from the beginning, and its folder; run once."""
    folder, runs = tmp_path_factory.mktemp("whole"), {}

    def run(way, ranks):
        if (way, ranks) not in runs:
            place = folder / f"{way}{ranks}"
            runs[way, ranks] = server.run(way, place, *WHOLE, *KINDS[ranks], "--save", str(place / "saved"), ranks=ranks), place
        return runs[way, ranks]

    return run


# ------------------------------------------------------------------------------------------------- numbers
@pytest.mark.parametrize("ranks", [2, 4])
def test_log_and_checkpoints_are_those_of_megatron(whole, ranks):
    (theirs, their_folder), (ours, our_folder) = whole("megatron", ranks), whole("rrfp", ranks)
    assert "[rrfp]" not in theirs.text and "[rrfp] hint auto: announced over 1f1b" in ours.text
    assert ours.log == theirs.log
    for iteration in (3, 6):
        saved = f"saved/iter_{iteration:07}"
        assert job.different(their_folder / saved, our_folder / saved) == []
    # Controls: all is there, it changes, and the number of microbatches does.
    log = [line for line in ours.log if line.startswith("iteration")]
    assert [value(line, "global batch size") for line in log] == [4, 4, 16, 16, 16, 16]
    assert len({value(line, "lm loss") for line in log}) == len({value(line, "grad norm") for line in log}) == 6
    assert value(log[-1], "lm loss") < value(log[0], "lm loss") - 0.2
    validations = [line for line in ours.log if line.startswith("validation")]
    assert len(validations) >= 3 and all(re.search(r"lm loss value: [45]\.\d+E\+00", line) for line in validations)
    with_two, with_eight, evaluation = (f"with {n} microbatches: " in ours.text for n in (2, 8, 6))
    assert with_two and with_eight and evaluation
    assert job.different(our_folder / "saved/iter_0000003", our_folder / "saved/iter_0000006") != []


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_checkpoint_of_one_schedule_continues_under_the_other(server, whole, tmp_path, ranks):
    resumed = {}
    for way, source in (("megatron", "rrfp"), ("rrfp", "megatron")):
        _, folder = whole(source, ranks)
        arguments = [
            *WHOLE,
            *KINDS[ranks],
            "--load",
            str(folder / "saved"),
            "--ckpt-step",
            "3",
            "--save",
            str(tmp_path / way / "saved"),
        ]
        resumed[way] = server.run(way, tmp_path / way, *arguments, ranks=ranks)
    assert resumed["rrfp"].log == resumed["megatron"].log
    uninterrupted, folder = whole("megatron", ranks)
    # Megatron's second line of any run averages in the first line's loss, so that line is another one here.
    numbers = [re.match(r"iteration +(\d+)|", line)[1] for line in resumed["rrfp"].log]
    assert numbers[:3] == ["4", "5", "6"]
    assert [line for line, number in zip(resumed["rrfp"].log, numbers, strict=True) if number != "5"] == [
        line for line in uninterrupted.log if not re.match(r"iteration +[1235]/|validation loss at iteration 3 ", line)
    ]
    for way in resumed:
        assert job.different(folder / "saved/iter_0000006", tmp_path / way / "saved/iter_0000006") == []


def test_an_asynchronous_checkpoint_holds_what_was_there(server, whole, tmp_path):
    (theirs, folder) = whole("megatron", 2)
    later = ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore", "--save", str(tmp_path / "saved")]
    ours = server.run("rrfp", tmp_path, *WHOLE, *KINDS[2], *later, ranks=2)
    assert ours.log == theirs.log
    for iteration in (3, 6):
        saved = f"saved/iter_{iteration:07}"
        assert job.different(folder / saved, tmp_path / saved) == []


def both(server, folder, *arguments, ranks, pipeline=None, codes=None):
    """(Megatron's, ours)."""
    return [
        server.run(way, folder / way, *arguments, ranks=ranks, pipeline=pipeline, codes=codes) for way in ("megatron", "rrfp")
    ]


def test_fp16_skips_the_same_step(server, tmp_path):
    theirs, ours = both(
        server, tmp_path, *GROWING, *"--train-iters 4 --fp16 --initial-loss-scale 262144 --hysteresis 1".split(), ranks=2
    )
    assert ours.log == theirs.log
    skipped = [value(line, "number of skipped iterations") for line in ours.log]
    assert skipped[0] == 1 and skipped[-1] == 0
    assert value(ours.log[0], "lm loss") is None and value(ours.log[-1], "loss scale") < 262144


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--overlap-grad-reduce"], id="overlapped"),
        pytest.param(
            ["--overlap-grad-reduce", "--use-distributed-optimizer", "--overlap-param-gather"], id="distributed optimizer"
        ),
    ],
)
def test_two_data_parallel_pipelines(server, tmp_path, options):
    theirs, ours = both(
        server, tmp_path, *GROWING, "--train-iters", "5", "--ddp-bucket-size", "3000", *options, ranks=4, pipeline=2
    )
    assert ours.log == theirs.log and len(ours.log) == 5
    assert "data-parallel size: 2" in ours.text
    assert len({value(line, "grad norm") for line in ours.log}) == 5


NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()
EXPERTS = ("--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
           "--moe-aux-loss-coeff 0.01 --disable-bias-linear").split()
PARALLELISM = {
    "PP2xTP2+SP": (4, 2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    # The chunks of a rank share its random generator.
    "PP2xVPP2": (2, 2, ["--num-layers-per-virtual-pipeline-stage", "1", *NO_DROPOUT]),
    "EP2xPP2xDP2": (4, 2, EXPERTS),
}


@pytest.mark.parametrize("layout", PARALLELISM)
def test_every_kind_of_parallelism_trains_saves_and_resumes(server, tmp_path, layout, full):
    """Log and checkpoints are Megatron's at the same sizes; a checkpoint of each schedule continues under the other."""
    ranks, pipeline, options = PARALLELISM[layout]
    common = [*EIGHT, *"--save-interval 2 --ckpt-format torch_dist --eval-interval 4 --eval-iters 1".split(), *options]

    def train(way, folder, *more):
        return server.run(way, folder, *common, *more, "--save", str(folder / "saved"), ranks=ranks, pipeline=pipeline)

    theirs, ours = (train(way, tmp_path / way, "--train-iters", "4") for way in ("megatron", "rrfp"))
    assert "[rrfp] hint auto: announced over 1f1b" in ours.text and ours.log == theirs.log and len(ours.log) > 4
    assert len({value(line, "grad norm") for line in ours.log if line.startswith("iteration")}) == 4
    for iteration in (2, 4):
        saved = f"saved/iter_{iteration:07}"
        assert job.different(tmp_path / "megatron" / saved, tmp_path / "rrfp" / saved) == []
    if not full and ranks > 2:
        return
    load = ["--load", str(tmp_path / "megatron/saved"), "--ckpt-step", "2", "--train-iters", "4"]
    resumed = train("rrfp", tmp_path / "resumed", *load)
    assert [line for line in resumed.log if line.startswith("iteration")][0] == ours.log[2]
    assert job.different(tmp_path / "megatron/saved/iter_0000004", tmp_path / "resumed/saved/iter_0000004") == []


LAYOUT, CHUNKS = "--pipeline-model-parallel-layout", ["--num-virtual-stages-per-pipeline-rank", "2", *NO_DROPOUT]
BOTH_COUNT = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split".split()
# Ranks, options, and 1F1B's activations in flight, from which the number of chunks shows.
SPLITS = {
    "layout-uneven": (2, [LAYOUT, "Ettt|tL"], "2 1"),
    "layout-embedding-and-loss-alone": (4, [LAYOUT, "E|tt|tt|L"], "4 3 2 1"),
    "layout-two-chunks": (2, [LAYOUT, "E|ttt|t|L", *NO_DROPOUT], "5 3"),
    "layout-an-empty-chunk": (2, [LAYOUT, "Ett||t|tL", *NO_DROPOUT], "5 3"),
    # Behind the stage that predicts several tokens, messages are longer: Megatron asks for their shape.
    "layout-several-tokens-alone": (4, ["--mtp-num-layers", "1", LAYOUT, "Ett|tt|m|L"], "4 3 2 1"),
    # With tied embeddings Megatron never gets through building this one: the first rank would join their group twice.
    "layout-several-tokens-alone-two-chunks": (
        2, ["--mtp-num-layers", "1", "--untie-embeddings-and-output-weights", LAYOUT, "Ett|tt|m|L", *NO_DROPOUT], "5 3"),
    "virtual-stages": (2, CHUNKS, "5 3"),
    "virtual-stages-first-smaller": (2, [*CHUNKS, *"--num-layers 6 --decoder-first-pipeline-num-layers 2".split()], "5 3"),
    "virtual-stages-embedding-and-loss-count": (2, [*CHUNKS, "--num-layers", "6", *BOTH_COUNT], "5 3"),
    "first-smaller": (2, ["--decoder-first-pipeline-num-layers", "1"], "2 1"),
    "last-smaller": (2, ["--decoder-last-pipeline-num-layers", "1"], "2 1"),
    "embedding-counts": (2, ["--num-layers", "5", "--account-for-embedding-in-pipeline-split"], "2 1"),
    "embedding-and-loss-count": (2, BOTH_COUNT, "2 1"),
}


def both_split(server, folder, split):
    """Trains with the layers on the stages as `split` says; the logs are equal."""
    ranks, options, in_flight = SPLITS[split]
    theirs, ours = both(server, folder, *EIGHT, "--train-iters", "3", *options, ranks=ranks)
    assert f"with 8 microbatches: {in_flight} (Megatron's 1F1B: {in_flight})" in ours.text
    assert ours.log == theirs.log and len({value(line, "grad norm") for line in ours.log}) == 3, split


@pytest.mark.parametrize("split", SPLITS)
def test_layers_are_split_over_the_stages_in_every_way_that_megatron_has(server, tmp_path, split, full):
    if not full and split != "layout-two-chunks":
        pytest.skip("only with --all: reduced runs the one with most in it")
    both_split(server, tmp_path, split)


NO_TREE = pytest.param(
    None, marks=pytest.mark.skip(reason="MEGATRON_LM=DIR names no more Megatron-LM checkouts"), id="no-checkout"
)


@pytest.mark.parametrize("tree", [pytest.param(tree, id=tree.name) for tree in job.trees()[1:]] or [NO_TREE])
def test_earlier_releases(tree, data, tmp_path, full):
    if not full:
        pytest.skip("only with --all")
    server = Trainings(job.ready_tree(tree) / "pretrain_gpt.py", data)
    growing = GROWING_017 if job.release(tree) < (0, 18) else [*GROWING, "--train-iters", "4"]
    theirs, ours = both(server, tmp_path, *growing, *"--eval-interval 2 --eval-iters 2 --num-workers 2".split(), ranks=2)
    several = {name: both(server, tmp_path / name, *EIGHT, "--train-iters", "3", *options, ranks=ranks, pipeline=pipeline)
               for name, (ranks, pipeline, options) in PARALLELISM.items()}
    assert ours.log == theirs.log
    sizes = [value(line, "global batch size") for line in ours.log if line.startswith("iteration")]
    assert sizes == [4, 4, 16, 16] and len(ours.log) >= 6
    for name, (theirs, ours) in several.items():
        assert ours.log == theirs.log and len(ours.log) == 3, name


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tree", [pytest.param(tree, id=tree.name) for tree in job.trees()[1:]] or [NO_TREE])
def test_earlier_releases_split_layers_likewise(tree, data, tmp_path, full):
    if not full:
        pytest.skip("only with --all")
    server = Trainings(job.ready_tree(tree) / "pretrain_gpt.py", data)
    for split in SPLITS:
        both_split(server, tmp_path / split, split)


def test_the_unmodified_script_under_torchrun(script, whole, data, tmp_path, full):
    """The way a user starts it: torchrun, `python -m rrfp --cpu`, Megatron's own arguments."""
    ranks = 4 if full else 2
    theirs, _ = whole("megatron", ranks)
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "RRFP_REPORT_DIR": str(tmp_path)}
    # Every rank's output in a file of its own: on one terminal lines get mixed.
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--redirects",
        "3",
        "--log-dir",
        str(tmp_path / "logs"),
    ]
    command = [
        *torchrun,
        "--nproc-per-node",
        str(ranks),
        "-m",
        "rrfp",
        "--cpu",
        str(script),
        *data,
        *WHOLE,
        *KINDS[ranks],
        "--save",
        str(tmp_path / "saved"),
        "--pipeline-model-parallel-size",
        str(ranks),
        "--pipeline-schedule",
        "rrfp",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = [path.read_text() for path in sorted((tmp_path / "logs").rglob("stdout.log"))]
    assert len(outputs) == ranks and job.log("\n".join(outputs)) == theirs.log


# ------------------------------------------------------------------------------------------------- rerun state machine
RERUN = [
    *EIGHT,
    *"--train-iters 3 --rerun-mode validate_results --error-injection-rate 1 --save-interval 50 --ckpt-format torch_dist".split(),
]


def rerun_log(text: str) -> Counter:
    """Megatron's lines on reruns, in any order. A rerun's loss is printed after its memory was given up, so it says anything."""
    lines = re.findall(r"(?:WARNING|ERROR|INFO):megatron\.core\.rerun_state_machine:(.*)", text)
    return Counter(re.sub(r"tensor\(\[\S+\]", "tensor(freed", line) for line in lines)


@pytest.mark.parametrize("kind", ["transient_error", "persistent_error"])
def test_an_injected_error_ends_as_under_megatron(server, tmp_path, full, kind):
    """Megatron runs the iteration again. What then differs was a fault that passed; what stays is saved for another machine."""
    if kind == "transient_error" and not full:
        pytest.skip("only with --all: two trainings more")
    codes = {"transient_error": [17, 17], "persistent_error": [16, 16]}[kind]  # Megatron's own exit statuses
    runs = []
    for way in ("megatron", "rrfp"):
        arguments = [*RERUN, "--error-injection-type", kind, "--save", str(tmp_path / way / "saved")]
        runs.append(server.run(way, tmp_path / way, *arguments, ranks=2, codes=codes))
    theirs, ours = runs
    assert rerun_log(ours.text) == rerun_log(theirs.text)
    assert any("Injecting error" in line for line in rerun_log(ours.text))
    assert ours.log == theirs.log


# ------------------------------------------------------------------------------------------------- instruments
TRACED = [*EIGHT, "--train-iters", "3"]
M = 8


@pytest.fixture(scope="module")
def plain(server, tmp_path_factory):
    """Megatron's log of what the traced trainings train, over 4 stages."""
    return server.run("megatron", tmp_path_factory.mktemp("plain"), *TRACED, ranks=4).log


@pytest.fixture(scope="module")
def traced(server, tmp_path_factory):
    """traced(way, *options): that training and its timeline; run once."""
    from rrfp.trace.files import read

    runs = {}

    def run(way, *options):
        if (way, options) not in runs:
            folder = tmp_path_factory.mktemp(way)
            trained = server.run(way, folder, *TRACED, *options, "--rrfp-trace", str(folder / "trace"), ranks=4)
            runs[way, options] = trained, read(folder / "trace"), folder / "trace"
        return runs[way, options]

    return run


def calls(timeline):
    """(rank, call) of every rank, in order."""
    return [(rank, call) for rank, trace in sorted(timeline.ranks.items()) for call in trace.calls.values()]


@pytest.mark.parametrize("way", ["1f1b", "rrfp"])
@pytest.mark.parametrize("scenario", ["spikes", "links"])
def test_emulated_durations_and_delays_are_those_drawn(traced, plain, full, scenario, way):
    """One draw per action and message, whichever schedule runs them; it depends on seed and call alone."""
    from rrfp.megatron.padding import Emulation

    if scenario != "spikes" and not full:
        pytest.skip("only with --all")
    text = f"{scenario}:4:11"
    run, timeline, _ = traced(way, "--rrfp-emulate", text)
    assert run.log == plain
    said = rf"\[rrfp\] rank (\d): emulated durations: scenario {scenario}, forward 4 ms on average; (\d+) of (\d+) actions"
    summaries = re.findall(said, run.text)
    assert sorted((int(rank), int(total)) for rank, _, total in summaries) == [(rank, 3 * 2 * M) for rank in range(4)]
    emulation, sent, overruns, late = Emulation(text, stages=4), {}, Counter(), []
    for rank, call in calls(timeline):
        emulation.begin(call.number, M)
        for ran in call.actions:
            drawn = emulation._duration[ran.action.kind, ran.action.stage, ran.action.microbatch]
            assert ran.end - ran.start > drawn - 1e-4, (call.number, ran)
            overruns[rank] += ran.padded == 0
        sent |= {(call.number, message.edge, message.microbatch): message.time for message in call.sent}
    assert {int(rank): int(count) for rank, count, _ in summaries} == {rank: overruns[rank] for rank in range(4)}
    for _, call in calls(timeline):
        emulation.begin(call.number, M)
        for message in call.arrivals:
            drawn = emulation.delay(message.edge, message.microbatch)
            assert message.time - sent[call.number, message.edge, message.microbatch] > drawn - 1e-4, (
                call.number,
                message,
                drawn,
            )
            late.append(drawn)
    assert len(late) == 3 * 2 * 3 * M and sum(drawn > 0 for drawn in late) >= 3


def test_injected_jitter_hits_the_same_actions_under_both_schedules(traced, plain, full):
    if not full:
        pytest.skip("only with --all: two trainings more")
    hit = {}
    for way in ("1f1b", "rrfp"):
        run, timeline, _ = traced(way, "--rrfp-inject", "J1")
        assert run.log == plain
        ran = [(call.number, ran) for _, call in calls(timeline) for ran in call.actions]
        hit[way] = sorted((number, str(one.action)) for number, one in ran if one.padded > 0)
        # alpha x max(B, e) x (.5 + U(0, 1)) with alpha .5 and B 5 ms
        assert all(one.padded >= 0.5 * 0.005 * 0.5 for _, one in ran if one.padded > 0)
        counted = [
            tuple(map(int, found)) for found in re.findall(r"injected jitter J1: (\d+) of (\d+) actions were delayed", run.text)
        ]
        assert (
            len(counted) == 4 and sum(n for n, _ in counted) == len(hit[way]) and {total for _, total in counted} == {3 * 2 * M}
        )
    assert hit["1f1b"] == hit["rrfp"] and 5 < len(hit["rrfp"]) < 50  # a tenth of 192


@pytest.mark.parametrize("way", ["1f1b", "rrfp"])
def test_a_trace_adds_up_and_shows_the_limit(traced, way):
    from rrfp.cli import main
    from rrfp.mode import parse_mode
    from rrfp.placement import Placement

    _, timeline, folder = traced(way, "--rrfp-emulate", "spikes:4:11")
    assert not timeline.missing and not timeline.notes
    breakdowns = timeline.breakdowns()
    assert len(breakdowns) == 4 * 3
    for part in breakdowns:
        assert sum(part.parts().values()) == part.total > 0 and part.overlaps == 0
        [(stage, held)] = part.peak_in_flight.items()
        if part.call < 2:
            assert (stage, held) == (part.rank, 4 - part.rank)  # P - s, under limit auto, which measures, as under 1F1B
        mode = timeline.ranks[part.rank].calls[part.call].mode
        assert held <= (4 - part.rank if way == "1f1b" else parse_mode(mode).limits(Placement.looped(4), M)[part.rank])
        assert part.counts == {"F": M, "B": M}
    assert main(["trace", str(folder)]) == 0


def test_a_higher_limit_shows_too(traced, plain, full):
    """Control of the peaks above, and other hints and limits train the same."""
    if not full:
        pytest.skip("only with --all: a training more")
    run, timeline, _ = traced("rrfp", *"--rrfp-emulate spikes:4:11 --rrfp-limit 2p --rrfp-hint gpipe".split())
    assert run.log == plain
    assert {(part.rank, dict(part.peak_in_flight)[part.rank]) for part in timeline.breakdowns()} > {(0, 8)}


def test_evaluation_is_in_the_trace_of_both(traced, full):
    if not full:
        pytest.skip("only with --all: two trainings more")
    for way in ("1f1b", "rrfp"):
        _, timeline, _ = traced(way, "--eval-interval", "2", "--eval-iters", "1", "--eval-global-batch-size", "6")
        kinds = [(call.forward_only, call.microbatches, len(call.actions)) for call in timeline.ranks[1].calls.values()]
        assert kinds[:4] == [(False, M, 2 * M), (False, M, 2 * M), (True, 3, 3), (False, M, 2 * M)], way

"""Megatron's own fault features beside ours: each ends as it does under Megatron's schedule.

The rerun state machine's injected errors with exit statuses 16 and 17 are in tests/end_to_end/test_pretrain_gpt.py.
"""

import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))  # the helpers of whole trainings
import pretrain_gpt_job  # noqa: E402
from faults_job import SCRIPT  # noqa: E402
from pretrain_gpt_job import Trainings  # noqa: E402

from rrfp.comm.ports import reserve_port  # noqa: E402

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
RANKS = 2
WAYS = ("1f1b", "rrfp")


@pytest.fixture(scope="module")
def server():
    return Trainings(SCRIPT, [*pretrain_gpt_job.make_data(), "--train-iters", "4"], untouched=False)


def both(server, folder, *arguments, codes=None, fault=None):
    """(Megatron's schedule, ours), and that both logged the same."""
    runs = []
    for way in WAYS:
        struck = json.dumps(fault | {"mark": str(folder / f"{way}.mark")} if fault else {})
        more = ["--save", str(folder / way / "saved"), "--ckpt-format", "torch_dist", "--save-interval", "50"]
        runs.append(server.run(way, folder / way, *arguments, *more, ranks=RANKS, codes=codes, RRFP_TEST_FAULT=struck))
    assert runs[0].log == runs[1].log
    return runs


def saved(folder, way) -> list[str]:
    where = folder / way / "saved"
    return sorted(path.name for path in where.glob("iter_*")) if where.is_dir() else []


def rerun_lines(run) -> list[str]:
    """What the state machine said, without what differs from run to run."""
    return sorted(re.findall(r"(?:WARNING|ERROR|INFO):megatron\.core\.rerun_state_machine:(.*)", run.text))


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_signal_ends_the_job_in_good_order(server, tmp_path, rank):
    """--exit-signal-handler: SIGTERM of one rank, inside the schedule: all save and exit after that iteration."""
    fault = {"rank": rank, "what": "term", "where": "forward", "call": 1, "microbatch": 3}
    for way, run in zip(WAYS, both(server, tmp_path, "--exit-signal-handler", fault=fault), strict=True):
        assert [line[:22] for line in run.log] == ["iteration        1/   ", "iteration        2/   "]
        assert "exiting program after receiving SIGTERM" in run.text
        assert saved(tmp_path, way) == ["iter_0000002"]
        assert "failed" not in run.text and "was lost" not in run.text
    assert pretrain_gpt_job.different(*(tmp_path / way / "saved/iter_0000002" for way in WAYS)) == []


@pytest.mark.parametrize("option, last", [("--exit-interval 3", 3), ("--exit-duration-in-mins=-1", 1)])
def test_an_exit_that_was_asked_for(server, tmp_path, option, last):
    for way, run in zip(WAYS, both(server, tmp_path, *option.split()), strict=True):
        assert len(run.log) == last and saved(tmp_path, way) == [f"iter_{last:07}"]
        assert "was lost" not in run.text and "failed" not in run.text


def test_determinism_statistics(server, tmp_path):
    """--rerun-mode report_stats: every iteration runs twice, and nothing differs. (Megatron 0.19 takes no value of it; the script does.)"""
    theirs, ours = both(server, tmp_path, "--rerun-mode", "report_stats", fault={"rank": 0, "what": "", "where": "rerun mode"})
    assert rerun_lines(theirs) == rerun_lines(ours)
    assert len(ours.log) == 4 and any("REPORT_DETERMINISM_STATS" in line for line in rerun_lines(ours)), rerun_lines(ours)
    assert any("Stats on computation determinism" in line for line in rerun_lines(ours)), rerun_lines(ours)


def test_in_process_restart_is_refused_by_name(server, tmp_path):
    run = server.run("rrfp", tmp_path, "--inprocess-restart", ranks=1, world=RANKS, pipeline=RANKS, codes=[2])
    refused = [line for line in run.text.splitlines() if line.startswith("rrfp: ")]
    assert refused == ["rrfp: --pipeline-schedule rrfp with --inprocess-restart: after a failure every process ends, so that none waits for a "
                       "lost one, and a new one starts (torchrun --max-restarts N); use --pipeline-schedule 1f1b"]
    assert "Traceback" not in run.text


def test_straggler_detection(tmp_path, full):
    """--log-straggler: its report comes from the timers in Megatron's own script."""
    if not full:
        pytest.skip("only with --all: a script of its own, and two trainings more")
    if not pretrain_gpt_job.trees():
        pytest.skip("MEGATRON_LM=DIR names no Megatron-LM checkout")
    tree = pretrain_gpt_job.ready_tree(pretrain_gpt_job.trees()[0])
    server = Trainings(tree / "pretrain_gpt.py", [*pretrain_gpt_job.make_data(), "--train-iters", "2"])
    runs = both(server, tmp_path, "--log-straggler", "--straggler-ctrlr-port", str(reserve_port()))
    found = [len(re.findall("MnRtt/Rnk", run.text)) for run in runs]
    assert found[0] == found[1] > 0, runs[1].text[-3000:]

"""Megatron's own tests of its schedules, from a checkout at MEGATRON_LM, with our engine in its place.

They check no gradient. So the pipeline case of its determinism tests runs too, Megatron's schedule against ours, parameter by
parameter.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rrfp.comm.ports import reserve_port

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RANKS = 4
TESTS = "tests/unit_tests/pipeline_parallel/test_schedules.py"
BY_ENGINE = {  # test -> calls of our engine
    "test_get_forward_backward_func": 0,
    "test_deallocate_output_tensor": 0,
    "test_forward_backward_func_without_pipeline_parallel": 0,
    "test_forward_backward_func_with_pipeline_parallel": 1,
    "test_forward_backward_func_with_interleaving": 2,
    "test_forward_backward_func_with_uneven_interleaving": 2,
    "test_forward_backward_pipelining_without_interleaving_with_custom_pgs": 2,
    "test_forward_backward_no_pipelining_with_custom_pgs": 0,
}
# Excluded by name: with two pipelines, upstream's helper of the tests with groups of their own makes each pipeline's groups under one name,
# and not on all ranks at once. On gloo its ranks wait for those of the other pipeline, under Megatron's own schedule too.
BY_ENGINE_OF_EIGHT = {name: calls for name, calls in BY_ENGINE.items() if not name.endswith("_with_custom_pgs")}
pytestmark = pytest.mark.timeout(400)


def _tree() -> Path | None:
    """The newest checkout at MEGATRON_LM that has these tests (0.19)."""
    root = os.environ.get("MEGATRON_LM")
    if not root or not Path(root).is_dir():
        return None
    found = [
        path
        for path in (Path(root), *Path(root).iterdir())
        if (path / "tests/unit_tests/determinism/bit_exact_runner.py").is_file()
    ]
    return max(found, default=None, key=lambda path: path.name)


@pytest.fixture(scope="module")
def tree() -> Path:
    if _tree() is None:
        pytest.skip("MEGATRON_LM=DIR names no Megatron-LM checkout of 0.19 with its tests")
    return _tree()


def processes(tree, folder, command, *, ranks, **variables) -> tuple[list[int], list[str]]:
    """Run `command` on `ranks` processes, the tree (left as it is) first in the path. Exit statuses and outputs."""
    port = str(reserve_port())
    common = {
        "PYTHONPATH": os.pathsep.join(map(str, (tree, HERE, ROOT))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RRFP_REPORT_DIR": str(folder),
    } | variables
    launcher = [sys.executable, str(HERE / "megatron_suite_ranks.py"), str(folder), str(ranks), *command]
    with subprocess.Popen(launcher, cwd=folder, env=os.environ | common, stdout=subprocess.PIPE, text=True, start_new_session=True) as started:
        try:
            said, _ = started.communicate(timeout=300)
        except BaseException:
            os.killpg(started.pid, signal.SIGKILL)  # its ranks, too
            raise
    outputs = [path.read_text() if path.exists() else "" for path in (folder / f"out{rank}.txt" for rank in range(ranks))]
    assert started.returncode == 0, outputs
    return json.loads(said.splitlines()[-1]), outputs


def expected(tensor: int) -> dict[str, int]:
    return BY_ENGINE if tensor == 1 else BY_ENGINE_OF_EIGHT


def run_tests(tree, folder, schedule, *, tensor: int = 1) -> list[dict]:
    """Run upstream's file on every rank, with tensor parallelism of 1 or, as it stands, of 2; what each saw."""
    ranks, names = RANKS * tensor, expected(tensor)
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    internal: upstream's\n    flaky: upstream's\n    flaky_in_dev: upstream's\n"
    )
    command = [
        "-m",
        "pytest",
        "-c",
        str(folder / "pytest.ini"),
        "--noconftest",
        "-p",
        "megatron_suite_plugin",
        "-p",
        "no:cacheprovider",
        "-q",
        "--timeout",
        "100",
        *(f"{tree / TESTS}::{name}" for name in names),
    ]
    codes, outputs = processes(tree, folder, command, ranks=ranks, MEGATRON_SUITE_SCHEDULE=schedule, MEGATRON_SUITE_TP=str(tensor))
    assert codes == [0] * ranks, "\n".join(f"--- rank {rank} ---\n{output[-4000:]}" for rank, output in enumerate(outputs))
    assert all(f"{len(names)} passed" in output for output in outputs), outputs
    return [json.loads((folder / f"seen{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("tensor", [1, 2], ids=["TP1", "TP2"])
def test_megatrons_tests_pass_and_our_engine_ran_them(tree, tmp_path, full, tensor):
    if tensor > 1 and not full:
        pytest.skip("only with --all: eight processes")
    for seen in run_tests(tree, tmp_path, "rrfp", tensor=tensor):
        assert {name: found.get("engine", 0) for name, found in seen.items()} == expected(tensor)
        assert not any("megatron" in found for found in seen.values()), seen  # nothing was delegated


def test_without_our_schedule_megatrons_runs_them(tree, tmp_path, full):
    """Control of the count."""
    if not full:
        pytest.skip("only with --all")
    refused = {f"test_forward_backward_func_with_{name}": 3 for name in ("interleaving", "uneven_interleaving")}  # and the call with 7 microbatches, which Megatron's schedule was asked for
    for seen in run_tests(tree, tmp_path, "1f1b"):
        assert {name: found.get("megatron", 0) for name, found in seen.items()} == BY_ENGINE | refused
        assert not any("engine" in found for found in seen.values())


@pytest.mark.parametrize("ranks, dropout", [(2, 0.1), (4, 0.0), (4, 0.1)])
def test_gradients_are_bit_exact(tree, tmp_path, full, ranks, dropout):
    if (ranks, dropout) != (4, 0.1) and not full:
        pytest.skip("only with --all")
    codes, outputs = processes(tree, tmp_path, [str(HERE / "megatron_suite_determinism.py"), str(dropout), "same"], ranks=ranks)
    assert codes == [0] * ranks, "\n".join(output[-3000:] for output in outputs)
    assert all(int(re.search(r"bit-exact: (\d+) gradients", output)[1]) > 10 for output in outputs)


def test_another_order_of_backwards_is_not_bit_exact(tree, tmp_path):
    """Negative control: gradients add up in another order, and Megatron's runner sees it on every stage."""
    codes, outputs = processes(tree, tmp_path, [str(HERE / "megatron_suite_determinism.py"), "0.0", "reversed"], ranks=4)
    assert codes == [1] * 4
    assert all("AssertionError: Grad mismatch for chunk0." in output for output in outputs), "\n".join(
        output[-2000:] for output in outputs
    )

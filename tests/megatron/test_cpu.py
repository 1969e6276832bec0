"""CPU mode: what it refuses, what it changes (checks in one process, cpu_checks.py), and that a GPT trains in it."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from rrfp.comm.ports import reserve_port  # noqa: E402
from rrfp.errors import ConfigurationError  # noqa: E402
from rrfp.megatron import cpu  # noqa: E402

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHECKS = [
    node.name
    for node in ast.parse((HERE / "cpu_checks.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and any(getattr(d, "id", "") == "check" for d in node.decorator_list)
]
# later arguments win over scripts/tiny_gpt.args; half precision is slow on a CPU
SMALL = "--num-layers 2 --hidden-size 32 --seq-length 32 --max-position-embeddings 32 --global-batch-size 4 --train-iters 6"
RUNNER = """
import os, runpy, sys
from rrfp.megatron import cpu
cpu.enable()
cpu.patch_megatron()
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def environment(**variables) -> dict:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | variables


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the checks ran: holds results.json, and data/text.args for the trainings."""
    folder = tmp_path_factory.mktemp("cpu")
    done = subprocess.run(
        [sys.executable, str(HERE / "cpu_checks.py"), str(folder)], env=environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", CHECKS)
def test_check(folder, name):
    failure = json.loads((folder / "results.json").read_text())[name]
    assert failure is None, failure


def test_the_list_of_checks_is_not_empty():
    assert len(CHECKS) >= 14


def test_off_unless_asked_for():
    assert not cpu.is_enabled()
    script = "import rrfp.megatron.cpu, sys; sys.exit('torch' in sys.modules or 'megatron.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], env=environment(), timeout=60).returncode == 0


def test_too_late_is_refused(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("megatron")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel.random", object())
    with pytest.raises(ConfigurationError, match="before megatron is imported, but megatron.core.tensor_parallel.random .*--cpu"):
        cpu.enable()
    assert not cpu.is_enabled()


def test_patching_without_cpu_mode_is_refused():
    with pytest.raises(ConfigurationError, match="enable"):
        cpu.patch_megatron()


def train(folder, *arguments, ranks=2) -> dict:
    """Train a small GPT over `ranks` pipeline stages; {iteration: its log line}."""
    port = str(reserve_port())
    files = ROOT / "scripts/tiny_gpt.args", folder / "data/text.args"
    options = [option for text in (*(file.read_text() for file in files), SMALL) for option in text.split()]
    options += [*arguments, "--pipeline-model-parallel-size", str(ranks)]
    command = [sys.executable, "-c", RUNNER, str(ROOT / "scripts/pretrain_gpt.py"), *options]
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    workers, logs = [], [folder / f"train{rank}.log" for rank in range(ranks)]
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as out:
                variables = environment(RANK=str(rank), LOCAL_RANK=str(rank), **common)
                workers.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=variables, cwd=folder))
        codes = [worker.wait(timeout=100) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    text = "\n".join(log.read_text() for log in logs)
    assert codes == [0] * ranks, text[-4000:]
    return {int(number): line for number, line in re.findall(r"iteration +(\d+)/.*?\| (.*)", text)}


def value(line: str, name: str) -> float | None:
    found = re.search(rf"{name}: +(\S+)", line)
    return float(found[1]) if found else None


def losses(log: dict, first: int = 0) -> list:
    """Losses and gradient norms. Megatron's second line of a run averages in the first line's loss, so it is left out."""
    second = sorted(log)[1]
    return [(n, value(line, "lm loss"), value(line, "grad norm")) for n, line in sorted(log.items()) if n > first and n != second]


@pytest.mark.timeout(240)
def test_fp16_skips_a_step_recomputes_saves_and_resumes_digit_for_digit(folder):
    common = (
        "--fp16 --initial-loss-scale 262144 --loss-scale-window 100 --hysteresis 1 --num-workers 2 --ckpt-format torch_dist"
        " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ).split()
    whole = train(folder, *common, "--save", str(folder / "whole"), "--save-interval", "3")
    assert value(whole[1], "number of skipped iterations") == 1 and value(whole[1], "lm loss") is None
    scales = [value(whole[n], "loss scale") for n in (1, 3)]
    assert scales[1] <= scales[0] < 262144
    assert value(whole[6], "lm loss") < 5.6 and value(whole[6], "number of skipped iterations") == 0  # control: others are taken
    (folder / "whole/latest_checkpointed_iteration.txt").write_text("3")
    resumed = train(folder, *common, "--load", str(folder / "whole"))
    assert sorted(resumed) == [4, 5, 6]
    expected = [row for row in losses(whole, first=3) if row[0] != 5]
    assert losses(resumed) == expected
    assert None not in expected[0] and len({loss for _, loss, _ in expected}) == 2  # control: equal is not constant, nor absent


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_asynchronous_saving_writes_what_was_there(folder, full):
    if not full:
        pytest.skip("only with --all: two trainings more")
    for name, how in ("now", []), ("later", ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]):
        save = ["--save", str(folder / name), "--save-interval", "3", "--ckpt-format", "torch_dist"]
        train(folder, "--bf16", *save, *how)
    now, later = (checkpoint(folder / name / "iter_0000003") for name in ("now", "later"))
    assert set(now) == set(later) and len(now) > 20
    assert [name for name in now if not now[name].equal(later[name])] == []
    after = checkpoint(folder / "now/iter_0000006")
    assert not after["embedding.word_embeddings.weight"].equal(now["embedding.word_embeddings.weight"])  # control


def checkpoint(path: Path) -> dict:
    """The tensors of a torch_dist checkpoint."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata.items()
    tensors = {name: torch.empty(m.size, dtype=m.properties.dtype) for name, m in stored if isinstance(m, TensorStorageMetadata)}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors

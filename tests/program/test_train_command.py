"""`rrfp program run`: training from a file on real processes gives one process' losses; what cannot run is one line with the way out."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rrfp.cli import main
from rrfp.errors import PipelineError
from rrfp.program.files import read_dag, read_program, write_program
from rrfp.program.hint_rows import hint_of
from rrfp.program.run import _next
from rrfp.program.workload import PythonModel

ROOT = Path(__file__).parents[2]
(CODE,) = re.findall(r"```python\n(# my_model.py\n.*?)```", (ROOT / "docs/programs.md").read_text(), re.S)
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With the page's model in it, and a program for two ranks."""
    (tmp_path / "my_model.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def build(capsys, *words):
    status = main(["program", "build", *map(str, words)])
    out, error = capsys.readouterr()
    assert (status, error) == (0, ""), error
    return out


def train(*words, ranks=None):
    """Under torchrun, or `--local`."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    done = subprocess.run([sys.executable, *start, "-m", "rrfp", "program", "run", *map(str, words)], env=ENVIRONMENT, text=True, timeout=600,
                          capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def one_process(model: PythonModel, *, steps, replicas, microbatches):
    """Mean losses of all microbatches."""
    workload, found = model.make(), []
    optimizer = workload.optimizer(list(workload.model.parameters()))
    batches = [workload.batches(replica) for replica in range(replicas)]
    for _ in range(steps):
        losses = []
        for each in batches:
            batch = next(each)
            losses += [workload.loss(workload.model, dict(zip(batch, pieces))) for pieces in zip(*(v.chunk(microbatches) for v in batch.values()))]
        loss = sum(losses) / len(losses)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.timeout(900)
def test_the_pages_model_trains_under_torchrun(folder, capsys):
    out = build(capsys, "1f1b", "one.json", "--ranks", 2, "--microbatches", 4, "--model", "my_model.py:make")
    assert out == "program: one.json (torchrun --nproc-per-node 2 -m rrfp program run one.json)\n"
    out = train("one.json", "--steps", 4, "--mode", "strict", "--json", "result.json", "--trace", "traces", ranks=2)
    result = json.loads(Path("result.json").read_text())
    wanted = one_process(read_program("one.json").model, steps=4, replicas=1, microbatches=4)
    assert result["losses"] == pytest.approx(wanted, abs=1e-6)
    assert f"step 4: loss {result['losses'][3]:.6f}\n" in out and " samples/s in all; memory: the most resident in the process" in out
    assert [(row["rank"], row["pipeline_rank"], row["unit"]) for row in result["ranks"]] == [(0, 0, "samples"), (1, 1, "samples")]
    assert all(row["rate"] > 0 and row["peak_bytes"] > 2**26 for row in result["ranks"])
    assert result["ranks"][0]["activations"] == 2 and result["ranks"][1]["activations"] == 1, "1F1B's own"
    assert sorted(path.name for path in Path("traces/pipeline0").glob("rank*.jsonl")) == ["rank0.jsonl", "rank1.jsonl"]


@pytest.mark.timeout(900)
def test_an_example_with_experts_trains_on_four_local_processes(folder, capsys):
    build(capsys, "dualpipev", "dual.json", "--ranks", 2, "--microbatches", 4, "--replicas", 2, "--experts", "--model",
          f"{ROOT}/scripts/programs/tiny_moe.py:make")
    out = train("dual.json", "--local", "--steps", 3, "--json", "result.json")
    result = json.loads(Path("result.json").read_text())
    wanted = one_process(read_program("dual.json").model, steps=3, replicas=2, microbatches=4)
    assert result["losses"] == pytest.approx(wanted, abs=1e-5)
    assert [(row["pipeline_rank"], row["replica"]) for row in result["ranks"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert " tokens/s in all" in out and result["mode"] == "ready"


def test_a_program_that_names_python_comes_back(folder):
    model = PythonModel("my_model.py:make", {"stages": 3}, folder=folder)
    write_program(folder / "p.json", [], {"python": model.python, "arguments": dict(model.arguments)})
    assert read_program(folder / "p.json").model == model
    assert [segment.name for segment in read_dag(folder / "p.json").segments.values()] == ["PP0", "PP1", "PP2"]


def test_its_order_is_a_hint_without_running_it(folder, capsys):
    for experts in ((), ("--replicas", "2", "--experts")):
        words = ("dualpipev", "--ranks", "2", "--microbatches", "4", *experts)
        build(capsys, *words, "outline.json")
        document = json.loads(Path("outline.json").read_text())
        for model in ({"python": "nowhere.py:make"}, None):
            Path("named.json").write_text(json.dumps({**({"model": model} if model else {}), "directives": document["directives"]}))
            assert hint_of("named.json").rows == hint_of("outline.json").rows


def refused(capsys, *words):
    status = main(["program", *map(str, words)])
    out, error = capsys.readouterr()
    assert status == 2 and out == "" and error.count("\n") == 1
    return error.removeprefix("rrfp program: ").strip()


def test_what_cannot_run_is_refused_with_the_way_out(folder, capsys, monkeypatch):
    build(capsys, "1f1b", "one.json", "--ranks", 2, "--microbatches", 4, "--model", "my_model.py:make")
    build(capsys, "1f1b", "outline.json", "--ranks", 2)
    start = "start it with `torchrun --nproc-per-node 2 -m rrfp program run one.json`"
    assert refused(capsys, "run", "one.json") == f"one.json: runs on 2 processes: {start}, or on this host with --local"
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert refused(capsys, "run", "one.json") == f"one.json: runs on 2 processes, and this job has 3: {start}"
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        main(["program", "run", "one.json"])
    assert capsys.readouterr().err == "", "a refusal of every rank is said once"
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert refused(capsys, "run", "one.json", "--local").startswith("--local: starts the processes, and this is one of torchrun's already;")
    assert refused(capsys, "run", "outline.json").startswith("outline.json: its model is an outline without mathematics; name your own: ")
    write_program("bare.json", [])
    assert refused(capsys, "run", "bare.json", "--local").startswith("bare.json: describes no model; name your own: ")


@pytest.mark.parametrize("model, message", [
    ("none.py:make", "model none.py:make: there is no file none.py; write FILE.py:FUNCTION, relative to the program's file"),
    ("my_model.py:build", "model my_model.py:build: my_model.py has no function 'build'; name the one that returns a Workload"),
    ("my_model.py", "--model my_model.py: names no function; write FILE.py:FUNCTION"),
    ("my_model.py:Chain", "model my_model.py:Chain: returned a Chain; it must return an rrfp.program.workload.Workload"),
    ("fixed.py:make", "place {PP=2}: {PP=2}: matches nothing: the nodes have PP = 0, 1"),
])  # fmt: skip
def test_a_model_that_does_not_fit_is_refused_when_the_file_is_built(folder, capsys, model, message):
    (folder / "fixed.py").write_text(CODE.replace("def make(stages=2)", "def make()").replace("Chain(stages)", "Chain(2)"))
    found = refused(capsys, "build", "1f1b", "p.json", "--ranks", 3 if "fixed" in model else 2, "--model", model)
    assert found.startswith(message) and not (folder / "p.json").exists()


@pytest.mark.parametrize("old, new, line", [
    ("torch.optim.SGD(parameters, lr=0.1)", "torch.optim.Muon(parameters)", "optimizer: Muon: looks at a parameter as a whole, and with replicate:"
     " shard_optimizer it would get flat shards; take one that treats each number for itself (SGD, Adam, AdamW), or leave the sharding out"),
    ("    torch.manual_seed(0)", "    import os\n    from rrfp.errors import ConfigurationError\n    if os.environ.get('RANK') == '3':\n"
     "        raise ConfigurationError('on purpose')\n    torch.manual_seed(0)", "on purpose"),
], ids=["every", "third"])  # fmt: skip
def test_what_ranks_refuse_is_said_once(folder, capsys, old, new, line):
    """Whether every rank refuses, or one that is not the first."""
    assert CODE.count(old) == 1
    (folder / "my_model.py").write_text(CODE.replace(old, new))
    build(capsys, "1f1b", "one.json", "--ranks", 2, "--microbatches", 4, "--replicas", 2, "--zero", 1, "--model", "my_model.py:make")
    done = subprocess.run([sys.executable, "-m", "rrfp", "program", "run", "one.json", "--local"], env=ENVIRONMENT, text=True, timeout=300,
                          capture_output=True)
    assert done.returncode != 0 and [each for each in done.stderr.splitlines() if each.startswith("rrfp program: ")] == [f"rrfp program: {line}"]


def test_data_that_ends_is_refused():
    """By whoever it happens to: other replicas may have more."""
    with pytest.raises(PipelineError, match="--steps: model m.py:make has batches for 3 steps only; ask for fewer"):
        _next(iter(()), 3, PythonModel("m.py:make"))
    assert _next(iter([{"x": torch.ones(1)}]), 0, PythonModel("m.py:make"))["x"].item() == 1.0

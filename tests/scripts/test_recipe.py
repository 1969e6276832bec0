"""scripts/recipe.py: what presets say, what would run, on how many processes and machines; every preset's dry run. Nothing is started."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rrfp.balance.arguments import read_model
from rrfp.balance.table import balance
from rrfp.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
SPECIFICATION = importlib.util.spec_from_file_location("recipe", ROOT / "scripts/recipe.py")
recipe = sys.modules["recipe"] = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(recipe)
PAPER = {
    "gpt3-large": {"1/8/1": 64, "1/16/1": 64, "2/8/1": 64, "2/16/1": 64},
    "qwen3-1.7b+vit-h": {"1/8/1": 192, "1/16/1": 192, "2/8/1": 192, "2/16/1": 192},
    "qwen3-4b+vit-big": {"1/8/1": 192, "1/16/1": 192, "2/8/1": 96, "2/16/1": 96},
    "llama3-8b+vit-5b": {"1/32/1": 64, "2/16/1": 64, "2/8/2": 64},
    "qwen3-32b+internvit": {"1/64/1": 64, "2/32/1": 64, "2/16/2": 64},
    "llama3-70b+vit-22b": {"2/64/1": 64, "2/32/2": 64},
}
"""The RRFP paper's tables 1 and 2: TP/PP/DP -> global batch."""
ROWS = [f"{name}:{layout}" for name, layouts in PAPER.items() for layout in layouts]
BILLIONS = {
    "gpt3-large": (0.760, None), "qwen3-1.7b+vit-h": (1.72, 0.632), "qwen3-4b+vit-big": (4.02, 1.84), "llama3-8b+vit-5b": (8.03, 5.0),
    "qwen3-32b+internvit": (32.8, 5.54), "llama3-70b+vit-22b": (70.6, 21.7),
}
"""Published sizes of the language model and of the vision tower."""


def made(preset: str, *own: str, kind: str | None = None, cpu: bool = False, **environment: str):
    return recipe.recipe(kind or ("vlm" if "+" in preset else "gpt"), own, preset=preset, cpu=cpu, environment=environment)


def value(arguments, option: str) -> str:
    """The last one, which wins."""
    return [word for before, word in zip(arguments, arguments[1:]) if before == option][-1]


# -------------------------------------------------------------------------------------------------------------- presets
def test_the_presets_are_the_papers():
    found = recipe.presets()
    assert {name: list(preset.layouts) for name, preset in found.items()} == {name: list(layouts) for name, layouts in sorted(PAPER.items())}
    for row in ROWS:
        name, layout = row.split(":")
        run, (tensor, pipeline, data) = made(row), layout.split("/")
        assert run.world == int(tensor) * int(pipeline) * int(data)
        assert value(run.arguments, "--tensor-model-parallel-size") == tensor and value(run.arguments, "--pipeline-model-parallel-size") == pipeline
        assert value(run.arguments, "--global-batch-size") == str(PAPER[name][layout]) and value(run.arguments, "--micro-batch-size") == "1"
        assert ("--sequence-parallel" in run.arguments) == (tensor == "2")


@pytest.mark.parametrize("name", PAPER)
def test_models_have_their_published_sizes(name):
    stages = read_model(made(name).arguments).stages
    parts = [part for stage in stages for part in stage]
    language, vision = BILLIONS[name]
    held = sum(part.parameters.total - part.parameters.copy for part in parts if part.name in "EtL")
    assert held / 1e9 == pytest.approx(language, rel=0.01)
    if vision:
        seen = sum(part.parameters.total for part in parts if part.name in "Pv")
        assert seen / 1e9 == pytest.approx(vision, rel=0.02)


@pytest.mark.parametrize("row", ROWS)
def test_layouts_are_as_even_as_can_be(row):
    arguments = made(row).arguments
    model, best = read_model(arguments), read_model(arguments, even=True)
    assert len(model.stages) == int(row.split(":")[1].split("/")[1])
    assert balance(model).busiest.share == pytest.approx(balance(best).busiest.share)


@pytest.mark.parametrize("row", ROWS)
def test_dry_runs(row, capsys):
    kind = "vlm" if "+" in row else "gpt"
    assert recipe.main([kind, "--preset", row, "--dry-run", "--pipeline-schedule", "rrfp", "--train-iters", "7"]) == 0
    command, _, table = capsys.readouterr().out.partition("\n\n")
    words = shlex.split(command.replace("\\\n", " "))
    run = made(row, "--pipeline-schedule", "rrfp", "--train-iters", "7")
    assert words == recipe.command(run, {}) and words[0] == "torchrun" and words[-4:] == ["--pipeline-schedule", "rrfp", "--train-iters", "7"]
    lines = [line for line in table.splitlines() if re.match(r"\d+ ", line)]
    assert len(lines) == int(row.split(":")[1].split("/")[1]) and "billion parameters" in table and "busiest: stage" in table
    assert ("8 images" in table) == (kind == "vlm")


def test_a_dry_run_takes_the_options_of_rrfp_balance(capsys, tmp_path):
    figures = tmp_path / "figures.json"
    assert recipe.main(["vlm", "--dry-run", "--images", "3", "5", "--lr", "1", "--suggest", "--json", str(figures)]) == 0
    command, _, table = capsys.readouterr().out.partition("\n\n")
    assert "FLOP 3 images" in table and "FLOP 5 images" in table and "2.5 images" not in table and "layout whose busiest stage is lightest" in table
    assert "--lr 1" in command and not any(option in command for option in ("--images", "--suggest", "--json")) and figures.is_file()


def test_images_of_a_model_without_a_vision_tower_are_refused(capsys):
    assert recipe.main(["gpt", "--preset", "gpt3-large", "--dry-run", "--images", "2"]) == 2
    assert capsys.readouterr().err == "rrfp: --images: these arguments have no vision tower (--vit-num-layers); leave it out\n"


def test_a_dry_run_that_nobody_reads_on_ends_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, str(ROOT / "scripts/recipe.py"), "vlm", "--dry-run"], stdout=writer, stderr=subprocess.PIPE, text=True,
                          timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_tensor_parallel_heads_divide():
    """InternViT's 25 heads can't be halved."""
    for row in ROWS:
        arguments = made(row).arguments
        for option in ("--num-attention-heads", *(["--vit-num-attention-heads"] if "+" in row else [])):
            assert int(value(arguments, option)) % int(value(arguments, "--tensor-model-parallel-size")) == 0, row


# -------------------------------------------------------------------------------------------------------------- commands
def test_a_layout_may_be_written_as_the_paper_does():
    assert made("gpt3-large:2/16").arguments == made("gpt3-large:2/16/1").arguments
    assert made("gpt3-large").arguments == made("gpt3-large:1/8/1").arguments


def test_own_data_replaces_mock_data():
    assert "--mock-data" in made("gpt3-large").arguments
    assert "--mock-data" not in made("gpt3-large", "--data-path", "mine").arguments


def test_processes_follow_from_the_sizes():
    assert made("tiny", kind="gpt").world == 4 and made("tiny", kind="gpt", STAGES="2").world == 2
    assert made("tiny", "--tensor-model-parallel-size", "2", kind="gpt").world == 8
    assert made("tiny", "--context-parallel-size=2", kind="gpt", REPLICAS="3").world == 24
    assert made("llama3-8b+vit-5b:2/8/2").world == 32


def test_one_machine_or_several():
    small, large = made("gpt3-large"), made("llama3-70b+vit-22b")
    assert recipe.command(small, {})[:4] == ["torchrun", "--standalone", "--nproc-per-node", "8"]
    words = recipe.command(large, {"NODE_RANK": "3", "MASTER_ADDR": "first"})
    assert words[:11] == "torchrun --nproc-per-node 8 --nnodes 16 --node-rank 3 --master-addr first --master-port 29500".split()
    assert recipe.command(large, {"NPROC": "4"})[2] == "4" and recipe.command(large, {"NPROC": "4"})[4] == "32"
    # On a CPU all processes are on this machine.
    words = recipe.command(made("tiny", kind="gpt", cpu=True, STAGES="16"), {})
    assert words[:6] == ["torchrun", "--standalone", "--nproc-per-node", "16", "-m", "rrfp"] and words[6] == "--cpu"


def test_users_arguments_come_last_and_win():
    run = made("gpt3-large", "--lr", "1", "--pipeline-model-parallel-size", "4")
    assert run.arguments[-4:] == ("--lr", "1", "--pipeline-model-parallel-size", "4") and run.world == 4
    assert value(run.arguments, "--lr") == "1"


def test_several_machines_need_their_names(capsys, monkeypatch):
    for name in ("NODE_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert recipe.main(["gpt", "--preset", "gpt3-large:1/16/1"]) == 2
    assert "NODE_RANK is not set: 16 processes are for several machines; run this on each of them" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "says"), [
    (["gpt", "--preset", "gpt5"], "--preset gpt5: no such preset; choose one of tiny, gpt3-large"),
    (["gpt", "--preset", "qwen3-1.7b+vit-h"], "is for scripts/pretrain_vlm.sh"),
    (["gpt", "--preset", "gpt3-large:4/4/4"], "is not prepared for that TP/PP/DP; choose one of 1/8/1, 1/16/1, 2/8/1, 2/16/1"),
    (["gpt", "--preset"], "--preset: needs a name behind it; choose one of tiny, gpt3-large"),
    (["vlm", "--preset", "--dry-run"], "--preset: needs a name behind it; choose one of tiny, llama3-70b+vit-22b"),
    (["gpt", "--preset=", "--cpu"], "--preset: needs a name behind it"),
    (["gpt", "--dry-run=yes"], "--dry-run=yes: takes no value; give --dry-run, or leave it out"),
    (["gpt", "--presets", "--dry-run"], "--presets: prints a list and does nothing else; give it alone"),
    (["vlm", "--cpu", "--images", "2"], "--images: says what --dry-run shows; add --dry-run, or leave it out"),
    (["gpt", "--suggest"], "--suggest: says what --dry-run shows; add --dry-run"),
    (["gpt", "--json", "x.json"], "--json: says what --dry-run shows; add --dry-run"),
    (["gpt", "--preset", "gpt3-large", "--tensor-model-parallel-size", "two"], "--tensor-model-parallel-size two: must be a whole number"),
    (["vlm", "--preset", "qwen3-1.7b+vit-h"], "--preset qwen3-1.7b+vit-h: trains on your images; give --vlm-data"),
    (["vlm", "--vlm-data", "/nonexistent"], "--vlm-data /nonexistent: is neither digits, digits-blank nor a folder that `energon prepare`"),
    (["vlm", "--cpu", "--freeze", "all"], "--freeze all: leaves nothing to train; take something out with --unfreeze, or freeze less"),
    (["vlm", "--cpu", "--freeze", "("], "--freeze (: is no regular expression"),
    (["rnn"], "rnn: must be gpt or vlm"),
    ([], "nothing: must be gpt or vlm"),
])
def test_refusals(arguments, says, capsys):
    assert recipe.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("rrfp: ") and says in said and said.count("\n") == 1


def test_a_machine_count_that_does_not_divide():
    with pytest.raises(ConfigurationError, match="NNODES=3: 8 processes can't be spread evenly"):
        recipe.command(made("gpt3-large"), {"NNODES": "3"})
    with pytest.raises(ConfigurationError, match="STAGES=four: must be a whole number of at least 1"):
        made("tiny", kind="gpt", STAGES="four")


@pytest.mark.parametrize(("text", "says"), [
    ("--lr 1\n", "has no layout"),
    ("[1/2/1]\nlr 1\n", r"line 2: 'lr 1' is neither an argument \(--\.\.\.\) nor a layout"),
    ("[1/2]\n", r"line 1: '\[1/2\]' is neither"),
])
def test_bad_preset_files(tmp_path, text, says):
    (tmp_path / "mine.args").write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        recipe.read_preset(tmp_path / "mine.args")


def test_the_list_of_presets(capsys):
    assert recipe.main(["vlm", "--presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["tiny", *sorted(name for name in PAPER if "+" in name)]
    assert "TP/PP/DP 2/64/1, 2/32/2" in capsys.readouterr().out or any("TP/PP/DP 2/64/1, 2/32/2" in line for line in lines)


@pytest.mark.timeout(330)
def test_a_dry_run_needs_no_torch(tmp_path):
    """Nor megatron, nor anything else that is to be installed for training."""
    for package in ("torch", "megatron", "numpy", "zmq"):
        (tmp_path / f"{package}.py").write_text(f"raise AssertionError('{package} was imported')\n")
    done = subprocess.run([sys.executable, str(ROOT / "scripts/recipe.py"), "gpt", "--preset", "gpt3-large", "--dry-run"], capture_output=True,
                          text=True, timeout=300, env=os.environ | {"PYTHONPATH": f"{tmp_path}"})
    assert done.returncode == 0 and "busiest" in done.stdout, done.stderr

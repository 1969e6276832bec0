"""What the patches do: the same in every release, Megatron untouched unless asked, the flag native where rrfp is installed."""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "patches").glob("*.patch"))


def changed(name: str, sign: str) -> dict[str, str]:
    """File -> the lines that a patch adds (`+`) or removes (`-`)."""
    files = {}
    for part in re.split(r"^diff .*\n", (ROOT / "patches" / f"{name}.patch").read_text(), flags=re.MULTILINE)[1:]:
        path = re.search(r"^\+\+\+ b/(\S+)$", part, re.MULTILINE)[1]
        lines = part.split("\n")[2:]
        files[Path(path).name] = "\n".join(line[1:] for line in lines if line.startswith(sign))
    return files


def test_every_release_gets_the_same_change():
    assert len(NAMES) == 3
    for sign in "+-":
        assert changed(NAMES[0], sign) == changed(NAMES[1], sign) == changed(NAMES[2], sign)


def test_it_is_small():
    removed = changed(NAMES[0], "-")
    assert removed == {"schedules.py": "        if vp_size is not None:", "arguments.py": "", "training.py": ""}
    assert sum(text.count("\n") + 1 for text in changed(NAMES[0], "+").values()) <= 60


@pytest.fixture
def arguments():
    """The function that the patch adds to arguments.py, alone."""
    added = changed(NAMES[0], "+")["arguments.py"]
    source = added[added.index("def _add_pipeline_schedule_args"):]
    namespace = {"argparse": argparse, "importlib": importlib}
    exec(source, namespace)  # noqa: S102
    return namespace["_add_pipeline_schedule_args"]


def test_with_rrfp_the_flags_are_native_and_not_added_twice(arguments):
    from rrfp.megatron.arguments import add_arguments

    parser = arguments(argparse.ArgumentParser(allow_abbrev=False))
    assert parser.parse_args(["--pipeline-schedule", "rrfp"]).pipeline_schedule == "rrfp"
    assert parser.parse_args([]).pipeline_schedule == "1f1b"
    add_arguments(parser)  # as the launcher does; argparse would raise for a flag given twice


def test_without_rrfp_there_is_one_clear_line(arguments, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    parser = arguments(argparse.ArgumentParser())
    assert parser.parse_args([]).pipeline_schedule == "1f1b"
    assert parser.parse_args(["--pipeline-schedule", "1f1b"]).pipeline_schedule == "1f1b"
    with pytest.raises(SystemExit):
        parser.parse_args(["--pipeline-schedule", "rrfp"])
    assert "rrfp needs the rrfp package, which is not installed here" in capsys.readouterr().err
    assert "{1f1b,rrfp}" in parser.format_help()


@pytest.mark.parametrize(
    "args, installs",
    [
        (dict(), False),  # arguments from a YAML file hold no such flag
        (dict(pipeline_schedule="1f1b"), False),
        (dict(pipeline_schedule="1f1b", rrfp_trace=None, rrfp_emulate=None, rrfp_inject=None), False),
        (dict(pipeline_schedule="rrfp"), True),
        (dict(pipeline_schedule="1f1b", rrfp_trace="DIR"), True),
        (dict(pipeline_schedule="1f1b", rrfp_emulate="uniform"), True),
    ],
)
def test_rrfp_is_imported_only_when_asked_for(monkeypatch, args, installs):
    installed = []
    fake = ModuleType("rrfp")
    fake.megatron = ModuleType("rrfp.megatron")
    fake.megatron.install_from_args = installed.append
    monkeypatch.setitem(sys.modules, "rrfp", fake)
    monkeypatch.setitem(sys.modules, "rrfp.megatron", fake.megatron)
    args = SimpleNamespace(**args)
    exec(textwrap.dedent(changed(NAMES[0], "+")["training.py"]), {"args": args})  # noqa: S102
    assert installed == [args] * installs


IN_THE_TREE = """
import argparse, sys
from unittest.mock import MagicMock
try:
    import yaml
except ImportError:  # Megatron asks for it on import; nothing here reads a file with it
    sys.modules["yaml"] = MagicMock()
from megatron.core.pipeline_parallel import schedules as s
own, interleaved = s.forward_backward_pipelining_without_interleaving, s.forward_backward_pipelining_with_interleaving
get, none = s.get_forward_backward_func, s.forward_backward_no_pipelining
def check(without, with_): assert get(2, None) is without and get(2, 2) is with_ and get(1, None) is none
check(own, interleaved)
mine, mine_interleaved = (lambda: 0), (lambda: 1)
s.register_pipeline_schedule("mine", mine, mine_interleaved)
check(own, interleaved)
s.select_pipeline_schedule("mine")
check(mine, mine_interleaved)
try:
    s.select_pipeline_schedule("other")
except ValueError as error:
    assert "unknown pipeline schedule 'other': known ['mine']" in str(error)
else:
    raise AssertionError
check(mine, mine_interleaved)
s.select_pipeline_schedule(None)
check(own, interleaved)
# A tool that overwrites Megatron's functions still works.
s.forward_backward_pipelining_without_interleaving = mine
check(mine, interleaved)
from megatron.training import arguments, training
parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
print("schedule:", parser.parse_args(sys.argv[1:]).pipeline_schedule)
"""


@pytest.mark.timeout(300)  # each run imports all of Megatron
def test_a_real_tree(apply, real_tree, tmp_path):
    pytest.importorskip("torch")
    tree = tmp_path / "tree"
    shutil.copytree(real_tree / "megatron", tree / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    clean = {path: path.read_bytes() for path in tree.rglob("*.py")}
    assert apply.main([str(tree)]) == 0

    def run(with_rrfp, *arguments):
        path = os.pathsep.join([str(tree)] + [str(ROOT)] * with_rrfp)
        return subprocess.run([sys.executable, "-W", "ignore", "-c", IN_THE_TREE, *arguments], cwd=tmp_path, timeout=90,
                              env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)  # fmt: skip

    result = run(True, "--pipeline-schedule", "rrfp")
    assert result.returncode == 0 and "schedule: rrfp" in result.stdout, result.stderr[-3000:]
    if subprocess.run([sys.executable, "-c", "import rrfp"], cwd=tmp_path, capture_output=True, timeout=60).returncode:
        result = run(False, "--pipeline-schedule", "rrfp")
        assert result.returncode == 2 and "rrfp needs the rrfp package" in result.stderr, result.stderr[-3000:]
        assert "schedule: 1f1b" in run(False).stdout

    for path in tree.rglob("__pycache__"):
        shutil.rmtree(path)
    assert apply.main([str(tree), "--reverse"]) == 0
    assert {path: path.read_bytes() for path in tree.rglob("*.py")} == clean

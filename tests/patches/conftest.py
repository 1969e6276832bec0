"""Trees to patch: small ones made from the patches themselves, and the real ones that MEGATRON_LM names."""

import importlib.util
import os
import re
from pathlib import Path

import pytest

PATCHES = Path(__file__).parents[2] / "patches"


@pytest.fixture(scope="session")
def apply():
    """The module patches/apply.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("rrfp_patches_apply", PATCHES / "apply.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def before(patch: str) -> dict[str, str]:
    """File -> text that a patch fits: its context and removed lines where it expects them, filler elsewhere."""
    files, lines = {}, None
    for line in patch.split("\n")[:-1]:
        if match := re.match(r"\+\+\+ b/(\S+)", line):
            lines = files[match[1]] = []
        elif match := re.match(r"@@ -(\d+)", line):
            lines += [f"# line {number}" for number in range(len(lines) + 1, int(match[1]))]
        elif lines is not None and line[:1] in (" ", "-") and not line.startswith("--- "):
            lines.append(line[1:])
        elif line.startswith("diff "):
            lines = None
    return {name: "\n".join(lines) + "\n# the rest\n" for name, lines in files.items()}


@pytest.fixture
def make_tree(tmp_path):
    """`make_tree("core_v0.19.0")`: a folder that this release's patch fits."""

    def make(name, *, version=None, under="tree"):
        major, minor, micro = version or re.findall(r"\d+", name)
        tree = tmp_path / under
        files = before((PATCHES / f"{name}.patch").read_text())
        files["megatron/core/package_info.py"] = f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {micro}\nPRE_RELEASE = ''\n"
        for path, text in files.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
        return tree

    return make


def real_trees() -> list[Path]:
    """The checkouts at MEGATRON_LM: one, or those in a folder that holds several."""
    root = os.environ.get("MEGATRON_LM")
    if not root:
        return []
    candidates = [Path(root), *sorted(Path(root).iterdir())] if Path(root).is_dir() else []
    return [path for path in candidates if (path / "megatron" / "core" / "package_info.py").is_file()]


def pytest_generate_tests(metafunc):
    if "real_tree" in metafunc.fixturenames:
        skip = pytest.mark.skip(reason="MEGATRON_LM=DIR names no Megatron-LM checkout")
        none = pytest.param(None, marks=skip, id="no-checkout")
        metafunc.parametrize("real_tree", [pytest.param(path, id=path.name) for path in real_trees()] or [none])

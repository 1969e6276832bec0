"""Installing this package leaves a user's torch, Transformer Engine and Apex alone: pip is asked what it would do."""

import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytest.importorskip("pip")
setuptools = pytest.importorskip("setuptools")

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = {
    "torch": "2.1.0a0+32f93b1", "transformer-engine": "1.2.0", "apex": "0.1", "numpy": "1.26.4", "pyzmq": "25.1.2",
    "megatron-core": "0.17.1", "pyyaml": "6.0", "psutil": "5.9.8", "matplotlib": "3.8.2",
    "pytest": "8.0.0", "pytest-timeout": "2.2.0", "hypothesis": "6.100.0", "scikit-learn": "1.3.0", "pillow": "10.0.0", "jsonschema": "4.20.0",
}  # fmt: skip


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    """The interpreter of an environment with pretended packages, as old as we say we support, and setuptools to build with."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = str(folder / "bin/python")
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip())
    for name, version in INSTALLED.items():
        about = site / f"{name.replace('-', '_')}-{version}.dist-info"
        shutil.rmtree(about, ignore_errors=True)
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (about / "INSTALLER").write_text("pip\n")
        (about / "RECORD").write_text("")
    own = Path(setuptools.__file__).parent
    for part in (own, own.parent / "_distutils_hack", next(own.parent.glob("setuptools-*.dist-info"))):
        if not (site / part.name).exists():
            (site / part.name).symlink_to(part)
    return python


def would_install(python: str, project: Path, extras: str = "") -> list[dict]:
    """The metadata of what pip would install, with no index to fetch from: a replaced package is an error."""
    options = ["--dry-run", "--quiet", "--no-index", "--no-build-isolation", "--report", "-"]
    command = [sys.executable, "-m", "pip", "--python", python, "install", *options, f"{project}{extras}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=project)
    assert done.returncode == 0, done.stderr[-2000:]
    return [item["metadata"] for item in json.loads(done.stdout)["install"]]


@pytest.fixture
def project(tmp_path) -> Path:
    (tmp_path / "rrfp").mkdir()
    shutil.copy(ROOT / "setup.py", tmp_path)
    shutil.copy(ROOT / "rrfp/__init__.py", tmp_path / "rrfp")
    return tmp_path


def test_installing_replaces_nothing(python, project):
    for extras in "", "[megatron,plot,multimodal,program,test]":
        (own,) = would_install(python, project, extras)
        assert own["name"] == "rrfp"
    names = {re.match(r"[\w-]+", line)[0] for line in own["requires_dist"]}
    assert names & {"torch", "apex", "transformer-engine"} == set()  # `apex` of the registry is an unrelated project
    assert {line for line in own["requires_dist"] if "extra ==" not in line} == {"numpy>=1.26", "pyzmq>=25.1"}


def test_a_requirement_of_a_newer_torch_would_be_seen(python, project):
    text = (project / "setup.py").read_text()
    (project / "setup.py").write_text(text.replace("install_requires=[", 'install_requires=["torch>=2.13", '))
    with pytest.raises(AssertionError, match="torch>=2.13|conflicting dependencies"):
        would_install(python, project)

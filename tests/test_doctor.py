"""`rrfp doctor`: what it says of this environment and of broken ones, and the test of every edge."""

import argparse
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rrfp import doctor
from rrfp.comm.rendezvous import FileStore
from rrfp.errors import ConfigurationError

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def lines(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([^:\n]+): +(.*)$", text, re.M))


# ------------------------------------------------------------------ this environment, and broken ones
def test_plain_lines_and_status_0(capsys):
    pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    assert doctor.main([]) == 0
    said = lines(capsys.readouterr().out)
    for label in ("rrfp", "python", "torch", "device", "megatron-core", "megatron.training", "transformer engine", "numpy", "pyzmq",
                  "NVIDIA Apex extensions", "host", "address", "authentication", "inside a host", "between hosts"):
        assert said[label]
    assert "torchrun" in said["edges"]
    import torch

    assert ("--cpu" in said["device"]) == (not torch.cuda.is_available())


def test_it_imports_neither_megatron_nor_apex(tmp_path):
    """Their imports take seconds, warn, and may fail: that must not keep the doctor from speaking."""
    (tmp_path / "apex.py").write_text("raise SystemExit('imported')\n")
    script = ("import sys; from rrfp.doctor import main; main([]); "
              "sys.exit(any(name.split('.')[0] == 'apex' or name.startswith('megatron.') for name in sys.modules))")
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100, cwd=tmp_path, capture_output=True,
                   env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})


def test_missing_torch_is_status_1_with_the_way_out(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^MISSING: torch .*https://pytorch.org", out, re.M)
    assert "not ready" in out


def test_missing_megatron(monkeypatch):
    monkeypatch.setattr(doctor, "find", lambda module: None)
    missing = []
    assert doctor.megatron_lines(missing)[0] == ("megatron-core", "missing")
    assert len(missing) == 1 and f"pip install '{doctor.MEGATRON}'" in missing[0]


@pytest.mark.parametrize("numbers, fine", [
    ((0, 17, 0), False), ((0, 17, 1), True), ((0, 18, 2), True), ((0, 19, 3), True), ((0, 20, 0), False)])
def test_the_release_of_megatron_that_would_be_imported(tmp_path, monkeypatch, numbers, fine):
    names = zip(("MAJOR", "MINOR", "PATCH"), numbers, strict=True)
    (tmp_path / "package_info.py").write_text("".join(f"{name} = {number}\n" for name, number in names))
    monkeypatch.setattr(doctor, "find", lambda module: str(tmp_path) if module == "megatron.core" else None)
    missing = []
    said = dict(doctor.megatron_lines(missing))
    assert said["megatron-core"].startswith(".".join(map(str, numbers)))
    assert "checkout" in said["megatron.training"]
    assert (not missing) == fine


@pytest.mark.parametrize("files, text", [
    ({}, "not installed"),
    ({"amp_C.py": "", "fused_layer_norm_cuda.py": ""}, "amp_C, fused_layer_norm_cuda"),
    ({"apex/__init__.py": "", "apex/normalization/__init__.py": ""}, "NVIDIA's apex without its compiled extensions"),
    ({"apex/__init__.py": "raise RuntimeError"}, "an unrelated project of that name: pip uninstall apex"),
])
def test_apex_is_told_from_its_namesake(tmp_path, monkeypatch, files, text):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    assert text in doctor.apex()


def test_without_curve_or_memory_files(monkeypatch):
    monkeypatch.setattr(doctor.zmq, "has", lambda capability: False)
    monkeypatch.setattr(doctor, "memory_files", lambda: False)
    missing = []
    doctor.transport_lines(None, missing)
    assert [text.split(" ")[0] for text in missing] == ["pyzmq", "anonymous"]


@pytest.mark.parametrize("rank, ranks", [("x", "2"), ("2", "2"), ("0", "0")])
def test_ranks_that_make_no_sense(monkeypatch, rank, ranks):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(ConfigurationError, match="torchrun"):
        doctor.main([])


# ------------------------------------------------------------------ every edge
def ranks_test_edges(folder: Path, ranks: int, *, absent: tuple[int, ...] = (), timeout: float = 30.0) -> dict[int, bool]:
    """Every rank in a thread of this process. Which of them found that all works."""
    options = argparse.Namespace(store=str(folder), interface=None, timeout=timeout)
    found = {}
    threads = [threading.Thread(target=lambda rank=rank: found.update({rank: doctor.edges(options, rank, ranks)}))
               for rank in range(ranks) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return found


def test_every_edge_is_measured(tmp_path, capsys):
    assert ranks_test_edges(tmp_path, 4) == dict.fromkeys(range(4), True)
    said = lines(capsys.readouterr().out)
    assert list(said) == ["edge 0>1", "edge 1>0", "edge 1>2", "edge 2>1", "edge 2>3", "edge 3>2"]
    for text in said.values():
        assert re.fullmatch(r"shared memory, \d+ us one way, \d+\.\d\d GB/s \(16 MB messages\)", text)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("rrfp")] == []


def test_ranks_of_different_hosts_use_tcp(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor.rendezvous, "host_identity", lambda: os.urandom(8).hex())
    assert ranks_test_edges(tmp_path, 2) == {0: True, 1: True}
    assert all(text.startswith("tcp, ") for text in lines(capsys.readouterr().out).values())


def test_an_absent_rank_is_named_by_its_edges_and_no_others(tmp_path, capsys):
    found = ranks_test_edges(tmp_path, 4, absent=(3,), timeout=2.0)
    assert found == {0: False, 1: True, 2: False}
    out = capsys.readouterr().out
    said = lines(out)
    assert said["edge 0>1"].startswith("shared memory") and said["edge 1>2"].startswith("shared memory")
    assert re.search(r"^edge 2>3: +FAILED: rank 3 did not come within 2 s", out, re.M)
    assert re.search(r"^rank 2: edge 2>3 FAILED", out, re.M)
    assert "rank 3 gave no result" in out


def test_an_address_that_is_not_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor.rendezvous, "host_identity", lambda: os.urandom(8).hex())
    options = argparse.Namespace(store=str(tmp_path), interface="no-such-network", timeout=2.0)
    FileStore(tmp_path)
    threads = [threading.Thread(target=doctor.edges, args=(options, rank, 2)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    out = capsys.readouterr().out
    assert re.search(r"^edge 0>1: +FAILED: .*no-such-network", out, re.M)


def test_under_torchrun(full):
    if not full:
        pytest.skip("reduced counts")
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    run = subprocess.run([*torchrun, "-m", "rrfp", "doctor"], cwd=ROOT, timeout=110, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("GB/s") == 6 and "all is well" in run.stdout

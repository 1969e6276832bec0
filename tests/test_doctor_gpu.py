"""What `rrfp doctor` says about GPUs, with a torch that has some."""

from types import SimpleNamespace

import pytest

from rrfp import doctor_gpu


def torch(count=2, peers=True):
    cuda = SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count, get_device_capability=lambda index: (9, 0),
                           can_device_access_peer=lambda a, b: peers, nccl=SimpleNamespace(version=lambda: (2, 29, 7)))
    return SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="13.0"), distributed=SimpleNamespace(is_nccl_available=lambda: True))


def test_no_gpu_no_lines():
    assert doctor_gpu.gpu_lines(torch(count=0), {}) == []


def test_gpus_and_their_settings():
    said = dict(doctor_gpu.gpu_lines(torch(), {}))
    assert said["GPU"] == "compute capability 9.0, CUDA 13.0, NCCL 2.29.7"
    assert "(ipc)" in said["GPU to GPU"] and "not set" in said["CUDA connections"] and "will be 1" in said["NCCL launch order"]
    said = dict(doctor_gpu.gpu_lines(torch(peers=False), {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "0", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}))
    assert said["GPU to GPU"].startswith("no access 0>1, 1>0:") and "fine" in said["CUDA connections"]
    assert "refuses it" in said["NCCL launch order"] and "expandable segments" in said["memory between processes"]
    assert "training tries it" in dict(doctor_gpu.gpu_lines(torch(count=1), {}))["GPU to GPU"]


@pytest.mark.parametrize("installed, version, said", [
    (False, None, "not installed"), (True, None, "not known"), (True, "1.2.0", "1.13 or newer"), (True, "1.13.0", "no delayed weight gradients"),
    (True, "2.9.0+cu13", "2.9.0+cu13")])
def test_transformer_engine(installed, version, said):
    assert said in doctor_gpu.transformer_engine(installed, version)
    assert ("no delayed" in doctor_gpu.transformer_engine(installed, version)) == (version == "1.13.0")


def test_who_fuses_gradient_accumulation():
    assert doctor_gpu.fusion(lambda name: None, True) == "by Transformer Engine"
    assert doctor_gpu.fusion({doctor_gpu.FUSED: "here"}.get, False) == "by Apex"
    assert "--no-gradient-accumulation-fusion" in doctor_gpu.fusion(lambda name: None, False)


def test_numbers():
    assert doctor_gpu.numbers_of("2.9.0+cu13") == (2, 9, 0) and doctor_gpu.numbers_of("2.0.dev1") == (2, 0)

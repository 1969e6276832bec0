"""Training across hosts: each "host" is a network namespace with addresses and sockets of its own, joined by two cables (veth pairs).

To the ranks that is another host: no shared memory, no process descriptors, no abstract sockets, only TCP between the addresses.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

sys.path.insert(0, os.path.dirname(__file__))  # the helpers lie beside the test
import pretrain_gpt_job  # noqa: E402
from pretrain_gpt_job import Trainings  # noqa: E402

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
CABLES = {"control": "10.211.0", "data": "10.212.0"}
COMMON = "--global-batch-size 16 --train-iters 3 --hidden-dropout 0 --attention-dropout 0".split()


class Hosts:
    """Two network namespaces; `name(host)` is what `ip netns` calls it, `address(cable, host)` its address on a cable."""

    def __init__(self):
        self._names = [f"rrfp{os.getpid()}{host}" for host in "ab"]
        try:
            for name in self._names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            for cable, network in CABLES.items():
                ends = [f"{cable[:4]}{host}{os.getpid()}"[:15] for host in "ab"]
                ip("link", "add", ends[0], "netns", self._names[0], "type", "veth", "peer", "name", ends[1], "netns", self._names[1])
                for host, (name, end) in enumerate(zip(self._names, ends, strict=True)):
                    ip("-n", name, "link", "set", end, "name", cable)
                    ip("-n", name, "address", "add", f"{network}.{host + 1}/24", "dev", cable)
                    ip("-n", name, "link", "set", cable, "up")
        except BaseException:
            self.close()
            raise

    def name(self, host: int) -> str:
        return self._names[host]

    def address(self, cable: str, host: int) -> str:
        return f"{CABLES[cable]}.{host + 1}"

    def close(self):
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, timeout=20)


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def hosts():
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and `ip` (apt-get install iproute2)")
    try:
        hosts = Hosts()
    except OSError as error:
        if "not permitted" not in str(error):
            raise
        pytest.skip(f"network namespaces can't be made here: {error}")
    yield hosts
    hosts.close()


@pytest.fixture(scope="module")
def server():
    data = pretrain_gpt_job.make_data()
    for name in ("--global-batch-size", "--train-iters"):
        at = data.index(name)
        del data[at : at + 2]
    return Trainings(pretrain_gpt_job.OWN_SCRIPT, data)


def addresses(output: str) -> set[str]:
    """Where a rank's RRFP sockets listen, as it said (tests/end_to_end/job_server.py)."""
    return set(re.findall(r"listening: tcp://([\d.]+):", output))


def train(server, hosts, folder: Path, way: str, where: list[int], *arguments: str):
    """Rank r on host where[r]; each host numbers its own. Returns the run."""
    places = [{"NETNS": hosts.name(host), "LOCAL_RANK": str(where[:rank].count(host)), "LOCAL_WORLD_SIZE": str(where.count(host)),
               "MASTER_ADDR": hosts.address("control", 0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "control"}
              for rank, host in enumerate(where)]
    return server.run(way, folder, *COMMON, *arguments, ranks=4, pipeline=2, places=places)


@pytest.mark.parametrize("where, options", [
    # Pipelines cross: ranks 0 and 1 hold the first stage, 2 and 3 the second.
    ([0, 0, 1, 1], ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    # Tensor parallelism crosses: the members of each stage's domain are on both hosts.
    ([0, 1, 0, 1], ["--tensor-model-parallel-size", "2"]),
], ids=["pipeline", "tensor"])
def test_two_hosts_train_as_megatron_does(server, hosts, tmp_path, where, options):
    theirs, ours = (train(server, hosts, tmp_path / way, way, where, *options) for way in ("megatron", "rrfp"))
    assert "[rrfp] hint auto: announced over 1f1b" in ours.text and ours.log == theirs.log and len(ours.log) == 3
    for rank, host in enumerate(where):
        assert addresses(ours.outputs[rank]) == {hosts.address("control", host)}


def test_the_interface_is_honoured(server, hosts, tmp_path):
    where = [0, 0, 1, 1]
    run = train(server, hosts, tmp_path, "rrfp", where, "--tensor-model-parallel-size", "2", "--rrfp-interface", "data")
    for rank, host in enumerate(where):
        assert addresses(run.outputs[rank]) == {hosts.address("data", host)}

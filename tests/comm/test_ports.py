"""A port that is picked now and bound later: nobody else is given it in between, and the server it is for gets it."""

import socket
import struct

import pytest

from rrfp.comm.ports import reserve_port

IP_LOCAL_PORT_RANGE = 51  # linux/in.h; Linux 6.3


def asks_for_any_port(only: int, family: int = socket.AF_INET, *, reuse: bool = False) -> socket.socket:
    """A socket to which the system may give no other port than `only`."""
    asking = socket.socket(family)
    if reuse:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        asking.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", only << 16 | only))
    except OSError:
        asking.close()
        pytest.skip("this kernel cannot be told which ports to give")
    return asking


def families() -> list[tuple[int, str]]:
    return [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "")] + [(socket.AF_INET6, "::1")] * socket.has_dualstack_ipv6()


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("family, host", families())
def test_nobody_is_given_it(family, host, reuse):
    with asks_for_any_port(reserve_port(), family, reuse=reuse) as other, pytest.raises(OSError, match="in use"):
        other.bind((host, 0))


def test_no_connection_leaves_from_it():
    with socket.create_server(("127.0.0.1", 0)) as server, asks_for_any_port(reserve_port()) as other:
        with pytest.raises(OSError, match="assign"):
            other.connect(server.getsockname())


@pytest.mark.parametrize("family, host", families())
def test_a_server_gets_it_again_and_again_but_only_one_at_a_time(family, host):
    port = reserve_port()
    for _ in range(3):
        with socket.create_server((host, port), family=family), socket.socket(family) as second:
            second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                second.bind((host, port))


def test_a_port_that_was_let_go_is_given_to_another():
    """Negative control: the race."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with asks_for_any_port(port) as other:
        other.bind(("127.0.0.1", 0))
        assert other.getsockname()[1] == port


def test_torchs_store_binds_it():
    torch = pytest.importorskip("torch")
    port = reserve_port()
    store = torch.distributed.TCPStore("127.0.0.1", port, 1, True)
    store.set("key", "value")
    assert store.get("key") == b"value" and store.port == port

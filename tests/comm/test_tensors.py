"""Whose memory a tensor of a message is, and for how long."""

import gc
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rrfp.action import Edge  # noqa: E402
from rrfp.comm.tensors import from_arrival  # noqa: E402
from rrfp.comm.transport import Arrival, Part  # noqa: E402


class Transport:
    """Takes buffers back, and leads to whatever `kept` is."""

    def __init__(self):
        self.released, self.kept = [], None

    def release(self, arrival):
        self.released.append(arrival.microbatch)


def receive(transport):
    memory = np.zeros(12, np.uint8)
    [tensor] = from_arrival(Arrival(0, Edge(0, 1), 0, 5, (Part("float32", (3,), memory),), 0.0), release=transport.release,
                            device=torch.device("cpu"))
    return tensor


def test_a_buffer_goes_back_with_the_last_tensor_over_it():
    transport = Transport()
    tensor = receive(transport)
    view = tensor[1:]
    del tensor
    assert transport.released == []
    del view
    assert transport.released == [5]


def test_a_transport_that_leads_to_a_tensor_is_collected_with_it():
    """After a failure much is left in the middle: a message that has not left may lie in the buffer of one that came."""
    transport = Transport()
    transport.kept = receive(transport)
    gone = weakref.ref(transport)
    del transport
    gc.collect()
    assert gone() is None

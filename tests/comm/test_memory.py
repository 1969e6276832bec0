"""Buffers of the receiver, written by a sender that proves to share the host."""

import os

import numpy as np
import pytest

from rrfp.comm.memory import Buffer, Mappings, Pool, round_up


def test_what_is_written_is_read():
    buffer, mappings = Buffer(1, 1000), Mappings(os.getpid())
    mappings.write(buffer.grant(), [0, 128], [np.arange(100, dtype=np.uint8), np.full(5, 9, np.uint8)])
    assert (buffer.view(0, 100) == np.arange(100)).all() and (buffer.view(128, 5) == 9).all()
    assert buffer.view(0, 1).ctypes.data % 64 == 0
    buffer.close()
    mappings.close()


def test_a_wrong_nonce_is_refused():
    buffer = Buffer(1, 64)
    with pytest.raises(OSError, match="not the granted buffer"):
        Mappings(os.getpid()).write(buffer.grant()._replace(nonce=b"x" * 16), [0], [np.zeros(1, np.uint8)])
    buffer.close()


def test_a_descriptor_that_is_not_there_is_an_os_error():
    buffer = Buffer(1, 64)
    grant = buffer.grant()
    buffer.close()
    with pytest.raises(OSError):
        Mappings(os.getpid()).write(grant._replace(fd=10_000), [0], [np.zeros(1, np.uint8)])


def test_nobody_can_resize_a_buffer():
    buffer = Buffer(1, 4096)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(buffer.fd, size)
    buffer.close()


def test_a_pool_reuses_and_grows():
    pool = Pool(0, memory=True)
    small = pool.take()
    assert small.size == 0 and small.fd == -1
    pool.give(small)
    large = pool.take(10_000)
    assert large.size >= 10_000 and pool.count == 1  # the small one is gone
    pool.give(large)
    assert pool.take(5_000) is large  # never shrinks
    assert pool.take().size == large.size and pool.count == 2
    pool.close()
    assert pool.count == 0


def test_a_pool_without_memory_has_no_descriptors():
    pool = Pool(1 << 20, memory=False)
    buffer = pool.take(1 << 30)
    assert buffer.size == 0 and buffer.fd == -1 and pool.nbytes == 0


def test_descriptors_go_with_the_pool():
    before = len(os.listdir("/proc/self/fd"))
    pool, mappings = Pool(0, memory=True), Mappings(os.getpid())
    for size in (100, 10_000, 1_000_000):
        buffer = pool.take(size)
        mappings.write(buffer.grant(), [0], [np.zeros(size, np.uint8)])
        buffer.view(0, size)
        pool.give(buffer)
    assert len(os.listdir("/proc/self/fd")) > before
    del buffer
    pool.close()
    mappings.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 10**6, 16 << 20, (16 << 20) + 1, 2**33 + 5])
def test_rounding_up_costs_an_eighth_at_most(nbytes):
    assert nbytes <= round_up(nbytes) <= nbytes + max(4096, nbytes // 8)

"""What the C library has handed out: torch takes its memory on a CPU from there. Exact, and at no cost."""

import ctypes


def held() -> int | None:
    """Bytes that are allocated in this process now, by whatever thread. None: the C library does not count (glibc before 2.33, others)."""
    if _mallinfo is None:
        return None
    counts = _mallinfo()
    return counts.uordblks + counts.hblkhd


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


try:
    _mallinfo = ctypes.CDLL(None).mallinfo2
    _mallinfo.restype = _MallInfo
except (AttributeError, OSError):
    _mallinfo = None

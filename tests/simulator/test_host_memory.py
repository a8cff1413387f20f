"""The process's own memory in the role of global memory."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from fa4flex.simulator.state.memory import BadAccess, HostMemory


def test_neighbouring_mappings_are_one() -> None:
    """A buffer may lie across two, as in a heap that has grown since a fork; none across a gap."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 4 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory.madvise(mmap.MADV_DONTFORK, page, page)  # a mapping of its own from here on
    none = 0
    assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + 3 * page), ctypes.c_size_t(page), none)
    memory[page - 2 : page + 2] = b"abcd"
    host = HostMemory()
    assert host.window(start + page - 2, 4).tobytes() == b"abcd"
    assert host.load(np.array([start + page - 2, start + page]), 2).shape == (2, 1)
    with pytest.raises(BadAccess):
        host.window(start + 3 * page - 2, 4)

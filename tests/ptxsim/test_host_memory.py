"""The process's own memory in the role of global memory."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from ptxsim.state.memory import BadAccess, HostMemory


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


def test_accesses_of_several_buffers_end_where_each_of_them_ends() -> None:
    memory = HostMemory(strict=True)
    first, second = (
        memory.allocate(name, bytes(range(start, start + 64))) for name, start in (("a", 0), ("b", 64))
    )
    addresses = np.array([first + 4, second + 60])
    assert memory.load(addresses, 4).view(np.uint8).tolist() == [[4, 5, 6, 7], [124, 125, 126, 127]]
    memory.store(addresses, np.zeros((2, 1), np.uint32))
    assert not memory.load(addresses, 4).any() and memory.load(addresses - 4, 4).all()
    for offset, kind in ((64, "out of bounds"), (58, "misaligned")):
        for access in (memory.load, lambda x, size: memory.store(x, np.zeros((2, 1), np.uint32))):
            with pytest.raises(BadAccess, match=kind):
                access(np.array([second, second + offset]), 4)
            with pytest.raises(BadAccess, match=kind):
                access(np.array([first, second + offset]), 4)

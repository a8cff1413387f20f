"""Windows of shared and local memory in the generic address space.

Offsets in shared memory are 32 bits: the CTA's rank in its cluster from bit 24 on, bytes below. A generic
address is such an offset, or a byte of local memory, behind a bit that no host address has.
"""

from __future__ import annotations

SHARED_WINDOW = 1 << 62
LOCAL_WINDOW = 1 << 61
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
RESERVED_SHARED = 1024
"""Bytes at the start of every CTA's shared memory that belong to the system."""

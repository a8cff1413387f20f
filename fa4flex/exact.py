"""Numbers in keys: two of them are the same only if their types and all of their bits are."""

from __future__ import annotations


def exactly(*numbers: object) -> str:
    """Text that is equal only for the same numbers, or tuples of them: 0.0 == -0.0 == False and 1 == 1.0 are
    true, and nan == nan is not. Python writes a float so that reading gives the same one."""
    return repr(numbers)

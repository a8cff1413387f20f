"""Numbers by their types: in keys, two are the same only if their types and all of their bits are."""

from __future__ import annotations


def exactly(*numbers: object) -> str:
    """Text that is equal only for the same numbers, or tuples of them: 0.0 == -0.0 == False and 1 == 1.0 are
    true, and nan == nan is not. Python writes a float so that reading gives the same one."""
    return repr(numbers)


def is_count(x: object, least: int = 1) -> bool:
    """True for an int, which is no bool, of at least this."""
    return isinstance(x, int) and not isinstance(x, bool) and x >= least

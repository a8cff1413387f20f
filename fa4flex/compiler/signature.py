"""Signature of a launch: the form of its arguments."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """Form of a launch's arguments, besides what the problem says.

    heads_first   q, k, v and out come as [B, H, S, D] rather than [B, S, H, D]; packed ones are [T, H, D]
    scalars       the kind of each run-time number, "int", "bool" or "float"
    unit_strides  per captured tensor, whether its last stride is 1
    even_rows     per captured tensor, whether its address and all strides but the last are even in elements
    given         names of the arguments that a call brings or not, and the problem does not tell, in the
                  order of their rows (kernels/plan/arguments.py)
    wide          names of the lengths and page tables that are int64, where a kernel reads them as they
                  come
    """

    heads_first: bool = True
    scalars: tuple[str, ...] = ()
    unit_strides: tuple[bool, ...] = ()
    even_rows: tuple[bool, ...] = ()
    given: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()

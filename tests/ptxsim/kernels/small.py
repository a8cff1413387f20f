"""All small kernels: each exercises one thing and writes plain outputs."""

from __future__ import annotations

from kernels import (
    clusters,
    copies,
    products,
    sweeps,
    tensor_copies,
    tensor_memory,
    threads,
    tma,
    warps,
)

CASES = (
    *tma.CASES,
    *copies.CASES,
    *clusters.CASES,
    *warps.CASES,
    *threads.CASES,
    *products.CASES,
    *tensor_memory.CASES,
    *tensor_copies.CASES,
    *sweeps.CASES,
)
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "two cases have one name"

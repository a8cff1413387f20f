"""Kernels that append to pages are kept by all that they are compiled from, and by nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fa4flex.kernels.plan.target import SM90A
from fa4flex.primitives.kv_scales import NO_SCALES, KVScales
from fa4flex.primitives.qk_norm import QKNorm
from fa4flex.primitives.rotary import Rotary
from fa4flex.runtime.cuda import append
from fa4flex.runtime.cuda.append import New, Pool
from fa4flex.runtime.cuda.device import kept_kernels
from fa4flex.runtime.cuda.device.kept_kernels import KeptKernels
from ptxsim.active import simulated


@dataclass(frozen=True)
class Look:
    """Parts of a call to append that may differ from another's."""

    dtype: torch.dtype = torch.bfloat16
    batch: int = 3
    tokens: int = 2
    heads: int = 2
    width: int = 64
    pages: int = 9
    page_size: int = 16
    columns: int = 4
    packed: bool = False
    used: bool = False
    queries: bool = False
    rotary: Rotary | None = None
    norm: QKNorm | None = None
    positions: torch.dtype | None = None
    scales: KVScales | None = None
    table: torch.dtype = torch.int32
    lengths: torch.dtype = torch.int32
    starts: torch.dtype = torch.int32
    offset: int = 0

    def call(self) -> tuple[New, Pool]:
        tokens = (
            (self.batch * self.tokens, self.heads) if self.packed else (self.batch, self.heads, self.tokens)
        )
        k, v = (torch.zeros(*tokens, self.width, dtype=self.dtype) for _ in "kv")
        size = self.pages, self.page_size, self.heads, self.width
        pools = [self._shifted(size) for _ in "kv"]
        cu = torch.arange(self.batch + 1, dtype=self.starts) * self.tokens if self.packed else None
        seqused = torch.ones(self.batch, dtype=torch.int32) if self.used else None
        table = torch.zeros(self.batch, self.columns, dtype=self.table)
        q = k.clone() if self.queries else None
        positions = None
        if self.positions is not None:
            positions = torch.zeros(3, self.batch, self.tokens, dtype=self.positions)
        new = New(k, v, q, self.rotary, cu, seqused, self.norm, positions)
        scales = () if self.scales is None else (self.scales,)
        if scales:
            pools = [x.to(torch.float8_e4m3fn) for x in pools]
        return new, Pool(*pools, table, torch.zeros(self.batch, dtype=self.lengths), *scales)

    def _shifted(self, size: tuple[int, ...]) -> Tensor:
        """A pool that begins so many elements after an aligned address."""
        count = 1
        for n in size:
            count *= n
        return torch.zeros(count + self.offset, dtype=self.dtype)[self.offset :].view(size)


def angles(
    half: int = 32, dtype: torch.dtype = torch.float32, interleaved: bool = False, axes: bool = False
) -> Rotary:
    tables = (make(64, half, dtype=dtype) for make in (torch.ones, torch.zeros))
    return Rotary(*tables, interleaved, torch.zeros(half, dtype=torch.int32) if axes else None)


def weights(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(64, dtype=dtype)


def kernel(look: Look, arch: str = "sm_90a") -> Any:
    with simulated(arch):
        return append._kernel(*look.call())


@pytest.fixture(autouse=True)
def nothing_is_compiled_or_kept() -> Any:
    with (
        patch.object(append, "compile_kernel", lambda *given: object()),
        patch.object(kept_kernels, "require_not_capturing", lambda: None),
        patch.object(kept_kernels, "target_of", lambda device: SM90A),
        patch.object(append, "_kernels", KeptKernels()),
    ):
        yield


PLAIN = Look()
TURNED = Look(queries=True, rotary=angles())
OTHERS = {
    "dtype": replace(PLAIN, dtype=torch.float16),
    "packed": replace(PLAIN, packed=True),
    "used": replace(PLAIN, used=True),
    "wide table": replace(PLAIN, table=torch.int64),
    "wide lengths": replace(PLAIN, lengths=torch.int64),
    "alignment": replace(PLAIN, offset=1),
    "rotary": replace(PLAIN, rotary=angles()),
    "rotary and queries": TURNED,
    "in pairs": replace(TURNED, rotary=angles(interleaved=True)),
    "dtype of angles": replace(TURNED, rotary=angles(dtype=torch.bfloat16)),
    "odd part that turns": replace(TURNED, rotary=angles(half=12)),
    "wide starts": replace(PLAIN, packed=True, starts=torch.int64),
    "positions": replace(TURNED, positions=torch.int32),
    "wide positions": replace(TURNED, positions=torch.int64),
    "axes": replace(TURNED, positions=torch.int32, rotary=angles(axes=True)),
    "norm of keys": replace(PLAIN, norm=QKNorm(k=weights())),
    "norms": replace(PLAIN, queries=True, norm=QKNorm(weights(), weights())),
    "dtype of weights": replace(PLAIN, norm=QKNorm(k=weights(torch.bfloat16))),
    "unit offset": replace(PLAIN, norm=QKNorm(k=weights(), unit_offset=True)),
    "8 bits": replace(PLAIN, scales=NO_SCALES),
    "scales of tokens": replace(PLAIN, scales=KVScales(torch.ones(9, 16, 2), torch.ones(9, 16, 2))),
}
SAME = {
    "another eps": (replace(PLAIN, norm=QKNorm(k=weights(), eps=0.1)), "norm of keys"),
    "scales of heads": (replace(PLAIN, scales=KVScales(torch.ones(2))), "8 bits"),
    "scales of pages": (replace(PLAIN, scales=KVScales(torch.ones(9, 2))), "8 bits"),
}


@pytest.mark.parametrize("name", SAME)
def test_numbers_have_no_kernels_of_their_own(name: str) -> None:
    look, other = SAME[name]
    assert kernel(look) is kernel(OTHERS[other])


def test_what_a_kernel_is_compiled_from_has_kernels_of_its_own() -> None:
    kernels = [kernel(PLAIN), kernel(PLAIN, "sm_100a"), *map(kernel, OTHERS.values())]
    assert len({id(x) for x in kernels}) == len(kernels)
    assert kernel(replace(PLAIN, width=60)) is kernels[2 + list(OTHERS).index("alignment")]
    again = [kernel(PLAIN), kernel(PLAIN, "sm_100a"), *map(kernel, OTHERS.values())]
    assert all(x is y for x, y in zip(kernels, again, strict=True))


EXTENTS = {"batch": 5, "tokens": 7, "heads": 3, "pages": 40, "page_size": 1, "columns": 9, "width": 128}


@pytest.mark.parametrize("name", EXTENTS)
def test_no_extent_has(name: str) -> None:
    assert kernel(replace(PLAIN, **{name: EXTENTS[name]})) is kernel(PLAIN)

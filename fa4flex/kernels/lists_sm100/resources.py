"""Resources of the roles of the Blackwell kernel for listed keys: tensors of one block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cutlass import cute

from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.decode_sm100 import resources as base
from fa4flex.kernels.decode_sm100.resources import Products


@dataclass(frozen=True)
class Shared(base.Shared):
    """Shared memory of the kernel for few query rows; and what is known of entries, whose table lies over k
    and v and what is behind, see lists/resources.py."""

    ids: cute.Tensor
    bits: cute.Tensor
    places: cute.Tensor
    united: cute.Tensor | None


class Handed(NamedTuple):
    """Resources that all roles of a block have: shared memory, barriers and products."""

    shared: Shared
    pipes: Pipes
    products: Products

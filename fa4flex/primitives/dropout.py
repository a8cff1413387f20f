"""Dropout: each weight is kept with probability 1 - p and then divided by 1 - p, or is 0.

    w[q, kv] = p[q, kv] keep(seed, b, h, q, kv) / (1 - rate)

The factor comes after normalising, whatever the normaliser: log-sum-exp, maxima, entropy and sinks are of
the weights before it (Srivastava et al. 2014; of attention weights, Vaswani et al. 2017). `keep` is a
function of a seed and of the pair's logical indices alone: all backends drop the same pairs, in both passes.

`keep` compares 8 bits with a threshold. With mix(x) = the finaliser of MurmurHash3 and pair(i) = i // 16 * 8
+ i % 8, all numbers of 32 bits but `bits`:

    chain(c)   = mix(mix(mix(mix(c ^ low half of seed) ^ high half of seed) ^ b) ^ h)
    rows, keys = chain(ROW_START), chain(KEY_START)
    row        = (rows | 1) + pair(q) * ROW_STEP
    group      = (keys | 1) + pair(kv) * KEY_STEP
    x          = row * group + mix(rows ^ keys)
    bits       = x * y, of 64 bits, where bytes 3, 2, 1, 0 of y are those of x that are 1, 3, 0, 2
    byte       = bits >> (16 + 16 * (q // 8 % 2) + 8 * (kv // 8 % 2)), its lowest 8 bits as a signed number
    keep       = byte < 128 - threshold

So queries q and q ^ 8 with keys kv and kv ^ 8 share one hash, of which each pair has a byte of the middle: in
the accumulators of Hopper's products a thread holds all four, in a forward pass as in a backward pass, whose
scores are transposed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.base import kind_of, show

ONE = 1 << 8
"""Threshold of dropping all pairs: probabilities are multiples of 1 / ONE."""


@dataclass(frozen=True, eq=False, repr=False)
class Dropout:
    """Dropout of attention weights with probability `p`, to the nearest of 1 / 256, 2 / 256, ... 255 / 256.

    FlashAttention-2 has 8 bits as well. `rate` says what is honoured; weights are divided by one less exactly
    that, so that their expectation is that without dropout.

    p      in [0, 1]; 0 drops nothing, 1 everything
    seed   an int: the same pairs at each call. A tensor int64 of one element, on the device of q: its value
           is read by each call as it runs, and by each replay of a CUDA graph. None: drawn for each call from
           torch's generator of q's device, without waiting for it, so that torch.manual_seed governs it

    A backward pass drops the pairs of its forward pass. Raises InputError for other values.
    """

    p: float
    seed: int | Tensor | None = None

    def __post_init__(self) -> None:
        if isinstance(self.p, bool) or not isinstance(self.p, (int, float)) or not 0 <= self.p <= 1:
            given = self.p if isinstance(self.p, (int, float)) else kind_of(self.p)
            raise InputError(
                f"dropout with p={given}", "a number from 0 to 1", "p is the probability to drop, e.g. 0.1"
            )
        seed = self.seed
        if isinstance(seed, Tensor):
            if seed.dtype != torch.int64 or seed.numel() != 1:
                raise InputError(
                    f"a seed of dtype {seed.dtype} and shape {list(seed.shape)}",
                    "an int64 tensor of one element",
                    "torch.tensor(seed, dtype=torch.int64, device=q.device)",
                )
            if seed.ndim:
                object.__setattr__(self, "seed", seed.reshape(()))
        elif seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise InputError(f"a seed of {kind_of(seed)}", "an int, an int64 tensor, or None", "seed=0")
        elif seed is not None and not -(1 << 63) <= seed < 1 << 64:
            raise InputError(f"seed={seed}", "an integer of 64 bits", "seed % 2**64")

    @property
    def threshold(self) -> int:
        """Number of the 256 values of a byte that drop a pair."""
        return int(self.p * ONE) if self.p in (0, 1) else min(max(math.floor(self.p * ONE + 0.5), 1), ONE - 1)

    @property
    def rate(self) -> float:
        """The probability that is honoured."""
        return self.threshold / ONE

    def __repr__(self) -> str:
        return f"Dropout({self.p!r})" if self.seed is None else f"Dropout({self.p!r}, {show(self.seed)})"


def drawn(dropout: Dropout, device: torch.device) -> Dropout:
    """The dropout of one call: with its seed as a tensor on the device. Nothing waits."""
    seed = dropout.seed
    if isinstance(seed, Tensor):
        return dropout
    if seed is None:
        made = torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64, device=device)
    else:
        # A compiled graph has a symbol here, and sums that 64 bits cannot hold do not compile.
        signed = seed if seed < 1 << 63 else seed - (1 << 64)
        made = torch.full((), signed, dtype=torch.int64, device=device)
    return Dropout(dropout.p, made)


def stand_in(dropout: Dropout) -> Dropout:
    """The same with some seed, for whoever traces without calling. Nothing is drawn."""
    if isinstance(dropout.seed, Tensor):
        return dropout
    return Dropout(dropout.p, torch.zeros((), dtype=torch.int64, device="cpu"))


def as_dropout(value: Any) -> Dropout | None:
    """`value` as a Dropout, None for one that drops nothing. Raises InputError for anything else."""
    if value is None:
        return None
    if not isinstance(value, Dropout):
        if not isinstance(value, (int, float)):
            raise InputError(
                f"dropout is {kind_of(value)}", "a fa4flex.Dropout, or its p", "e.g. dropout=0.1"
            )
        value = Dropout(value)
    return value if value.threshold else None


def check_beside(variant: Any) -> None:
    """Raise UnsupportedError for what dropout cannot be combined with."""
    if variant.dropout is not None and variant.backend == "flex":
        raise refuse_flex()


def refuse_flex() -> UnsupportedError:
    """The error of torch's flex_attention, which multiplies no weight after its softmax."""
    return UnsupportedError(
        "dropout through torch's flex_attention, which has score mods before its softmax and none after it",
        "dropout on a CPU, or on a GPU that kernels are generated for",
        "leave dropout out, or drop keys before the softmax by a mask that hashes its indices",
    )

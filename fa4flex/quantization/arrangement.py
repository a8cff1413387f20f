"""Tensors in the layouts of calls as tokens of all sequences, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fa4flex.primitives.varlen import Varlen
from fa4flex.quantization.tokens import Tokens


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Layout of a call: packed where cumulative lengths are given, else "bhsd" or "bshd"."""

    layout: Literal["bhsd", "bshd"]
    varlen: Varlen | None

    @property
    def packed(self) -> bool:
        return self.varlen is not None and self.varlen.packed

    def tokens(self, x: Tensor) -> Tensor:
        """x as [T, H, ...]."""
        if self.packed:
            return x
        return (x.transpose(1, 2) if self.layout == "bhsd" else x).flatten(0, 1)

    def laid(self, x: Tensor, like: Tensor) -> Tensor:
        """x [T, H, ...] in the layout, as `like` is, contiguous."""
        if self.packed:
            return x.contiguous()
        x = self._by_sequence(x, like)
        return (x.transpose(1, 2) if self.layout == "bhsd" else x).contiguous()

    def rows(self, x: Tensor, like: Tensor) -> Tensor:
        """x [T, H] as statistics are: [B, H, S] with B and S of `like`, or [H, T] of packed tokens."""
        return (x.T if self.packed else self._by_sequence(x, like).transpose(1, 2)).contiguous()

    def _by_sequence(self, x: Tensor, like: Tensor) -> Tensor:
        """x [B S, ...] as [B, S, ...]."""
        return x.unflatten(0, (like.shape[0], like.shape[2 if self.layout == "bhsd" else 1]))

    def of_rows(self, x: Tensor) -> Tensor:
        """x [T, H] of `rows`."""
        return x.T if self.packed else x.transpose(1, 2).flatten(0, 1)

    def of_queries(self, q: Tensor) -> Tokens:
        return self._of(q, "q")

    def of_keys(self, k: Tensor) -> Tokens:
        return self._of(k, "k")

    def _of(self, x: Tensor, side: str) -> Tokens:
        lengths = self.varlen
        used = None if lengths is None else getattr(lengths, f"seqused_{side}")
        if lengths is not None and lengths.packed:
            starts = lengths.cu_seqlens_q if side == "q" else lengths.cu_k
            assert starts is not None
            return Tokens.packed(starts, used, x.shape[0])
        length = x.shape[2 if self.layout == "bhsd" else 1]
        return Tokens.dense(x.shape[0], length, used, x.device)


def repeated(x: Tensor, heads: int) -> Tensor:
    """x [T, Hkv, ...] for each query head."""
    return torch.repeat_interleave(x, heads // x.shape[1], 1)

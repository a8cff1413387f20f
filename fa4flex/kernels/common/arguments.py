"""What a launch passes to a forward kernel."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Float32, Int32, cute


class Tables(NamedTuple):
    """Key tiles per query tile, int32. Query tile m of (b, h) visits the partial tiles
    partial_tiles[partial_ptr[b, h, m] : partial_ptr[b, h, m + 1]], then the full ones alike.

    Pointers are [B, H, query tiles + 1], with stride 0 along what the mask does not depend on.
    """

    partial_ptr: cute.Tensor
    partial_tiles: cute.Tensor
    full_ptr: cute.Tensor
    full_tiles: cute.Tensor


class Arguments(NamedTuple):
    """q, k, v, out [B, S, H, D], or packed [T, H, D]; any strides whose last is 1.
    lse, max_scores float32 [B, H, S], or packed [H, T]; lengths are int32 vectors; None where absent.
    counter int32 [2], zero: tiles taken, blocks done. A launch leaves it zero, and may not share it with
    another that runs at the same time.
    order int32 [tiles, 2]: of a ragged batch, the sequence and the number in it of each tile of queries, as
    they are to be computed one after another; behind the last, the sequence is the number of sequences.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor | None
    max_scores: cute.Tensor | None
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    tables: Tables | None
    sinks: cute.Tensor | None
    operands: tuple  # a length would be read from tuple[X, ...]: two
    scalars: tuple
    scale: Float32
    max_q_len: Int32
    counter: cute.Tensor | None
    order: cute.Tensor | None

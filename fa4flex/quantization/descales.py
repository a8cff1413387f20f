"""Descales: scales of 8-bit queries, keys and values that others have rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fa4flex import later
from fa4flex.contents import checked_here
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.base import check_device, kind_of, show
from fa4flex.primitives.varlen import Varlen
from fa4flex.quantization.arrangement import Arrangement
from fa4flex.quantization.formats import FORMATS, TILE
from fa4flex.quantization.quantize import check_lengths, check_shapes, turned
from fa4flex.quantization.quantized import Keys, Quantized
from fa4flex.quantization.tokens import Tokens
from fa4flex.runtime.checks import check_strided

Scale = Tensor | float | None

_OF_CODES: dict[torch.dtype, Keys] = {torch.int8: "int8", torch.float8_e4m3fn: "float8_e4m3"}
_GIVEN = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False, repr=False)
class Descales:
    """Scales of 8-bit tensors: they stand for q8 * q, k8 * k and v8 * v. None stands for 1.

    Each is a number, or a float32 tensor: [] for the whole tensor; [H] of heads; [B, H] of sequences and
    heads; [B, H, blocks] of blocks of `block` tokens, which start with each sequence; or [B, H, S] of tokens.
    Of packed tokens these are [N, H], [H, blocks] with the blocks of one sequence after those of another, and
    [H, T]. A scale of queries may have the heads of the keys, whose group shares it. Scales of q and k are
    not below 0: kernels take the largest score of a row from its largest product of codes. Raises InputError;
    for contents on a GPU at a later call, or at once where FA4FLEX_VALIDATE=1 says so.

        attn(fa4flex.Descales(q=sq, k=sk, v=sv).quantized(q8, k8, v8))
    """

    q: Scale = None
    k: Scale = None
    v: Scale = None
    block: int | None = None

    def __post_init__(self) -> None:
        for name in "qkv":
            scale = getattr(self, name)
            if isinstance(scale, Tensor):
                _check(name, scale)
            elif scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
                raise InputError(
                    f"{name} descale is a {kind_of(scale)}",
                    "a number, a float32 tensor, or None for 1",
                    f"e.g. {name}=torch.full((heads,), 0.02)",
                )
            elif scale is not None and scale < 0 and name != "v":
                raise _negative(name, scale)
        if self.block is not None and (type(self.block) is not int or self.block < 1):
            raise InputError(f"block={self.block!r}", "a number of tokens", "e.g. block=128")

    def quantized(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        varlen: Varlen | None = None,
        layout: Literal["bhsd", "bshd"] = "bhsd",
        dtype: torch.dtype = torch.bfloat16,
    ) -> Quantized:
        """Codes with these scales, for `attn(quantized)`: nothing is rounded again.

        q [B, Hq, Sq, D] and k [B, Hkv, Skv, D], both torch.int8 or both torch.float8_e4m3fn, D a multiple of
        32; v [B, Hkv, Skv, Dv] of float8_e4m3fn, or of 16 or 32 bits, with v=None then. `layout`, and packed
        tokens with `varlen`, as in a call of attention. dtype: of outputs. The e4m3 NaN is NaN. Raises
        InputError for shapes and scales that do not fit, UnsupportedError for formats that lose what they
        must keep and for scales that require gradients.
        """
        place = Arrangement(layout, varlen)
        qk = self._checked(q, k, v, place, dtype)
        sides = (q, place.of_queries(q)), (k, place.of_keys(k)), (v, place.of_keys(v))
        of_q, of_k, of_v = (
            _Side(name, x, tokens, place, self.block) for name, (x, tokens) in zip("qkv", sides, strict=True)
        )
        heads = of_k.heads
        q_scale = place.rows(of_q.of_tokens(self.q, heads), q)
        k_scale, k_scales = of_k.of_keys(self.k)
        values, v_scale, v_scales = of_v.of_values(self.v)
        return Quantized(
            q.contiguous(), k.contiguous(), values, q_scale, k_scale, v_scale, None, None, None, qk,
            "bfloat16" if v_scale is None else "float8_e4m3", None, layout, varlen, dtype, k_scales, v_scales,
        )  # fmt: skip

    def _checked(self, q: Tensor, k: Tensor, v: Tensor, place: Arrangement, dtype: torch.dtype) -> Keys:
        check_strided(q, k, v)
        value = ", ".join(f"{name} {x.dtype}" for name, x in zip("qkv", (q, k, v)))
        _check_dtypes(value, q, k, v)
        if v.dtype in _GIVEN and self.v is not None:
            raise InputError(
                f"a descale of v, which is {v.dtype}", "v of torch.float8_e4m3fn", "leave v=... out"
            )
        if dtype not in _GIVEN:
            raise InputError(f"dtype={dtype}", f"one of {_GIVEN}", "leave it out for bfloat16 outputs")
        check_shapes(q, k, v, place)
        check_lengths(q, k, place)
        for name, x in (("q", q), ("k", k), ("v", v)):
            scale = getattr(self, name)
            if isinstance(scale, Tensor):
                check_device(f"{name} descale", scale, "q", x.device, "move the descale to the tensors")
                if scale.requires_grad and torch.is_grad_enabled():
                    raise UnsupportedError(
                        f"a descale of {name} that requires gradients: codes have none to share them with",
                        "descales without gradients",
                        f"detach it: {name}={name}_scale.detach()",
                    )
                _check_contents(name, scale)
        return _OF_CODES[q.dtype]

    def __repr__(self) -> str:
        each = [f"{x}={_shown(getattr(self, x))}" for x in "qkv" if getattr(self, x) is not None]
        if self.block is not None:
            each.append(f"block={self.block}")
        return f"Descales({', '.join(each)})"


def _shown(scale: Scale) -> str:
    return show(scale) if isinstance(scale, Tensor) else repr(scale)


# --- one tensor ---------------------------------------------------------------------------------------------


class _Side:
    """A tensor of codes, its tokens, and how scales fall on them."""

    def __init__(self, name: str, x: Tensor, tokens: Tokens, place: Arrangement, block: int | None) -> None:
        self.name, self.x, self.tokens, self.place, self.block = name, x, tokens, place, block
        self.heads = place.tokens(x).shape[1]

    def of_keys(self, scale: Scale) -> tuple[Tensor, Literal["tile", "token"]]:
        """Scales of tiles where those of tokens are alike within a tile, else of tokens."""
        each, keys = self.of_tokens(scale), self.tokens
        if not self._within(scale, TILE):
            return self.place.rows(each, self.x), "token"
        tiles = each.new_ones(keys.tiles + 1, self.heads)
        tiles[keys.tile] = each
        tiles = tiles[:-1]
        if self.place.packed:
            return tiles.T.contiguous(), "tile"
        return tiles.unflatten(0, (keys.sequences, keys.tiles_of_each)).transpose(1, 2).contiguous(), "tile"

    def of_values(self, scale: Scale) -> tuple[Tensor, Tensor | None, Literal["channel", "token"]]:
        """Values, and scales of channels where those of tokens are alike within a sequence."""
        if self.x.dtype in _GIVEN:
            return self.x, None, "channel"
        each, keys = self.of_tokens(scale), self.tokens
        if not self._within(scale, None):
            return self.x.contiguous(), self.place.rows(each, self.x), "token"
        channels = each.new_ones(keys.sequences + 1, self.heads)
        channels[keys.sequence] = each
        of_channels = channels[:-1, :, None].repeat(1, 1, self.x.shape[-1])
        return turned(self.place.tokens(self.x), keys, self.place), of_channels, "channel"

    def _within(self, scale: Scale, size: int | None) -> bool:
        """True if a scale is one number for each head of `size` tokens at least; None: of a sequence."""
        if not isinstance(scale, Tensor) or scale.ndim < 2 or self._by_sequence(scale):
            return True
        return (
            size is not None and self._in_blocks(scale) and self.block is not None and self.block % size == 0
        )

    def of_tokens(self, scale: Scale, kv_heads: int | None = None) -> Tensor:
        """Scales of tokens [T, H]. kv_heads: heads whose group of queries may share a scale."""
        tokens = self.place.tokens(self.x)
        if not isinstance(scale, Tensor):
            number = 1.0 if scale is None else float(scale)
            return torch.full(tokens.shape[:2], number, device=self.x.device)
        each = self._spread(scale)
        heads = each.shape[1]
        if heads != self.heads and heads == kv_heads:
            each = each.repeat_interleave(self.heads // heads, 1)
        elif heads not in (1, self.heads) or (scale.ndim and heads != self.heads):
            raise self._unfit(scale)
        return each.expand(tokens.shape[:2]).contiguous()

    def _spread(self, scale: Tensor) -> Tensor:
        """A scale as [1 or T, 1 or its heads]."""
        if scale.ndim < 2:
            return scale.view(1, -1)
        if self._by_sequence(scale):
            return torch.cat([scale, scale.new_ones(1, scale.shape[1])])[self.tokens.sequence]
        if scale.shape[-1] == self._length and scale.ndim == self._rank:
            return self.place.of_rows(scale)
        if not self._in_blocks(scale):
            raise self._unfit(scale)
        assert self.block is not None
        if not self.place.packed:
            return self.place.of_rows(scale.repeat_interleave(self.block, 2)[:, :, : self._length])
        each = (self._starts.diff() + self.block - 1) // self.block
        first = torch.cat([each.new_zeros(1), each.cumsum(0)])
        self._check_blocks(scale, first[-1])
        at = first[self.tokens.sequence] + self.tokens.place // self.block
        return scale.T[at.clamp(0, scale.shape[1] - 1)]

    @property
    def _starts(self) -> Tensor:
        lengths = self.place.varlen
        assert lengths is not None
        starts = lengths.cu_seqlens_q if self.name == "q" else lengths.cu_k
        assert starts is not None
        return starts.to(torch.int64)

    @property
    def _length(self) -> int:
        """Tokens of a row of scales."""
        tokens = len(self.tokens.sequence)
        return tokens if self.place.packed else tokens // max(1, self.tokens.sequences)

    @property
    def _rank(self) -> int:
        return 2 if self.place.packed else 3

    def _by_sequence(self, scale: Tensor) -> bool:
        if scale.ndim != 2 or scale.shape[0] != self.tokens.sequences:
            return False
        if not self.place.packed:
            return True
        if scale.shape[1] == self._length and scale.shape[0] == self.heads and self.block is None:
            raise InputError(
                f"{self.name} descale {list(scale.shape)} of packed tokens: sequences and heads, or heads"
                " and tokens",
                "a shape that can be only one of these",
                "give one number for each token of each head with block=1",
            )
        return scale.shape[1] == self.heads and self.block is None

    def _in_blocks(self, scale: Tensor) -> bool:
        """True for scales of blocks: as many as there are, or at least so many of packed sequences."""
        if self.block is None or scale.ndim != self._rank or scale.shape[-1] == self._length:
            return False
        if self.place.packed:
            return scale.shape[1] >= -(-self._length // self.block)
        return scale.shape[2] == -(-self._length // self.block)

    def _check_blocks(self, scale: Tensor, blocks: Tensor) -> None:
        """Raise InputError for fewer scales than blocks of all packed sequences, on a GPU at a later call."""
        if torch.compiler.is_compiling():
            return
        if not checked_here(blocks):
            words = f"a {self.name} descale of {scale.shape[1]} blocks, fewer than the sequences have"
            later.require_at_each_replay(blocks <= scale.shape[1], words)
        elif scale.shape[1] < int(blocks):
            raise InputError(
                f"{self.name} descale {list(scale.shape)} of {int(blocks)} blocks of {self.block} tokens",
                "a scale for each block of each sequence, which start with the sequence",
                f"give [H, {int(blocks)}], the blocks of one sequence after those of another",
            )

    def _unfit(self, scale: Tensor) -> InputError:
        sizes = f"{self.heads} heads, {self.tokens.sequences} sequences, {len(self.tokens.sequence)} tokens"
        shapes = (
            "[], [H], [N, H], [H, blocks] or [H, T]"
            if self.place.packed
            else ("[], [H], [B, H], [B, H, blocks] or [B, H, S]")
        )
        return InputError(
            f"{self.name} descale {list(scale.shape)} for {sizes}",
            f"{shapes}; blocks with block=",
            "give a scale of the tensor, of heads, of blocks of `block` tokens, or of tokens",
        )


# --- checks -------------------------------------------------------------------------------------------------


def _check(name: str, scale: Tensor) -> None:
    if scale.dtype != torch.float32 or scale.ndim > 3:
        raise InputError(
            f"{name} descale {scale.dtype} {list(scale.shape)}",
            "float32, of at most three dimensions",
            f"e.g. {name}=scale.float(), of a number for each head",
        )


def _check_contents(name: str, scale: Tensor) -> None:
    """Raise InputError for a scale of q or k below 0, on a GPU at a later call."""
    if name == "v" or torch.compiler.is_compiling() or not scale.numel():
        return
    if not checked_here(scale):
        later.require_at_each_replay(~(scale < 0), f"a {name} descale below 0")
    elif (least := float(scale.min())) < 0:
        raise _negative(name, least)


def _negative(name: str, least: float) -> InputError:
    return InputError(
        f"{name} descale of {least}",
        "no scale below 0",
        "negate the codes, whose sign it is",
    )


def _check_dtypes(value: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dtype in _GIVEN and k.dtype in (torch.float8_e4m3fn, torch.int8):
        raise UnsupportedError(
            f"{value}: q of 16 bits beside codes",
            "q and k both torch.int8 or both torch.float8_e4m3fn",
            "a cache of float8_e4m3fn beside such queries is attn(q, k8, v8, kv_scales=KVScales(...))",
        )
    if q.dtype not in _OF_CODES or k.dtype != q.dtype:
        raise UnsupportedError(
            f"{value}: no tensor core multiplies these as q.k with a small error",
            "q and k both torch.int8 or both torch.float8_e4m3fn",
            f"round them alike; formats that quantize() makes are {', '.join(FORMATS)}",
        )
    if v.dtype == torch.int8:
        raise UnsupportedError(
            f"{value}: values of int8 lose a sink's small value beside large ones (17 % error)",
            "v of torch.float8_e4m3fn, bfloat16, float16 or float32",
            "round v to float8_e4m3fn, or leave it as it is",
        )
    if v.dtype != torch.float8_e4m3fn and v.dtype not in _GIVEN:
        raise UnsupportedError(
            value, "v of torch.float8_e4m3fn, bfloat16, float16 or float32", "dequantise v to bfloat16"
        )

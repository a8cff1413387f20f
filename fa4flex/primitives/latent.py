"""Latent: rows that multi-head latent attention keeps, each a key whose first columns are its value."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.base import kind_of, show

VALUE_DIM, ROPE_DIM = 512, 64
"""Columns of DeepSeek-V2's and V3's rows: the latent, and the rotated part of the key."""


@dataclass(frozen=True, eq=False, repr=False)
class Latent:
    """Keys and values of absorbed multi-head latent attention: one row for each token, which all query heads
    share. `cache` is [B, S, 1, width] in any layout of the queries, packed [T, 1, width], or with `paging`
    [pages, page_size, 1, width]; bfloat16, float16 or float32, of any strides but that of columns, which
    is 1.

    value_dim   columns of the value: the first ones of the row
    rope_dim    columns of the key's rotated part: the last ones of the row. They follow the value, so that
                width is value_dim + rope_dim (DeepSeek-V2, V3: 512 + 64), or are its last ones, and width is
                value_dim (all of the row is the value)

        attn(q, fa4flex.Latent(cache), scale=192**-0.5)  # q [B, H, Sq, 576] -> out [B, H, Sq, 512]

    A key is the row, a value its first columns: a view, nothing is copied. The scale of a call is required:
    that of the attention before absorption, 1 / sqrt(nope + rope) of its heads, which no shape here tells.
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 (absorption: 2.1.2). Raises InputError.
    """

    cache: Tensor
    value_dim: int = VALUE_DIM
    rope_dim: int = ROPE_DIM

    def __post_init__(self) -> None:
        if not isinstance(self.cache, Tensor):
            raise InputError(
                f"a latent cache of {kind_of(self.cache)}",
                "a tensor [B, S, 1, width], or [pages, page_size, 1, width] with paging=",
                "pass the cache of one layer",
            )
        sizes = self.value_dim, self.rope_dim
        if any(not isinstance(x, int) or isinstance(x, bool) for x in sizes) or min(sizes) < 0:
            raise InputError(
                f"value_dim={self.value_dim!r}, rope_dim={self.rope_dim!r}",
                "whole numbers of columns",
                f"e.g. value_dim={VALUE_DIM}, rope_dim={ROPE_DIM}",
            )
        self._check_shape()

    def _check_shape(self) -> None:
        shape = list(self.cache.shape)
        if self.cache.ndim not in (3, 4) or shape[-2] != 1:
            raise InputError(
                f"a latent cache of shape {shape}",
                "one KV head: [B, S, 1, width], [pages, page_size, 1, width] or packed [T, 1, width]",
                "give it a dimension of one head: cache.unsqueeze(-2)",
            )
        if shape[-1] not in (self.value_dim + self.rope_dim, self.value_dim) or self.value_dim < 1:
            raise InputError(
                f"latent rows of {shape[-1]} columns with value_dim={self.value_dim},"
                f" rope_dim={self.rope_dim}",
                f"{self.value_dim + self.rope_dim} = value_dim + rope_dim columns, or {self.value_dim} ="
                " value_dim where the rotated columns are part of the value",
                "name the columns of the value, and those of the rotated part",
            )
        if not self.cache.is_floating_point() or self.cache.itemsize == 1:
            raise UnsupportedError(
                f"latent rows of {self.cache.dtype}",
                "bfloat16, float16 or float32",
                "dequantise the rows: cache.to(torch.bfloat16), times their scales",
            )

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.cache.shape[-1]

    def __repr__(self) -> str:
        return f"Latent({show(self.cache)}, value_dim={self.value_dim}, rope_dim={self.rope_dim})"


def refuse_latent(name: str, value: object) -> None:
    """Raise UnsupportedError for latent rows where a tensor is expected."""
    if isinstance(value, Latent):
        raise UnsupportedError(
            f"{name} is a fa4flex.Latent",
            "a tensor here; latent rows are keys of fa4flex.compile(...)(q, latent) and fa4flex.attention",
            "pass the rows as keys, and their first value_dim columns as values, both with heads where those"
            " of q are",
        )

"""Rotary position embeddings: tables of the angles at each position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.base import kind_of, show


@dataclass(frozen=True, eq=False, repr=False)
class Rotary:
    """`cos` and `sin` [positions, half], floats, of the angles of each position (Su et al. 2021, RoFormer).

    The first 2 * half elements of each head are rotated: with interleaved=False in pairs i and i + half
    (GPT-NeoX, Llama in transformers), with interleaved=True in pairs 2 i and 2 i + 1 (GPT-J).

    `axes` int32 [half]: tokens have several positions, such as time, height and width, and angle i turns by
    that of axis axes[i] (M-RoPE of Qwen2-VL: [0] * 16 + [1] * 24 + [2] * 24). Raises InputError.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    axes: Tensor | None = None

    def __post_init__(self) -> None:
        for name, table in (("cos", self.cos), ("sin", self.sin)):
            if not isinstance(table, Tensor) or not table.dtype.is_floating_point:
                raise InputError(
                    f"{name} of {kind_of(table)}", "a tensor of floats", f"convert: {name}.to(torch.float32)"
                )
            if table.ndim != 2 or 0 in table.shape:
                raise InputError(
                    f"{name} of shape {list(table.shape)}",
                    "[positions, half], half being half of the elements that turn",
                    "pass a row per position; tables that repeat each angle twice hold too much:"
                    " [..., :half] of halves next to each other, [..., ::2] of pairs",
                )
        if (
            self.cos.shape != self.sin.shape
            or self.cos.dtype != self.sin.dtype
            or self.cos.device != self.sin.device
        ):
            raise InputError(
                f"cos {self.cos.dtype} {list(self.cos.shape)} on {self.cos.device}, "
                f"sin {self.sin.dtype} {list(self.sin.shape)} on {self.sin.device}",
                "two tables of one shape, dtype and device",
                "make both from the same angles",
            )

        self._check_axes()

    def _check_axes(self) -> None:
        if self.axes is None:
            return
        if not isinstance(self.axes, Tensor) or self.axes.dtype != torch.int32:
            raise InputError(
                f"axes of {kind_of(self.axes)}",
                "an int32 tensor [half]",
                "torch.tensor([0] * 16 + [1] * 24 + [2] * 24, dtype=torch.int32)",
            )
        if self.axes.shape != self.cos.shape[1:] or self.axes.device != self.cos.device:
            raise InputError(
                f"axes {list(self.axes.shape)} on {self.axes.device}, "
                f"cos {list(self.cos.shape)} on {self.cos.device}",
                "the axis of each angle [half], beside cos and sin",
                "give one axis per column of cos",
            )

    def turned(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotated x [tokens, heads, width] for positions [tokens], or [axes, tokens]; float32 maths, or
        float64 for such x."""
        half = self.cos.shape[1]
        compute = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = (self._angles(table, position).to(compute).unsqueeze(1) for table in (self.cos, self.sin))
        turning, rest = x[..., : 2 * half].to(compute), x[..., 2 * half :]
        pairs = turning.unflatten(-1, (half, 2) if self.interleaved else (2, half))
        a, b = pairs.unbind(-1 if self.interleaved else -2)
        both = torch.stack((a * cos - b * sin, b * cos + a * sin), -1 if self.interleaved else -2)
        return torch.cat((both.flatten(-2).to(x.dtype), rest), -1)

    def _angles(self, table: Tensor, position: Tensor) -> Tensor:
        """[tokens, half]."""
        if self.axes is None:
            return table[position]
        column = torch.arange(table.shape[1], device=table.device)
        return table[position[self.axes.long()].T, column]

    def __repr__(self) -> str:
        more = ", interleaved=True" if self.interleaved else ""
        more += "" if self.axes is None else f", axes={show(self.axes)}"
        return f"Rotary({show(self.cos)}, {show(self.sin)}{more})"

"""Masks of Hugging Face models as fa4flex masks, without evaluating them.

transformers hands a mask function, offsets and a padding mask to whoever makes a model's mask. They become
a mask_mod here, which is analysed and evaluated tile by tile, so that no batch x heads x Sq x Skv tensor
exists. What a model or a cache changes later is copied: the mask of a call is the mask at the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.utils.import_utils import is_tracing

MaskFunction = Callable[..., Any]


class ModelMask(BlockMask):
    """The mask of one forward pass: `mask_mod` over this call's queries and keys, None where it allows all.

    It is a BlockMask in type, because that is what models and generation hand on untouched. Where a model
    computes with it as with a boolean [B, 1, Sq, Skv] tensor, it becomes that tensor.
    """

    def __init__(
        self,
        mask_mod: MaskFunction | None,
        shape: tuple[int, int, int],
        source: dict[str, Any],
        *,
        by_positions: bool = False,
    ) -> None:
        """shape is (B, Sq, Skv); `source` what transformers made the mask from; `by_positions` says that
        documents, which positions tell apart, are not in it yet."""
        self.mask_mod = mask_mod  # type: ignore[assignment]
        self.sizes, self.source = shape, source
        self.by_positions = by_positions
        self._split: tuple[Tensor, MaskFunction | None] | None = None

    def within_documents(self, positions: Any) -> MaskFunction | None:
        """`mask_mod` within the documents of this call's tokens, where positions [B or 1, Sq] start anew.

        Keys of earlier calls belong to the first document, which goes on. A layer that was handed the
        positions of the last one finds what that one made.
        """
        if not self.by_positions or not isinstance(positions, Tensor) or positions.ndim != 2:
            return self.mask_mod
        fits = positions.shape[1] == self.sizes[1] > 1
        if not fits or positions.is_meta or is_tracing(positions):
            return self.mask_mod
        if self._split is None or self._split[0] is not positions:
            self._split = positions, self._within(positions)
        return self._split[1]

    def _within(self, positions: Tensor) -> MaskFunction | None:
        anew = torch.nn.functional.pad(positions.diff(dim=1) <= 0, (1, 0))
        if not anew.any():
            return self.mask_mod
        rows, kv_len = anew.cumsum(1), self.sizes[2]
        place = torch.arange(kv_len, device=rows.device) - (
            self.source["q_offset"] - self.source["kv_offset"]
        )
        keys = rows[:, place.clamp(0, rows.shape[1] - 1)].masked_fill(place < 0, 0)
        shared = len(rows) == 1

        def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            row = 0 if shared else b
            return rows[row, q_idx] == keys[row, kv_idx]

        return _both(self.mask_mod, same)

    @property
    def shape(self) -> tuple[int, ...]:
        batch, q_len, kv_len = self.sizes
        return batch, 1, q_len, kv_len

    @property
    def ndim(self) -> int:
        return 4

    @property
    def dtype(self) -> torch.dtype:
        return torch.bool

    @property
    def device(self) -> torch.device:
        return torch.device(self.source["device"])

    def contiguous(self) -> ModelMask:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself on its own device, else the tensor [B, 1, Sq, Skv]: layers on other devices read that."""
        if not kwargs and len(args) == 1 and isinstance(args[0], (str, torch.device)):
            device = torch.device(args[0])
            if device == self.device or (device.type == self.device.type and device.index is None):
                return self
        return self.dense().to(*args, **kwargs)

    def dense(self) -> Tensor:
        """[B, 1, Sq, Skv] bool."""
        batch, q_len, kv_len = self.sizes
        made = sdpa_mask(batch, q_len, kv_len, allow_is_causal_skip=False, **self.source)
        assert made is not None
        return made

    def __getitem__(self, index: Any) -> Any:
        return self.dense()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args = [x.dense() if isinstance(x, ModelMask) else x for x in args]
        return func(
            *args, **{k: x.dense() if isinstance(x, ModelMask) else x for k, x in (kwargs or {}).items()}
        )

    def __and__(self, other: Any) -> Any:
        return self.dense() & other

    def __or__(self, other: Any) -> Any:
        return self.dense() | other

    def __invert__(self) -> Tensor:
        return ~self.dense()

    def __repr__(self) -> str:
        return f"ModelMask{list(self.shape)}"

    __str__ = __repr__


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> ModelMask | Tensor:
    """The model's mask as a fa4flex mask over this call's query and key positions.

    q_offset        the number of tokens before the first query; static caches give a tensor of one element,
                    which they advance in place before the layers read the mask, so it is copied
    attention_mask  [batch, tokens seen so far] bool, False where a token is padding, or None
    """
    function = causal_mask_function if mask_function is None else mask_function
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None and _known_to_be_full(padding):
        padding = None
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone().reshape(())
    source = {
        "q_offset": q_offset, "kv_offset": kv_offset, "mask_function": function, "attention_mask": padding,
        "use_vmap": options.get("use_vmap", False), "device": options.get("device", "cpu"),
    }  # fmt: skip
    window = _window(function)
    if window is None:
        mod: MaskFunction | None = _positioned(function, q_offset, kv_offset)
    else:
        mod = _diagonal(window, q_offset - kv_offset, (q_length, kv_length))
    if padding is not None:
        mod = _without_padding(mod, padding, kv_offset)
    sizes = batch_size, q_length, kv_length
    made = ModelMask(mod, sizes, source, by_positions=attention_mask is None and _is_one_document(function))
    config = options.get("config")
    return made.dense() if getattr(config, "model_type", None) in READ_THEIR_MASKS else made


READ_THEIR_MASKS = {"deepseek_v4", "doge"}
"""Models that add keys to a mask, or mask other tensors with it, if it is a tensor, and drop it otherwise."""


def _is_one_document(function: Any) -> bool:
    """True for a mask of decoders in which transformers has not told documents apart: it does where a model
    has no cache. A compiler looks at no positions, and has it do so for all of them."""
    if torch.compiler.is_compiling() or function is bidirectional_mask_function:
        return False
    return not _reads(function, _PACKED.__code__)


_PACKED: Any = packed_sequence_mask_function(torch.zeros(1, 1))


def _reads(function: Any, code: Any) -> bool:
    """True if a mask function is, or is composed of, one of this code."""
    if getattr(function, "__code__", None) is code:
        return True
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    flat = [each for x in held for each in (x if isinstance(x, tuple) else (x,))]
    return any(_reads(each, code) for each in flat if callable(each))


def _known_to_be_full(padding: Tensor) -> bool:
    """True where it is seen, without a wait for a device or a compiler's guard, that no token is padding."""
    return padding.device.type == "cpu" and not is_tracing(padding) and bool(padding.all())


EVERYWHERE = 0
"""The window of a mask that allows all keys up to the query."""

_EXAMPLE: Any = sliding_window_causal_mask_function(1)
_OVERLAY: Any = _EXAMPLE.__closure__[0].cell_contents[0]


def _window(function: Any) -> int | None:
    """The window of a causal mask, EVERYWHERE without one; None for any other mask, or while compiling.

    These masks depend on the distance from query to key alone. Written with that distance, the mask of every
    decoded token is the same, and nothing about it has to be found out again.
    """
    if function is causal_mask_function:
        return EVERYWHERE
    if torch.compiler.is_compiling() or getattr(function, "__code__", None) is not _EXAMPLE.__code__:
        return None
    overlay, *rest = function.__closure__[0].cell_contents
    if rest != [causal_mask_function] or getattr(overlay, "__code__", None) is not _OVERLAY.__code__:
        return None
    return int(overlay.__closure__[0].cell_contents)


def _diagonal(window: int, shift: int | Tensor, lengths: tuple[int, int]) -> MaskFunction | None:
    """A causal mask `shift` keys to the right of the diagonal, None if it allows all keys."""
    q_len, kv_len = lengths
    if isinstance(shift, int) and q_len == 1 and shift >= kv_len - 1 and (not window or shift < window):
        return None
    if not window:
        return lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + shift
    return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx + shift) & (kv_idx > q_idx + shift - window)


def _positioned(function: MaskFunction, q_offset: int | Tensor, kv_offset: int) -> MaskFunction | None:
    """`function` at absolute token positions, None if it allows all keys."""
    if function is bidirectional_mask_function:
        return None
    return lambda b, h, q_idx, kv_idx: function(b, h, q_idx + q_offset, kv_idx + kv_offset)


def _both(mod: MaskFunction | None, other: MaskFunction) -> MaskFunction:
    """Pairs that both masks allow; None allows all."""
    if mod is None:
        return other

    def both(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mod(b, h, q_idx, kv_idx) & other(b, h, q_idx, kv_idx)

    return both


def _without_padding(mod: MaskFunction | None, padding: Tensor, kv_offset: int) -> MaskFunction:
    """`mod` without the padded keys; padding [B, tokens] bool, False where a token is padding."""
    return _both(mod, lambda b, h, q_idx, kv_idx: padding[b, kv_idx + kv_offset])


def from_table(table: Tensor) -> Callable[..., Any]:
    """A mask_mod of a boolean tensor, broadcast to [B, H, Sq, Skv]; of any other, its element at an index."""
    table = table[(None,) * (4 - table.ndim)]
    batches, heads, rows, keys = (size > 1 for size in table.shape)

    def read(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        place = b if batches else 0, h if heads else 0, q_idx if rows else 0, kv_idx if keys else 0
        return table[place]

    return read


def with_bias(score_mod: Callable[..., Any] | None, bias: Tensor) -> Callable[..., Any]:
    """`score_mod`, then an additive bias, broadcast to [B, H, Sq, Skv]."""
    read = from_table(bias)

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        before = score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)
        return before + read(b, h, q_idx, kv_idx)

    return biased


def within_sequences(
    mask_mod: MaskFunction | None, cu_seqlens: tuple[Tensor, Tensor], qk: tuple[Any, Any]
) -> MaskFunction:
    """`mask_mod` within packed sequences of query and key [1, H, S, D], which begin at cu_seqlens [N + 1].

    Models and collators pass them as arguments of flash attention, with positions or without.
    """
    rows, keys = (
        torch.searchsorted(starts[1:], torch.arange(x.shape[2], device=x.device), right=True)
        for starts, x in zip(cu_seqlens, qk, strict=True)
    )
    return _both(mask_mod, lambda b, h, q_idx, kv_idx: rows[q_idx] == keys[kv_idx])

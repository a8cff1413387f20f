"""Attention of diffusers' layers, and what is composed with it for the time of a `with` block."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from fa4flex.api import Attention, compile
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.integrations.model_mask import from_table, with_bias
from fa4flex.primitives.base import kind_of
from fa4flex.primitives.blocks import BlockMap
from fa4flex.primitives.lists import Lists
from fa4flex.primitives.mask import as_mask
from fa4flex.primitives.score import as_score
from fa4flex.torch_internals import backward_pass
from fa4flex.variant import Variant, changed

__all__ = ["Composed", "attend", "fa4flex_attention"]

Qkv = tuple[Tensor, Tensor, Tensor]


def fa4flex_attention(
    attn: Attention | None = None, *, modules: Iterable[nn.Module] | None = None, **composition: Any
) -> Composed:
    """Compose the attention of diffusers' layers under the backend "fa4flex", within a `with` block.

    attn         a compiled attention, of either layout; or instead of it
    composition  what fa4flex.compile takes: score_mod, mask, blocks, sinks, output_mod, normalizer, ...
    modules      the layers whose calls it is for, or modules that hold them; all calls by default

    A mask that the model itself passes hides keys besides. A map or a mask has to fit each call it is for:
    where self-attention and cross-attention take turns, `modules` says which is meant. Of blocks inside each
    other, those with `modules` go before those without, then the innermost decides alone; both hold for all
    threads. Layers that are checkpointed run again in the backward pass, which then belongs inside.

    Leaving the block raises UnsupportedError if no call was composed. Raises InputError, and the errors of
    fa4flex.compile.
    """
    if attn is not None and (composition or not isinstance(attn, Attention)):
        raise InputError(
            f"{kind_of(attn)} as the attention{' and ' + ', '.join(composition) if composition else ''}",
            "one compiled attention, or what one is composed of",
            "e.g. fa4flex_attention(fa4flex.compile(mask=m)), or fa4flex_attention(mask=m)",
        )
    chosen = None if modules is None else tuple(modules)
    if chosen is not None and not (chosen and all(isinstance(each, nn.Module) for each in chosen)):
        raise InputError(
            "modules= without modules" if not chosen else f"modules= with {kind_of(chosen[0])}",
            "torch modules, such as a model's attention layers",
            "e.g. modules=[block.attn1 for block in transformer.blocks]",
        )
    return Composed(_laid_out(attn) if attn is not None else _compiled(composition), chosen)


def _compiled(composition: dict[str, Any]) -> Attention:
    if "layout" in composition:
        raise InputError("layout=", "a composition alone: models have their own layout", "leave it out")
    return compile(layout="bshd", **composition)


def _laid_out(attn: Attention) -> Attention:
    """The attention for tensors [B, S, H, D]."""
    return attn if attn.variant.layout == "bshd" else Attention(changed(attn.variant, layout="bshd"))


class Composed:
    """A composition for the calls of diffusers' layers, entered by `with`: see `fa4flex_attention`.

    attn   the attention that is computed
    calls  number of calls that it served
    """

    def __init__(self, attn: Attention, modules: tuple[nn.Module, ...] | None) -> None:
        self.attn = attn
        self.calls = 0
        self._modules = modules
        self._hooks: list[Any] = []

    def __enter__(self) -> Composed:
        if self in _entered:
            raise InputError(
                "a composition that is entered already", "one `with` for each", "make another one"
            )
        _entered.append(self)
        self.calls = 0
        for module in self._modules or ():
            self._hooks += [
                module.register_forward_pre_hook(lambda *_: _inside().append(self)),
                module.register_forward_hook(lambda *_: _leave(), always_call=True),
            ]
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        _entered.remove(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        _ended.calls = _ended.calls or self.calls > 0
        if kind is None and not self.calls:
            raise UnsupportedError(
                "a composition that no attention was computed with: no call of "
                + ("its modules" if self._modules else "any layer")
                + ' ran under the backend "fa4flex"',
                "a model under that backend, called within the block",
                'call model.set_attention_backend("fa4flex"), again after fuse_qkv_projections and '
                "set_attn_processor; and name modules before torch.compile sees the model",
            )

    def __repr__(self) -> str:
        return f"<{self.attn!r} for diffusers: {self.calls} calls>"


class _Ended:
    calls = False
    """True if a composition was left that served calls, and no call was made outside of all of them since."""


_entered: list[Composed] = []
_ended = _Ended()
_threads = threading.local()


def _inside() -> list[Composed]:
    """Compositions of the modules that this thread is in, the innermost last."""
    stack: list[Composed] | None = getattr(_threads, "stack", None)
    if stack is None:
        stack = _threads.stack = []
    return stack


def _leave() -> None:
    _inside().pop()


def _active() -> Composed | None:
    """The composition of a call here and now."""
    everywhere = [each for each in _entered if each._modules is None]
    if torch.compiler.is_compiling():
        return everywhere[-1] if everywhere else None
    found = _inside() or everywhere
    if backward_pass() == -1:
        _ended.calls = _ended.calls and bool(_entered)
    elif not _entered and _ended.calls:
        raise UnsupportedError(
            "a checkpointed layer that runs again in the backward pass, after its composition was left",
            "a backward pass inside the same `with fa4flex_attention(...)`",
            "move loss.backward() into the block",
        )
    return found[-1] if found else None


# --- one call -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    """Requests of a layer beside its mask."""

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def attend(qkv: Qkv, mask: Any, options: dict[str, Any]) -> Tensor:
    """Attention of one call of a layer: q [B, Sq, Hq, D], k [B, Skv, Hkv, D], v [B, Skv, Hkv, Dv], of plain
    tensors, to [B, Sq, Hq, Dv].

    mask     a tensor that broadcasts to [B, Hq, Sq, Skv], or anything that is composed
    options  those of scaled_dot_product_attention, and what fa4flex.compile takes; others raise InputError
    """
    own = {name: options.pop(name) for name in [*options] if name not in _OPTIONS}
    asked, composed = _Asked(**options), _active()
    if mask is not None and not isinstance(mask, Tensor):
        own |= {"attn": mask} if isinstance(mask, Attention) else {_role(mask): mask}
        mask = None
    if own and composed is not None:
        raise InputError(
            f"a call with {', '.join(own)} of its own inside fa4flex_attention(...)",
            "one composition",
            "leave out one of the two",
        )
    if own:
        attn = _laid_out(own["attn"]) if [*own] == ["attn"] else _compiled(own)
    else:
        attn = _plain if composed is None else composed.attn
    out = _with_what_is_asked(attn, qkv, mask, asked)
    if composed is not None:
        composed.calls += 1
    return out


_OPTIONS = frozenset(field.name for field in fields(_Asked))


def _role(mask: Any) -> str:
    return "blocks" if isinstance(mask, (BlockMap, BlockMask, Lists)) else "mask"


def _with_what_is_asked(attn: Attention, qkv: Qkv, table: Tensor | None, asked: _Asked) -> Tensor:
    variant = attn.variant
    _check(variant, qkv, table, asked)
    if table is not None or asked.is_causal:
        attn = Attention(_masked(variant, table, asked.is_causal))
    out: Tensor = attn(*qkv, scale=asked.scale, dropout=asked.dropout_p or None)
    return out


def _masked(variant: Variant, table: Tensor | None, is_causal: bool) -> Variant:
    """The variant under the mask of the layer: hidden keys are hidden whatever the variant allows, a bias is
    added to its scores."""
    masks = [] if variant.allowed is None else [variant.allowed]
    score = variant.score_mod
    if is_causal:
        masks.append(as_mask(_top_left))
    elif table is not None and table.dtype == torch.bool:
        masks.append(as_mask(from_table(table)))
    elif table is not None:
        bias = as_score(with_bias(None, table))
        score = bias if score is None else score >> bias
    allowed = reduce(operator.and_, masks) if masks else None
    return changed(variant, mask=allowed, blocks=None, score_mod=score)


def _top_left(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def _check(variant: Variant, qkv: Qkv, table: Tensor | None, asked: _Asked) -> None:
    q, k, _ = qkv
    if q.shape[2] != k.shape[2] and not asked.enable_gqa:
        raise InputError(
            f"{q.shape[2]} heads of queries and {k.shape[2]} of keys", "equal numbers", "pass enable_gqa=True"
        )
    if asked.scale is not None and variant.scale is not None:
        raise InputError(
            f"scale={asked.scale} of the layer and scale={variant.scale} of the composition",
            "one scale",
            "leave scale out of the composition",
        )
    if asked.dropout_p and variant.dropout is not None:
        raise InputError(
            f"dropout_p={asked.dropout_p} of the layer and {variant.dropout!r} of the composition",
            "one dropout",
            "call model.eval(), or leave dropout out of the composition",
        )
    if table is None:
        return
    if asked.is_causal:
        raise InputError("attn_mask and is_causal", "one of them", "put the causal part into the mask")
    shape = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    fits = 2 <= table.ndim <= 4 and all(
        size in (1, extent) for size, extent in zip(reversed(table.shape), reversed(shape))
    )
    if not fits or not (table.dtype == torch.bool or table.is_floating_point()):
        raise InputError(
            f"an attn_mask {list(table.shape)} of {table.dtype}",
            f"a boolean or a floating one that broadcasts to {list(shape)}",
            "masks of another kind can be given as mask= or blocks= of fa4flex_attention(...)",
        )


_plain = compile(layout="bshd")

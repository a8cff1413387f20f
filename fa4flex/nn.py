"""Attention as a `torch.nn.Module` that owns its learnable tensors: biases, slopes, gates, sinks.

    attention = fa4flex.nn.Attention(relative, causal, parameters={"bias": torch.zeros(8, 1023)}, sinks=8)

    def relative(score, b, h, q_idx, kv_idx, bias):
        return score + bias[h, q_idx - kv_idx + 511]

Parameters and buffers are looked up in the module at each call, so that replacements are noticed:
fully_shard, load_state_dict(assign=True), functional_call, AveragedModel, deepcopy, to_empty. Importing this
module registers the operators that exported programs call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from fa4flex import api
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.base import CONTEXT, FunctionMod, Mod, bound_keywords, kind_of
from fa4flex.primitives.blocks import BlockMap
from fa4flex.primitives.dropout import Dropout
from fa4flex.primitives.latent import Latent
from fa4flex.primitives.lists import Lists
from fa4flex.primitives.mask import Mask, ModMask
from fa4flex.primitives.output import ModOutput, OutputMod
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.score import ModScore, ScoreMod
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import launch
from fa4flex.variant import Variant, at_call, changed, compose

__all__ = ["Attention"]

Shape = int | tuple[int, ...]
"""The shape of a tensor that is made here, of float32 zeros."""


class Attention(nn.Module):
    """A compiled variant that owns its learnable tensors.

    score_mod   as for `fa4flex.compile`; its functions may have further parameters, named in `parameters`
                or `buffers`, and receive these tensors by keyword
    mask        the same for masks
    output_mod  the same for output functions
    normalizer  a fa4flex.Normalizer; the function of an elementwise one the same
    parameters  by name, a tensor, which becomes a Parameter, or the shape of one that starts as zeros
    buffers     by name, a tensor that does not learn
    sinks       the number of query heads, for a Parameter of zeros, or a floating tensor [Hq]
    dropout     a fa4flex.Dropout of the normalised weights, or its p: in training mode alone, as nn.Dropout
    composition `blocks`, `scale`, `layout`, `precision` and `schedule` of fa4flex.compile; a block map
                stays on its device, so pass one that has to follow the model with each call

    A subclass may define `score_mod(self, score, b, h, q_idx, kv_idx)`, `mask_mod(self, b, h, q_idx, kv_idx)`
    and `output_mod(self, out, b, h, q_idx, d_idx)` instead, which read parameters that it registers.
    Raises InputError for names that no function takes, or that the module or an index has already.
    """

    sinks: Tensor | None
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    output_mod: Callable[..., Any] | None = None

    def __init__(
        self,
        score_mod: Any = None,
        mask: Any = None,
        *,
        parameters: Mapping[str, Tensor | Shape] | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        sinks: Tensor | int | None = None,
        output_mod: Any = None,
        dropout: Dropout | float | None = None,
        normalizer: Any = None,
        **composition: Any,
    ) -> None:
        super().__init__()
        score_mod = _either("score_mod", score_mod, self.score_mod)
        mask = _either("mask", mask, self.mask_mod)
        parameters, buffers = dict(parameters or {}), dict(buffers or {})
        for name in (*parameters, *buffers):
            self._check_name(name, name in parameters and name in buffers)
        for name, value in parameters.items():
            self.register_parameter(name, _parameter(name, value))
        for name, value in buffers.items():
            self.register_buffer(name, value)
        self.register_parameter("sinks", None if sinks is None else _parameter("sinks", sinks))
        self._zeroed = tuple(
            name for name, x in {**parameters, "sinks": sinks}.items() if isinstance(x, (int, tuple))
        )
        output_mod = _either("output_mod", output_mod, self.output_mod)
        composition |= {"output_mod": output_mod, "dropout": dropout, "normalizer": normalizer}
        variant = compose(score_mod, mask, **composition)
        owned = frozenset((*parameters, *buffers))
        self._variant = _with_mods(variant, lambda mod: _open(mod, owned))
        _check_all_taken(owned, [getattr(self._variant, name) for name in _MODS])
        self._open = bool(owned)
        self._caller = launch.Caller()

    def forward(
        self,
        q: Tensor,
        k: Tensor | Latent,
        v: Tensor | None = None,
        *,
        varlen: Varlen | None = None,
        paging: Paging | None = None,
        blocks: BlockMap | BlockMask | Lists | None = None,
        scale: float | None = None,
        return_lse: bool = False,
        return_aux: Sequence[str] | None = None,
    ) -> Any:
        """Attention of q, k, v, or of q and latent rows, with shapes, dtypes, results and errors of
        `fa4flex.compile(...)(q, k, v)`.

        blocks and scale override those of the module for this call.
        """
        attention = api.Attention(self._now(), self._caller)
        return attention(
            q,
            k,
            v,
            varlen=varlen,
            paging=paging,
            blocks=blocks,
            scale=scale,
            sinks=self.sinks,
            return_lse=return_lse,
            return_aux=return_aux,
        )

    @property
    def variant(self) -> Variant:
        """The variant with the module's tensors as they are now."""
        return at_call(self._now(), sinks=self.sinks)

    def compiled(self) -> api.Attention:
        """The variant with the module's tensors as they are now: see `.explain()`, `.source()`, `.mask`."""
        return api.Attention(self.variant, self._caller)

    def _now(self) -> Variant:
        """The variant whose functions receive the parameters and buffers of this moment."""
        variant: Variant = self._variant
        if variant.dropout is not None and not self.training:
            variant = changed(variant, dropout=None)
        if not self._open:
            return variant
        return _with_mods(variant, lambda mod: _closed(mod, self))

    def reset_parameters(self) -> None:
        """Fill with zeros the tensors that were declared by shape.

        Raises UnsupportedError if parameters were passed as tensors: their first values are not kept.
        """
        arguments = [name for name, _ in self.named_parameters(recurse=False) if name not in self._zeroed]
        if arguments:
            raise UnsupportedError(
                f"reset_parameters() of {', '.join(arguments)}, given as tensors",
                "parameters declared by their shape, which start as zeros",
                "define reset_parameters() in a subclass, or load a state dict",
            )
        for name in self._zeroed:
            nn.init.zeros_(getattr(self, name))

    def extra_repr(self) -> str:
        return repr(self._variant)

    def _check_name(self, name: str, twice: bool) -> None:
        if twice or not name.isidentifier() or name in _INDICES or hasattr(self, name):
            why = "both among parameters and buffers" if twice else "taken, or no Python name"
            raise InputError(
                f"the name {name!r}, {why}",
                "names that the module, the indices and the lengths do not have",
                f"rename it there and in the function, e.g. {name}_table",
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_caller": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._caller = launch.Caller()


_INDICES = ("score", "b", "h", "q_idx", "kv_idx", *CONTEXT)


def _either(name: str, value: Any, method: Any) -> Any:
    if value is not None and method is not None:
        raise InputError(
            f"{name}= and a method of the class",
            "one of them",
            f"leave out {name}=, or call its function from the method",
        )
    return method if value is None else value


def _parameter(name: str, value: Any) -> nn.Parameter:
    if isinstance(value, nn.Parameter):
        return value
    if isinstance(value, Tensor) and value.is_floating_point():
        return nn.Parameter(value.detach())
    if isinstance(value, (int, tuple)) and not isinstance(value, bool):
        return nn.Parameter(torch.zeros(value))
    raise InputError(
        f"{name} of {kind_of(value)}",
        "a floating tensor, or its shape",
        f"give a tensor of floats, e.g. torch.tensor(0.5); what does not learn is a buffer:"
        f" buffers={{{name!r}: ...}}",
    )


# --- functions that take parameters of the module -----------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class _Open(FunctionMod):
    """A function that still needs tensors of the module, by `names`."""

    names: tuple[str, ...] = ()
    kind: type[FunctionMod] = FunctionMod

    def closed(self, owner: nn.Module) -> Mod:
        """The mod of the function with the tensors that `owner` holds now."""
        function = functools.partial(self.mod, **{name: getattr(owner, name) for name in self.names})
        if not torch.compiler.is_compiling():
            function.context = self.context  # type: ignore[attr-defined]  # spares a look at the signature
        return self.kind(function, self.label)

    def __reduce__(self) -> Any:
        _, (mod, label) = super().__reduce__()
        return type(self), (mod, label, None, self.names, self.kind)


class _OpenScore(_Open, ScoreMod):
    pass


class _OpenMask(_Open, Mask):
    pass


class _OpenOutput(_Open, OutputMod):
    pass


_KINDS: dict[type[FunctionMod], tuple[int, type[_Open]]] = {
    ModScore: (5, _OpenScore), ModMask: (4, _OpenMask), ModOutput: (5, _OpenOutput),
}  # fmt: skip
"""Number of indices of each kind of function, and its open kind."""


def _open(mod: Any, owned: frozenset[str]) -> Any:
    """`mod` with an _Open in place of each function that takes parameters named in `owned`."""
    if type(mod) in _KINDS:
        indices, kind = _KINDS[type(mod)]
        names = _taken(mod.mod, owned, indices) if mod.made is None else ()
        return kind(mod.mod, mod.label, None, names, type(mod)) if names else mod
    return _rebuilt(mod, lambda part: _open(part, owned))


def _closed(mod: Any, owner: nn.Module) -> Any:
    """`mod` with its open functions closed over the tensors that `owner` holds now."""
    if isinstance(mod, _Open):
        return mod.closed(owner)
    return _rebuilt(mod, lambda part: _closed(part, owner))


def _rebuilt(mod: Any, change: Callable[[Mod], Mod]) -> Any:
    """A composition of changed parts; anything else as it is."""
    if not isinstance(mod, Mod) or isinstance(mod, FunctionMod):
        return mod
    parts = [getattr(mod, name) for name, field in _dataclass_fields(mod).items() if field.init]
    changed = [change(part) if isinstance(part, Mod) else part for part in parts]
    same = all(new is old for new, old in zip(changed, parts, strict=True))
    return mod if same else type(mod)(*changed)


def _dataclass_fields(value: Any) -> dict[str, Any]:
    return getattr(type(value), "__dataclass_fields__", {})


_MODS = "score_mod", "mask", "output_mod", "normalizer"
"""Fields of a variant that are functions of users."""


def _with_mods(variant: Variant, change: Callable[[Any], Any]) -> Variant:
    """The variant with its functions changed."""
    mods = {name: getattr(variant, name) for name in _MODS}
    new = {name: change(mod) for name, mod in mods.items()}
    return variant if all(new[name] is mods[name] for name in _MODS) else changed(variant, **new)


def _taken(function: Any, owned: frozenset[str], indices: int) -> tuple[str, ...]:
    """Names in `owned` of parameters that `function` has besides its indices."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()
    value = bound_keywords(function)
    return tuple(name for name in parameters[indices:] if name in owned and name not in value)


def _check_all_taken(owned: frozenset[str], mods: Sequence[Any]) -> None:
    missing = sorted(owned - {name for mod in mods for name in _names(mod)})
    if missing:
        raise InputError(
            f"{', '.join(missing)}, which no function of score_mod=, mask=, output_mod= or normalizer= takes",
            f"functions with such a parameter: score_mod(score, b, h, q_idx, kv_idx, {missing[0]})",
            "add the parameter, or register the tensor in a subclass whose method reads it",
        )


def _names(mod: Any) -> Iterator[str]:
    if isinstance(mod, _Open):
        yield from mod.names
    elif isinstance(mod, Mod):
        for name in _dataclass_fields(mod):
            yield from _names(getattr(mod, name))

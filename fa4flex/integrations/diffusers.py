"""diffusers: `pipe.transformer.set_attention_backend("fa4flex")`.

Importing this module adds the backend to those of diffusers' attention dispatcher, where diffusers is
installed. Layers that dispatch (Flux, Wan, HunyuanVideo) get it by that; layers that call torch's
scaled_dot_product_attention (Stable Diffusion 3) have that one call answered here. What a model cannot say, a
block map for each step or a mod, is said around its call:

    with fa4flex_attention(blocks=blocks, modules=[block.attn1 for block in transformer.blocks]):
        video = transformer(latents, step, text)
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fa4flex.errors import UnsupportedError
from fa4flex.integrations.composed import attend, fa4flex_attention
from fa4flex.integrations.patching import patch

__all__ = ["attention_forward", "check", "fa4flex_attention", "register"]

NAME = "fa4flex"
MEMBER = "FA4FLEX"
"""Name of the backend among the members of diffusers' enumeration."""
SDPA = "scaled_dot_product_attention"


def register() -> None:
    """Make "fa4flex" known to diffusers' attention dispatcher (0.36 or later).

    From then on `set_attention_backend("fa4flex")`, of models and of their layers, and diffusers'
    `attention_backend("fa4flex")` take the name, and a model whose layers would ignore it is refused (see
    `check`). Importing this module has called it where diffusers is installed; calling it again is harmless.
    """
    dispatch, registry = _dispatcher()
    backend = _member(dispatch.AttentionBackendName)
    registry.register(backend)(attention_forward)
    registry._supported_arg_names[backend] = _Every(registry._supported_arg_names[backend])
    from diffusers import ModelMixin

    patch(ModelMixin, "set_attention_backend", _chosen)
    patch(_of_layers(), "set_attention_backend", _chosen)


def _dispatcher() -> tuple[Any, Any]:
    """diffusers' module of attention backends, and its registry."""
    if importlib.util.find_spec("diffusers") is None:
        raise UnsupportedError("no diffusers", "diffusers 0.36 or later", "pip install 'fa4flex[diffusers]'")
    import diffusers

    try:
        from diffusers.models import attention_dispatch
    except ImportError:
        registry = None
    else:
        registry = getattr(attention_dispatch, "_AttentionBackendRegistry", None)
    if not hasattr(registry, "_supported_arg_names"):
        raise UnsupportedError(
            f"diffusers {diffusers.__version__}, whose attention backends are registered in another way",
            "0.36 or later, with diffusers.models.attention_dispatch",
            "pip install 'diffusers>=0.36', or call fa4flex.patch_sdpa() around the model",
        )
    return attention_dispatch, registry


def _of_layers() -> Any:
    from diffusers.models.attention import AttentionModuleMixin

    return AttentionModuleMixin


def _member(names: Any) -> Any:
    """The backend's member of the enumeration of names, which diffusers has no way to add to: it compares and
    looks up members, so one that its tables hold is as good as one of its own."""
    if MEMBER not in names.__members__:
        made = str.__new__(names, NAME)
        made._name_, made._value_, made._sort_order_ = MEMBER, NAME, len(names.__members__)
        type.__setattr__(names, MEMBER, made)
        names._member_names_.append(MEMBER)
        names._member_map_[MEMBER] = names._value2member_map_[NAME] = made
    return names(NAME)


class _Every:
    """Names of the arguments of the backend's function. The dispatcher drops those that are not among them,
    without a word; this holds any, so that the function sees them, and refuses."""

    def __init__(self, known: Any) -> None:
        self.known = tuple(known)

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter(self.known)


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **options: Any
) -> Tensor:
    """query [B, Sq, Hq, D], key [B, Skv, Hkv, D] and value [B, Skv, Hkv, Dv]; returns [B, Sq, Hq, Dv].

    attn_mask is boolean (True attends) or is added to scores, and broadcasts to [B, Hq, Sq, Skv]; of shape
    [B, Skv] it is the keys' padding. It may also be a fa4flex mask, a BlockMap, or a compiled attention.
    options: dropout_p, is_causal (aligned top-left), scale, enable_gqa; and what fa4flex.compile takes.
    Raises InputError or UnsupportedError for others.
    """
    for name in ("return_lse", "_parallel_config"):
        if options.pop(name, None):
            raise UnsupportedError(
                f"{name.removeprefix('_')} in a call of the backend {NAME!r}",
                "calls of one rank, which return the output",
                "use fa4flex.compile(...).parallel, or another attention backend of diffusers",
            )
    padding = isinstance(attn_mask, Tensor) and attn_mask.shape == (query.shape[0], key.shape[1])
    return attend((query, key, value), attn_mask[:, None, None] if padding else attn_mask, options)


# --- which layers it serves ---------------------------------------------------------------------------------


def check(model: torch.nn.Module) -> None:
    """Raise UnsupportedError if attention layers of the model would ignore the backend, because they neither
    dispatch nor call torch's scaled_dot_product_attention, or if it has none."""
    found = [layer.processor for layer in _layers(model)]
    strange = sorted({type(each).__name__ for each in found if not _asks(each) and not _calls_sdpa(each)})
    if found and not strange:
        return
    reason = f"its layers have {', '.join(strange)}" if strange else "it has no attention layers of diffusers"
    raise UnsupportedError(
        f"{type(model).__name__} under the attention backend {NAME!r}: {reason}",
        "layers that dispatch their attention, or call torch's scaled_dot_product_attention",
        "give them such a processor (model.set_attn_processor), or leave the model's backend as it is",
    )


def _layers(model: torch.nn.Module) -> list[Any]:
    """Modules whose processors diffusers gives a backend to."""
    from diffusers.models import attention_processor

    kinds = (_of_layers(), attention_processor.Attention)
    more = getattr(attention_processor, "MochiAttention", None)
    return [x for x in model.modules() if isinstance(x, kinds if more is None else (*kinds, more))]


def _asks(processor: Any) -> bool:
    """True for processors that hand their backend to the dispatcher."""
    return hasattr(processor, "_attention_backend")


def _calls_sdpa(processor: Any) -> bool:
    code = getattr(inspect.unwrap(type(processor).__call__), "__code__", None)
    return code is not None and SDPA in code.co_names


def _chosen(original: Any, model: Any, backend: Any) -> None:
    """set_attention_backend of a model or a layer. diffusers passes over processors that know no backends."""
    if str(getattr(backend, "value", backend)).lower() == NAME:
        check(model)
        for layer in _layers(model):
            if not _asks(layer.processor):
                patch(type(layer.processor), "__call__", _routed)
                layer.processor._attention_backend = None
    original(model, backend)


def _routed(original: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
    """A processor's call, whose scaled_dot_product_attention is answered here if its backend is ours."""
    if getattr(processor, "_attention_backend", None) != NAME:
        return original(processor, *args, **kwargs)
    with _Answered():
        return original(processor, *args, **kwargs)


class _Answered(TorchFunctionMode):
    """Calls of scaled_dot_product_attention go to fa4flex, all others to torch."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") == SDPA:
            return _sdpa(*args, **kwargs)
        return function(*args, **kwargs)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *args: Any, **options: Any) -> Tensor:
    """torch's function, with heads before tokens: [B, H, S, D]."""
    options |= dict(zip(("dropout_p", "is_causal"), args))
    mask = options.pop("attn_mask", mask)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return attend((query, key, value), mask, options).transpose(1, 2)


if importlib.util.find_spec("diffusers") is not None:
    register()

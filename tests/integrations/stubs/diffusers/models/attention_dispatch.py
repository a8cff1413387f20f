"""The dispatcher: backends by name, and the one that is active for layers that name none."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor


class AttentionBackendName(str, Enum):  # noqa: UP042 (as diffusers has it)
    NATIVE = "native"


class _AttentionBackendRegistry:
    _backends: ClassVar[dict[AttentionBackendName, Callable[..., Any]]] = {}
    _constraints: ClassVar[dict[AttentionBackendName, list[Callable[..., Any]]]] = {}
    _supported_arg_names: ClassVar[dict[AttentionBackendName, Any]] = {}
    active = AttentionBackendName.NATIVE

    @classmethod
    def register(cls, backend: AttentionBackendName, constraints: Any = None) -> Callable[..., Any]:
        def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
            cls._backends[backend] = function
            cls._constraints[backend] = constraints or []
            cls._supported_arg_names[backend] = set(inspect.signature(function).parameters)
            return function

        return decorator


@contextlib.contextmanager
def attention_backend(backend: str) -> Iterator[None]:
    before = _AttentionBackendRegistry.active
    _AttentionBackendRegistry.active = AttentionBackendName(backend)
    yield
    _AttentionBackendRegistry.active = before


@_AttentionBackendRegistry.register(AttentionBackendName.NATIVE)
def _native(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **options: Any) -> Tensor:
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    options = {name: options[name] for name in ("dropout_p", "is_causal", "scale", "enable_gqa")}
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*heads_first, attn_mask, **options).transpose(1, 2)


_AttentionBackendRegistry._supported_arg_names[AttentionBackendName.NATIVE] |= {
    "dropout_p", "is_causal", "scale", "enable_gqa",
}  # fmt: skip


def dispatch_attention_fn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    backend: AttentionBackendName | None = None,
    parallel_config: Any = None,
) -> Tensor:
    registry = _AttentionBackendRegistry
    name = registry.active if backend is None else AttentionBackendName(backend)
    given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, "dropout_p": dropout_p}
    given |= {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    given |= {"_parallel_config": parallel_config, **(attention_kwargs or {})}
    for check in registry._constraints[name]:
        check(**given)
    known = registry._supported_arg_names[name]
    return registry._backends[name](**{key: value for key, value in given.items() if key in known})

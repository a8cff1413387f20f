"""torch's scaled_dot_product_attention on fa4flex's kernels where these mean the same, else torch's own.

    with fa4flex.patch_sdpa():
        loss = model(batch)

A call is either served whole, with its gradients, or handed on to torch's function as it came, with a warning
that says why: nothing is ignored, and no result differs by more than rounding.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function

from fa4flex.integrations.sdpa_calls import Asked, serve
from fa4flex.jagged import is_jagged
from fa4flex.torch_internals import constant_in_graphs

__all__ = ["Patch", "patch_sdpa"]

SERVED = "fa4flex"
"""Key of `Patch.calls` for calls that were served."""

_torch_sdpa = F.scaled_dot_product_attention
_active: tuple[Patch, ...] = ()
_wrapped = False
"""True once others put a function of theirs around ours, which they still call."""

_outside = 0
"""Number of calls that run with torch's function in its place."""

_changing = threading.Lock()


def patch_sdpa(*, cpu: bool = False) -> Patch:
    """Have torch.nn.functional.scaled_dot_product_attention run fa4flex's kernels on GPUs that have some.

    Takes effect at once, for all threads, until the returned Patch is left as a context or removed:

        patch = fa4flex.patch_sdpa()
        ...
        patch.remove()

    cpu  serve float calls on a CPU as well; without it torch's own function does

    Served are q [B, Hq, L, E], k [B, Hkv, S, E], v [B, Hkv, S, Ev] of one dtype, with fewer or more leading
    dimensions as well, B and Hkv repeated where they are 1; and nested tensors [B, H, ragged, E] of layout
    torch.jagged. With `is_causal` (aligned top-left, as torch has it), torch's causal biases, boolean masks,
    float masks with their gradients, `dropout_p` (other pairs than torch's, drawn from the same generator),
    `scale` and `enable_gqa`; eager, and in code that torch.compile traces. All else goes to torch's function:
    other shapes and devices, what torch.export traces, transforms, subclasses of tensors, and calls where
    `sdpa_kernel` rules out flash attention. `Patch.calls` counts both, with reasons, each of which is warned
    of once.

    Code that imported the function by its name before, and torch's C++ modules, keep torch's.
    """
    patch = Patch(cpu)
    global _torch_sdpa, _active
    with _changing:
        there = F.scaled_dot_product_attention
        reached = _active or there is scaled_dot_product_attention or (_wrapped and there is not _torch_sdpa)
        if not reached:
            _torch_sdpa = there
            F.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]
        _active = (*_active, patch)
    return patch


class Patch:
    """A patch of scaled_dot_product_attention; the last one made decides.

    cpu    whether calls on a CPU are served
    calls  numbers of calls: those that were "fa4flex"'s, and by reason those that went to torch's function. A
           call in code that torch.compile traces counts when it is traced
    """

    def __init__(self, cpu: bool) -> None:
        self.cpu = cpu
        self.calls: Counter[str] = Counter()
        self._told: set[str] = set()

    def count(self, outcome: str) -> None:
        """Count a call that was served, or a reason for which one was not. A new reason is warned of."""
        self.calls[outcome] += 1
        if outcome == SERVED or outcome in self._told:
            return
        self._told.add(outcome)
        words = f"scaled_dot_product_attention runs torch's own function under fa4flex.patch_sdpa: {outcome}"
        warnings.warn(f"{words}. Patch.calls counts such calls; this is said once", stacklevel=4)

    def remove(self) -> None:
        """Undo this patch. torch's function is back once none is left."""
        global _active, _wrapped
        with _changing:
            _active = tuple([other for other in _active if other is not self])
            if not _active:
                _wrapped = F.scaled_dot_product_attention is not scaled_dot_product_attention
                if not _wrapped:
                    F.scaled_dot_product_attention = _torch_sdpa

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<patch_sdpa(cpu={self.cpu}): {dict(self.calls)}>"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with its arguments and results.

    options: `scale` and `enable_gqa`
    """
    active, compiling = _active, torch.compiler.is_dynamo_compiling()
    if active and not torch.compiler.is_exporting():
        asked = Asked.of(dropout_p, is_causal, options)
        result = serve((query, key, value), attn_mask, asked, active[-1].cpu)
        if not isinstance(result, str):
            _count(SERVED)
            return result
        _count(result)
        if has_torch_function((query, key, value, attn_mask)) and not is_jagged(query):
            run = _without_patch if not compiling else torch.compiler.disable(_without_patch)
            return run(query, key, value, attn_mask, dropout_p, is_causal, **options)
    own: Tensor = _torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, **options)
    return own


def _without_patch(*arguments: Any, **options: Any) -> Tensor:
    """The output of torch's function, in its place: subclasses of tensors, as those of
    torch.nn.attention.bias, recognise it by what stands there. Calls of other threads are torch's meanwhile.
    """
    global _outside
    with _changing:
        _outside += 1
        if F.scaled_dot_product_attention is scaled_dot_product_attention:
            F.scaled_dot_product_attention = _torch_sdpa
    try:
        own: Tensor = _torch_sdpa(*arguments, **options)
        return own
    finally:
        with _changing:
            _outside -= 1
            if _active and not _outside and F.scaled_dot_product_attention is _torch_sdpa:
                F.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]


@constant_in_graphs
def _count(outcome: str) -> None:
    for patch in _active[-1:]:
        patch.count(outcome)

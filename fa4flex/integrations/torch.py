"""fa4flex among torch's implementations of flash attention.

    import fa4flex.integrations.torch
    torch.nn.attention.activate_flash_attention_impl("fa4flex")

From then on torch's scaled_dot_product_attention and varlen_attn run fa4flex's kernels wherever torch chooses
flash attention, eager and compiled, both passes. Calls that these are not for, such as those on other GPUs,
run on the kernels that torch had. torch.nn.attention.restore_flash_attention_impl() undoes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

from fa4flex.errors import UnsupportedError
from fa4flex.integrations.flash_operators import FUNCTIONS
from fa4flex.integrations.varlen import varlen_attn

__all__ = ["activate", "varlen_attn"]

NAME = "fa4flex"


def activate() -> None:
    """Make fa4flex the implementation of torch's flash attention, as activate_flash_attention_impl("fa4flex")
    does. Raises UnsupportedError where this version of torch has no choice of them."""
    chosen = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if chosen is None:
        raise UnsupportedError(
            f"torch {torch.__version__}, which has no choice of implementations of flash attention",
            "torch.nn.attention.activate_flash_attention_impl",
            "call fa4flex.patch_sdpa(), which serves scaled_dot_product_attention with any torch",
        )
    chosen(NAME)


class Registration:
    """Functions in the place of torch's operators, until `remove` is called."""

    def __init__(self, library: Library) -> None:
        self.library: Library | None = library

    def remove(self) -> None:
        """Give the operators back to torch's kernels."""
        self.library = None


def register(key: str = "CUDA") -> Registration:
    """Put fa4flex's functions in the place of torch's for the devices of a dispatch key."""
    library = Library("aten", "IMPL", key)
    for name, function in FUNCTIONS.items():
        if hasattr(torch.ops.aten, name):
            library.impl(name, _or_torchs(function, _kernel_of(name, key)), key, with_keyset=True)
    return Registration(library)


def _kernel_of(name: str, key: str) -> Any:
    """The kernel of an operator; None where there is none, as in builds of torch for CPUs."""
    find = getattr(torch.library, "get_kernel", None)
    try:
        return None if find is None else find(f"aten::{name}", key)
    except RuntimeError:
        return None


def _or_torchs(function: Callable[..., Any], kernel: Any) -> Callable[..., Any]:
    """`function`, and torch's kernel for the calls that it refuses."""

    def call(keys: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except UnsupportedError:
            if kernel is None:
                raise
        return kernel.call_boxed(keys, *arguments, **options)

    return call


_register: Callable[..., None] | None = getattr(torch.nn.attention, "register_flash_attention_impl", None)
if _register is not None:
    _register(NAME, register_fn=register)

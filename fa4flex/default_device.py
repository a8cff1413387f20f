"""The default device, which is the user's: what the library makes without naming a device is for the host.

`torch.set_default_device("cuda")`, and `with torch.device("cuda"):`, move every tensor made without a device
to a GPU: bounds, tables and offsets of a plan, which the host computes with, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")


def on_the_host(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The same function, in which tensors made without a device lie on the CPU. Where no default device is
    set it costs a look at the stack of torch's modes."""

    @functools.wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not torch._C._len_torch_function_stack():
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return called

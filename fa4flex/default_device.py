"""The default device, which is the user's: what the library makes without naming a device is for the host.

`torch.set_default_device("cuda")`, and `with torch.device("cuda"):`, move every tensor made without a device
to a GPU: bounds, tables and offsets of a plan, which the host computes with, too. A `torch.device("cpu")`
within would do no better: it moves to the host what `torch.as_tensor` is given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from fa4flex.torch_internals import function_modes, no_default_device

Given = ParamSpec("Given")
Result = TypeVar("Result")


def on_the_host(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The same function, without a default device while it runs. Where none is set it costs a look at the
    stack of torch's modes. Code that Dynamo traces is left as it is: what the library makes there is made in
    operators, which leave it out themselves."""

    @functools.wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if torch.compiler.is_dynamo_compiling() or not function_modes():
            return function(*args, **kwargs)
        with no_default_device():
            return function(*args, **kwargs)

    return called

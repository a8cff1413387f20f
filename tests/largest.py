"""The largest tensor that torch makes within."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """nbytes: of the largest result of an operation; of a view, that of what it shows once."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return made


@contextlib.contextmanager
def largest_tensor() -> Iterator[Largest]:
    """Within, results of operations are weighed."""
    with Largest() as found, torch.no_grad():
        yield found

"""Kernels of torch's that do not fit on a GPU, compiled again with smaller tiles.

Inductor chooses tiles and stages by head width alone. What a score mod reads takes shared memory as well, and
gradients of captured tensors take most; where all of it is more than a block may have, Inductor raises. A
backward kernel is compiled in the first backward pass, out of reach of whoever made the call: so the graph is
compiled again from within, where Inductor is asked to compile it. Numbers: docs/flex_backend.md.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from fa4flex.errors import UnsupportedError
from fa4flex.torch_internals import inductor_of_one_graph

Options = dict[str, int]
"""Options of torch's kernels, by the names of its FlexKernelOptions."""


def _tiles(size: int) -> Options:
    return {**dict.fromkeys(("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), size), "num_stages": 1}


FEWER: tuple[Options, ...] = ({"num_stages": 2}, {"num_stages": 1})
"""Torch's own tiles, with fewer stages than its three."""

BACKWARD: tuple[Options, ...] = (*FEWER, _tiles(64), _tiles(32), _tiles(16))
FORWARD: tuple[Options, ...] = (
    *FEWER,
    *({"BLOCK_M": size, "BLOCK_N": size, "num_stages": 1} for size in (64, 32, 16)),
)
"""Options that are tried in turn, each for less shared memory than the one before. All divide torch's blocks
of 128 queries and keys."""

NAMES = frozenset(name for options in (*BACKWARD, *FORWARD) for name in options)

SIGNS = "No valid triton configs", "out of resource"
"""Words of Inductor and Triton where a kernel needs more than a block has."""


def compile_to_fit(module: Any, examples: Any, **how: Any) -> Any:
    """Inductor's compiler of one graph, which tries smaller tiles with a warning if kernels do not fit.

    Raises UnsupportedError if the smallest do not fit either.
    """
    compile_fx_inner = inductor_of_one_graph()
    nodes = _calls(module)
    spare = copy.deepcopy(module) if nodes else None  # Inductor changes what it compiles
    try:
        return compile_fx_inner(module, examples, **how)
    except Exception as error:
        if spare is None or not _does_not_fit(error):
            raise
        said = error
    backward = bool(how.get("is_backward"))
    tried = [_take(copy.deepcopy(spare), {})]
    for options in BACKWARD if backward else FORWARD:
        smaller = copy.deepcopy(spare)
        taken = _take(smaller, options)
        if taken in tried:  # users chose the rest
            continue
        tried.append(taken)
        _warn(backward, taken, said)
        try:
            return compile_fx_inner(smaller, examples, **how)
        except Exception as error:
            if not _does_not_fit(error):
                raise
            said = error
    raise UnsupportedError(
        f"flex_attention's {_name(backward)} kernel, which needs more shared memory than this GPU has, even "
        f"with the smallest tiles: {_line(said)}",
        "head widths and captured tensors for which torch's kernels fit",
        "detach captured tensors whose gradients are not needed, leave out Schedule(tile=...), read fewer "
        'tensors in the score mod, or use backend="auto" on a CPU or a GPU with generated kernels',
    ) from said


def _calls(module: Any) -> list[Any]:
    """Nodes of a graph that are flex_attention or its backward pass."""
    operators: Any = torch.ops.higher_order
    own = operators.flex_attention, operators.flex_attention_backward
    return [node for node in module.graph.nodes if node.op == "call_function" and node.target in own]


def _take(module: Any, options: Options) -> Options:
    """Tiles and stages of the calls of a graph, after `options` were added but for those that users chose."""
    results: Options = {}
    for node in _calls(module):
        place = next(i for i, x in enumerate(node.args) if isinstance(x, dict))
        taken = {**options, **node.args[place]}
        node.update_arg(place, taken)
        results |= {x: y for x, y in taken.items() if x in NAMES}
    module.recompile()
    return results


def _does_not_fit(error: BaseException) -> bool:
    text = str(error)
    return any(sign in text for sign in SIGNS)


def _name(backward: bool) -> str:
    return "backward" if backward else "forward"


def _line(error: BaseException) -> str:
    """The line that says what did not fit."""
    lines: Sequence[str] = str(error).splitlines()
    return next((line.strip() for line in lines if any(sign in line for sign in SIGNS)), type(error).__name__)


def _warn(backward: bool, options: Options, said: BaseException) -> None:
    warnings.warn(
        f"flex_attention's {_name(backward)} kernel does not fit into the shared memory of this GPU "
        f"({_line(said)}); it is compiled again with "
        f"{', '.join(f'{name}={value}' for name, value in options.items())}, and may be slower",
        stacklevel=2,
    )

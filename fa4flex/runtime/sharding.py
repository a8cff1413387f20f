"""The sharding rule of both operators: attention of DTensors, by batch, by heads, or replicated.

Each process computes the batch entries and heads that it holds. A mod's `b` and `h` would then count from 0
in each process, so a dimension is sharded only if the mod reads its index nowhere but to select from captured
tensors, which are sharded along with it: it sees no difference. Elsewhere inputs are gathered, and every
process computes the whole. Gradients of what all processes share are summed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.expr import Expr, nodes
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.operators import OPERATORS
from fa4flex.runtime.call import SequenceLengths
from fa4flex.runtime.packing import sequence_lengths
from fa4flex.runtime.programs import read
from fa4flex.torch_internals import implicit_replication

DTENSOR = "torch.distributed.tensor"
_ATTENTION, _BACKWARD = OPERATORS["attention"], OPERATORS["attention_gradients"]
_registered = False

Choice = str | None
"""One dimension of the mesh shards "batch" or "heads", or, if None, nothing."""


def is_dtensor(x: object) -> bool:
    """True for a DTensor; their module is not loaded to find out."""
    module = sys.modules.get(DTENSOR)
    return module is not None and isinstance(x, module.DTensor)


def follow(library: torch.library.Library) -> None:
    """Register the rule once torch.distributed.tensor is loaded."""
    global _registered
    loaded = sys.modules.get(DTENSOR)
    if _registered or loaded is None or not hasattr(loaded, "DTensor"):
        return
    _registered = True
    torch.library.register_torch_dispatch("fa4flex::attention", loaded.DTensor, _forward, lib=library)
    for name in ("attention_gradients", "attention_backward"):
        torch.library.register_torch_dispatch(f"fa4flex::{name}", loaded.DTensor, _backward, lib=library)
    for name in ("attention_with_statistics", "attention_in_pages_with_statistics"):
        torch.library.register_torch_dispatch(f"fa4flex::{name}", loaded.DTensor, _refused, lib=library)


# --- what a program allows ----------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def indexed_by(program: str, index: str) -> dict[int, int] | None:
    """The dimension of a captured tensor from which `index` ("b" or "h") selects in every load, by slot.

    None where the program depends on the index in another way.
    """
    facts = read(program).facts
    roots = facts.everything
    if index == "h" and any("num_heads" in root.free for root in roots):
        return None
    results: dict[int, set[tuple[int, ...]]] = {}
    for node in nodes(*roots):
        slot, selectors, others = _parts(node)
        if (_is(node, index) and node in roots) or any(_is(x, index) for x in others):
            return None
        if slot is not None:
            results.setdefault(slot, set()).add(tuple(at for at, x in enumerate(selectors) if _is(x, index)))
    if any(len(dims) > 1 or len(dim) > 1 for dims in results.values() for dim in dims):
        return None
    return {slot: dim[0] for slot, (dim,) in results.items() if dim}


def _is(node: Expr, index: str) -> bool:
    return node.op == "sym" and node.value == index


def _parts(node: Expr) -> tuple[int | None, tuple[Expr, ...], tuple[Expr, ...]]:
    """The slot of a captured tensor, what selects from it by dimension, and the other arguments."""
    if node.op == "load":
        return node.value, node.args, ()
    if node.op == "search":
        return node.value[0], node.args[1:], node.args[:1]
    return None, (), node.args


# --- where tensors lie --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Plan:
    """The placement of one call: what each dimension of `mesh` shards.

    `by_batch` and `by_heads` are the dimensions along which captured tensors are sharded with it, by slot.
    """

    mesh: Any
    choices: tuple[Choice, ...]
    packed: bool
    by_batch: dict[int, int]
    by_heads: dict[int, int]

    def placed(self, batch: int | None, heads: int | None, partial: bool = False) -> list[Any]:
        """Placements of a tensor with these dimensions; where it has none, it is replicated or partial."""
        torch_tensor = sys.modules[DTENSOR]
        own = {"batch": batch, "heads": heads}

        def one(choice: Choice) -> Any:
            dim = None if choice is None else own[choice]
            if dim is not None:
                return torch_tensor.Shard(dim)
            return torch_tensor.Partial() if partial and choice is not None else torch_tensor.Replicate()

        return [one(choice) for choice in self.choices]

    @property
    def rows(self) -> list[Any]:
        """Placements of q, k, v and the output."""
        return self.placed(None if self.packed else 0, 1)

    def statistics(self, x: Tensor) -> list[Any]:
        """Placements of lse and what is shaped like it; some are left empty."""
        if x.dim() < 2:
            return self.placed(None, None)
        return self.placed(None, 0) if self.packed else self.placed(0, 1)

    def results(self, arguments: Sequence[Any]) -> list[Any]:
        """The local parts of an output and its statistics, or of their gradients."""
        return [
            self.here(x, self.statistics(x) if at else self.rows, "a gradient")
            for at, x in enumerate(arguments)
        ]

    def sinks(self, partial: bool = False) -> list[Any]:
        return self.placed(None, 0, partial)

    def operand(self, slot: int, partial: bool = False) -> list[Any]:
        return self.placed(self.by_batch.get(slot), self.by_heads.get(slot), partial)

    def here(self, x: Any, placements: list[Any], name: str) -> Any:
        """This process's part of a tensor. Raises InputError for a plain tensor among DTensors."""
        if x is None:
            return None
        distributed = sys.modules[DTENSOR].DTensor
        if not isinstance(x, distributed):
            if x.dim() > 0 and not implicit_replication(distributed):
                raise _plain_tensor(name)
            replicated = [sys.modules[DTENSOR].Replicate()] * self.mesh.ndim
            x = distributed.from_local(x, self.mesh, replicated, run_check=False)
        # Autograd is above: of a tensor that asks for gradients, torch 2.11 would detach the result in place,
        # which DTensors cannot.
        return x.detach().redistribute(self.mesh, placements).to_local()

    def whole(self, x: Tensor, placements: list[Any], like: Any = None) -> Any:
        """The DTensor of every process's part, placed as `like` is."""
        distributed = sys.modules[DTENSOR].DTensor
        result = distributed.from_local(x, self.mesh, placements, run_check=False)
        if isinstance(like, distributed) and not any(p.is_partial() for p in like.placements):
            result = result.redistribute(self.mesh, like.placements)
        return result

    def inputs(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of an operator by name, with local tensors in place of DTensors."""
        entries: dict[str, Any] = {**arguments, "sinks": self.here(arguments["sinks"], self.sinks(), "sinks")}
        entries |= {name: self.here(arguments[name], self.rows, name) for name in "qkv"}
        entries["operands"] = [
            self.here(x, self.operand(at), f"captured tensor {at}")
            for at, x in enumerate(arguments["operands"])
        ]
        for name, x in sequence_lengths(arguments)._asdict().items():
            sequences = 0 if name.startswith("seqused") and not self.packed else None
            entries[name] = self.here(x, self.placed(sequences, None), name.rpartition("_")[0])
        return entries | {"lengths": [entries[name] for name in SequenceLengths._fields]}


def _plan(arguments: Mapping[str, Any]) -> _Plan:
    """Keep the batch or heads sharded where q, or else k or v, has them so and the program allows it."""
    distributed, qkv, operands = (
        sys.modules[DTENSOR].DTensor,
        [arguments[x] for x in "qkv"],
        arguments["operands"],
    )
    program, lengths = arguments["program"], sequence_lengths(arguments)
    for x, name in zip(qkv, "qkv", strict=True):
        if not isinstance(x, distributed):
            raise _plain_tensor(name)
    mesh, packed = qkv[0].device_mesh, lengths[0] is not None
    if any(isinstance(x, distributed) and x.device_mesh != mesh for x in (*qkv, *operands)):
        raise InputError("DTensors of several meshes", "one mesh", "distribute all of them over q's mesh")
    wanted = [_wanted([x.placements[at] for x in qkv], packed) for at in range(mesh.ndim)]
    (batch, heads), *of_keys = qkv[0].shape[:2], *[x.shape[1] for x in qkv[1:]]
    results: dict[Choice, dict[int, int]] = {"batch": {}, "heads": {}}
    for choice, index, sizes in (("batch", "b", (batch,)), ("heads", "h", (heads, *of_keys))):
        if choice not in wanted:
            continue
        parts = math.prod(mesh.size(at) for at, x in enumerate(wanted) if x == choice)
        along = indexed_by(program, index)
        fits = along is not None and all(operands[slot].shape[dim] == sizes[0] for slot, dim in along.items())
        if along is not None and fits and all(size % parts == 0 for size in sizes):
            results[choice] = along
        else:
            wanted = [None if x == choice else x for x in wanted]
    return _Plan(mesh, tuple(wanted), packed, results["batch"], results["heads"])


_DIMENSIONS = ("batch", "heads", "the sequence", "head_dim")


def _wanted(placements: Sequence[Any], packed: bool) -> Choice:
    """Read from placements what one dimension of the mesh shards of q, k and v.

    Raises UnsupportedError for what is neither batch nor heads.
    """
    shards = [p.dim for p in placements if type(p) is sys.modules[DTENSOR].Shard]
    for dim in shards:
        if dim != 1 and (packed or dim != 0):
            what = ("tokens", "heads", "head_dim")[dim] if packed else _DIMENSIONS[dim]
            raise UnsupportedError(
                f"q, k or v sharded along {what} (dimension {dim})",
                "heads" if packed else "batch or heads sharded, or replicated tensors",
                "gather it first: x.redistribute(placements=[Replicate()])",
            )
    return None if not shards else "heads" if shards[0] == 1 else "batch"


def _plain_tensor(name: str) -> InputError:
    return InputError(
        f"{name} is a plain tensor among DTensors",
        "q, k, v, captured tensors, sinks and lengths all DTensors, or all plain",
        "distribute_tensor(x, mesh, [Replicate()]), or call under implicit_replication() if it is the same "
        "in every process; under fully_shard, let the module own its tensors: fa4flex.nn.Attention",
    )


# --- the operators ------------------------------------------------------------------------------------------


def _forward(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    value = _ATTENTION.named(args)
    with torch.no_grad():
        plan = _plan(value)
        out, *statistics = func(*_ATTENTION.packed(plan.inputs(value)))
        return plan.whole(out, plan.rows), *(plan.whole(x, plan.statistics(x)) for x in statistics)


def _refused(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    raise UnsupportedError(
        "max_logit or entropy of DTensors",
        "lse and max_scores of DTensors, or all statistics of plain tensors",
        "leave them out, or call with local tensors (x.to_local()) and reduce what they give",
    )


def _backward(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    value = _BACKWARD.named(args)
    with torch.no_grad():
        plan = _plan(value)
        arriving = {name: plan.results(value[name]) for name in ("upstream", "saved")}
        result = func(*_BACKWARD.packed(plan.inputs(value) | arriving))
        sinks, operands, needs = value["sinks"], value["operands"], value["needs"]
        owners = [(value[name], plan.rows) for name in "qkv"]
        owners += [] if sinks is None else [(sinks, plan.sinks(partial=True))]
        owners += [(operands[slot], plan.operand(slot, partial=True)) for slot in needs]
        return [plan.whole(x, placed, own) for x, (own, placed) in zip(result, owners, strict=True)]

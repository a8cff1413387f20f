"""DTensors whose sequence is sharded: their parts lie in order, wherever queries are computed."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.parallel.links import Group, Links
from fa4flex.parallel.placement import Ranges

_MODULE = "torch.distributed.tensor"


def is_dtensor(x: object) -> bool:
    """True for a DTensor; their module is not loaded to find out."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(x, module.DTensor)


def parts_in_order(total: int, ranks: int) -> tuple[Ranges, ...]:
    """The tokens that torch's Shard gives each rank: equal parts, rounded up, as long as there are any."""
    each = max(-(-total // ranks), 1)
    cuts = [min(rank * each, total) for rank in range(ranks + 1)]
    return tuple(((cuts[r], cuts[r + 1]),) if cuts[r] < cuts[r + 1] else () for r in range(ranks))


def local_parts(links: Links, qkv: tuple[Any, Any, Any], dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """The local tensors of DTensors whose dimension `dim`, the sequence, is sharded over the group.

    Raises InputError for plain tensors among them and other meshes, UnsupportedError for other placements.
    """
    if not all(map(is_dtensor, qkv)):
        raise InputError(
            "plain tensors among DTensors: q, k, v are " + ", ".join(type(x).__name__ for x in qkv),
            "all DTensors, or all plain local tensors",
            "distribute_tensor(x, mesh, [Shard(sequence)])",
        )
    mesh = qkv[0].device_mesh
    if any(x.device_mesh != mesh for x in qkv):
        raise InputError("DTensors of several meshes", "one mesh", "distribute all of them over q's mesh")
    at = _dimension(links, mesh)
    for name, x in zip("qkv", qkv, strict=True):
        for i, placement in enumerate(x.placements):
            fits = placement.is_shard(dim) if i == at else placement.is_replicate()
            if not fits:
                raise UnsupportedError(
                    f"{name} placed as {x.placements}",
                    f"Shard({dim}), the sequence, along the group's dimension of the mesh, else Replicate()",
                    "shard batch and heads outside: call on local tensors of one group",
                )
    q, k, v = (x.to_local() for x in qkv)
    return q, k, v


def _dimension(links: Links, mesh: Any) -> int:
    group = links.group if isinstance(links, Group) else None
    for at in range(mesh.ndim):
        if mesh.get_group(at) is group:
            return at
    raise InputError(
        "DTensors of a mesh without this group",
        "a mesh of which the group is a dimension",
        "make the attention from the same mesh: attn.parallel(x.device_mesh, dim)",
    )


def as_dtensor(x: Tensor, like: Any, shape: tuple[int, ...], dim: int) -> Any:
    """The DTensor of this shape of which x is this rank's part along `dim`, sharded where `like` is."""
    module = sys.modules[_MODULE]
    stride = torch.empty(shape, device="meta").stride()
    placements = [module.Shard(dim) if p.is_shard() else p for p in like.placements]
    return module.DTensor.from_local(
        x, like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )

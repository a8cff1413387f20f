"""DTensors whose sequence is sharded: their parts lie in order, wherever queries are computed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.parallel.heads import ALL, Share, check_heads
from fa4flex.parallel.links import Group, Links
from fa4flex.runtime.sharding import DTENSOR as _MODULE
from fa4flex.runtime.sharding import is_dtensor


def local_parts(
    links: Links, qkv: tuple[Any, Any, Any], dim: int
) -> tuple[tuple[Tensor, Tensor, Tensor], Share]:
    """The local tensors of DTensors whose dimension `dim`, the sequence, is sharded over the group, and the
    share of the heads that they have: heads may be sharded over other dimensions of the mesh.

    Raises InputError for plain tensors among them and other meshes, UnsupportedError for other placements.
    """
    if not all(map(is_dtensor, qkv)):
        raise InputError(
            "plain tensors among DTensors: q, k, v are " + ", ".join(type(x).__name__ for x in qkv),
            "all DTensors, or all plain local tensors",
            "distribute_tensor(x, mesh, [Shard(sequence)])",
        )
    mesh, heads = qkv[0].device_mesh, 3 - dim
    if any(x.device_mesh != mesh for x in qkv):
        raise InputError("DTensors of several meshes", "one mesh", "distribute all of them over q's mesh")
    at, share = _dimension(links, mesh), ALL
    for i, of_q in enumerate(qkv[0].placements):
        for name, x in zip("qkv", qkv, strict=True):
            here = x.placements[i]
            fits = here.is_shard(dim) if i == at else here.is_replicate() or here.is_shard(heads)
            if not fits or here != of_q:
                raise UnsupportedError(
                    f"{name} placed as {x.placements}",
                    f"Shard({dim}), the sequence, along the group's dimension of the mesh; along others "
                    f"Shard({heads}), the heads, for all of q, k and v, or Replicate()",
                    "redistribute it; shard the batch outside: call on local tensors of one group",
                )
        if i != at and of_q.is_shard(heads):
            of_dim = Group(mesh.get_group(i))
            share = Share(
                share.part * of_dim.size + of_dim.rank, share.parts * of_dim.size, (*share.links, of_dim)
            )
    check_heads((qkv[0].shape[heads], qkv[1].shape[heads], qkv[2].shape[heads]), share.parts)
    q, k, v = (x.to_local() for x in qkv)
    return (q, k, v), share


def whole_captured(links: Links, x: Any, number: int, summed: bool) -> Tensor:
    """A captured DTensor that is sharded over the group in any dimension, gathered: mods index it by places
    in the whole. Each rank keeps the gradient of its own part.

    summed: whether gradients of the whole tensor will have been summed over the ranks; else they are here.
    Raises UnsupportedError for other placements, InputError for other meshes.
    """
    module, at = sys.modules[_MODULE], _dimension(links, x.device_mesh)
    for i, here in enumerate(x.placements):
        if not (here.is_replicate() or (i == at and here.is_shard())):
            raise UnsupportedError(
                f"captured tensor {number} placed as {x.placements}",
                "Shard(...) along the group's dimension of the mesh, Replicate() along others",
                "redistribute it, or capture its full_tensor()",
            )
    apart = x.placements[at].is_shard() and not summed
    gradient = [
        module.Partial() if apart and i == at else module.Replicate() for i in range(x.device_mesh.ndim)
    ]
    result: Tensor = x.full_tensor(grad_placements=gradient)
    return result


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


def as_dtensor(x: Tensor, like: Any, shape: tuple[int, ...], dims: Mapping[int, int]) -> Any:
    """The DTensor of this shape of which x is this rank's part, sharded as `like` is. dims: dimensions of x
    by those of `like`, where they differ."""
    module = sys.modules[_MODULE]
    stride = torch.empty(shape, device="meta").stride()
    placements = [module.Shard(dims.get(p.dim, p.dim)) if p.is_shard() else p for p in like.placements]
    return module.DTensor.from_local(
        x, like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )

"""One call: what it brings, its tensors, and what it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import fa4flex

from .brought import Ragged, make_map, make_ragged
from .oracle import Blocks, Formula, Problem, Scales
from .pool import Subject, World
from .values import MASKS, write_function

E4M3 = torch.float8_e4m3fn


@dataclass(eq=False)
class Given:
    """One call: what it means, what is passed, and how. `words` describe it."""

    subject: Subject
    problem: Problem
    brought: dict[str, Any]
    mode: str
    words: str

    def __call__(self) -> tuple[Tensor, Tensor | None]:
        modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
        with modes[self.mode]():
            q = self.problem.q
            for _ in range(self.problem.times):
                found = self.subject.attend(q, self.problem.k, self.problem.v, **self.brought)
                q, lse = found if isinstance(found, tuple) else (found, None)
            return q, lse


def draw_call(world: World, subject: Subject) -> Given:
    """A call of an attention, with what it brings, and its tensors, which may be those of an earlier one."""
    rng, brought = world.rng, {}
    ragged = _bring_lengths(world, subject, brought)
    heads = subject.heads or (rng.choice((1, 2, 4)) if not world.on_gpu else 4)
    groups = rng.choice([n for n in ((1, 2, 4) if not world.on_gpu else (1, 2)) if heads % n == 0])
    batch, (q_len, kv_len) = rng.randint(1, world.sizes.batch), world.lengths()
    if ragged is not None:
        batch, q_len, kv_len = ragged.batch, ragged.q_len, ragged.kv_len
    if subject.blocks is not None:
        q_len, kv_len = subject.blocks.lengths
        batch = batch if subject.blocks.shape[0] == 1 else subject.blocks.shape[0]
    dim = rng.choice((8, 16, 32)) if not world.on_gpu else 64
    dtype = rng.choice(world.choices.dtypes)
    times = 2 if ragged is None and rng.random() < 0.1 and q_len == kv_len else 1
    mode = rng.choice(("grad", "grad", "grad", "no_grad", "inference"))
    eight = not world.on_gpu and ragged is None and not subject.compiled and "flex" not in subject.door
    eight = (
        eight and subject.door != "module" and dtype != torch.float64 and rng.random() < 0.06 and times == 1
    )
    q, k, v = _tensors(
        world, ragged, subject.heads_first, (batch, heads, heads // groups, q_len, kv_len, dim), dtype, mode
    )
    blocks, mask = _bring_blocks(world, subject, ragged, (batch, heads, q_len, kv_len), brought)
    problem = Problem(
        q, k, v, None if subject.score is None else subject.score.formula(), mask, blocks,
        None if subject.sinks is None else subject.sinks.read(), subject.scale, subject.heads_first,
        None if ragged is None else ragged.sequences, None, times,
    )  # fmt: skip
    if eight:
        _bring_scales(world, problem, brought)
    if not subject.compiled:
        _bring_rest(world, subject, problem, heads, brought)
    words = f"{list(q.shape)} {list(k.shape)} {str(dtype)[6:]} {mode}"
    words += "".join(f" {x}" for x in brought) + (f" ({ragged.kind})" if ragged else "")
    words += " twice" if times > 1 else ""
    return Given(subject, problem, brought, mode, words)


def _bring_lengths(world: World, subject: Subject, brought: dict[str, Any]) -> Ragged | None:
    if subject.compiled or subject.door == "flex_attention" or subject.blocks is not None:
        return None
    if world.rng.random() < 0.7:
        return None
    kind = world.rng.choice(("padded", "packed", "paged"))
    if kind in world.choices.left_out:
        return None
    known = [x for x in world.ragged if x.kind == kind]
    if not known or world.rng.random() < 0.15:
        known = [make_ragged(world, kind)]
        world.ragged += known
    ragged = world.rng.choice(known)
    brought.update(ragged.given)
    return ragged


def _bring_blocks(
    world: World, subject: Subject, ragged: Ragged | None, extents: tuple[int, int, int, int], brought: Any
) -> tuple[Blocks | None, Formula | None]:
    """Blocks and mask of a call; a map is among what it brings, or not."""
    batch, heads, *lengths = extents
    own = subject.own.get("mask") if subject.door == "flex_attention" else None
    mask = None if subject.mask is None else subject.mask.formula()
    composed = None if subject.blocks is None else subject.blocks.blocks()
    may = ragged is None and not subject.compiled and "blocks" not in world.choices.left_out
    if not may or world.rng.random() < (0.15 if own is not None else 0.65):
        return composed, mask
    fits = [
        x for x in world.maps
        if x.lengths == tuple(lengths) and x.shape[0] in (1, batch) and x.shape[1] in (1, heads)
        and (x.own is None or x.own is own or (subject.mask is None and subject.door != "flex_attention"))
        and (subject.door != "flex_attention" or isinstance(x.given, BlockMask))
    ]  # fmt: skip
    if not fits or world.rng.random() < 0.25:
        inner = own
        if inner is None and subject.mask is None and world.rng.random() < 0.3:
            mod = world.rng.choice(MASKS)
            mod = mod if not mod.context else MASKS[0]
            inner = write_function(mod, "mask", world.sizes, world.rng, world.device)
        if inner is not None and inner.mod.context:
            return composed, mask  # torch's mask_mods know no lengths
        made = make_map(world, (lengths[0], lengths[1]), heads, batch, inner)
        world.maps.append(made)
        if subject.door == "flex_attention" and not isinstance(made.given, BlockMask):
            return composed, mask
        fits = [made]
    chosen = world.rng.choice(fits)
    brought["blocks"] = chosen.given
    return chosen.blocks(), mask if chosen.own is None else chosen.own.formula()


def _bring_rest(
    world: World, subject: Subject, problem: Problem, heads: int, brought: dict[str, Any]
) -> None:
    rng, left_out = world.rng, world.choices.left_out
    if rng.random() < 0.2 and "scale" not in left_out:
        problem.scale = brought["scale"] = rng.choice((0.2, 0.7, 1.0))
    if rng.random() < 0.5 and "return_lse" not in left_out:
        brought["return_lse"] = True
    takes_sinks = subject.door in ("compile", "attention", "flex", "methods", "methods by flex", "named")
    if takes_sinks and rng.random() < 0.15 and "sinks" not in left_out:
        problem.sinks = brought["sinks"] = torch.randn(heads, device=world.device).requires_grad_(
            rng.random() < 0.5
        )


def _bring_scales(world: World, problem: Problem, brought: dict[str, Any]) -> None:
    heads = problem.k.shape[1 if problem.heads_first else 2]
    scales = [torch.rand(heads, device=world.device, dtype=torch.float32) + 0.5 for _ in range(2)]
    problem.k, problem.v = (x.detach().to(E4M3) for x in (problem.k, problem.v))
    problem.scales = Scales(*scales)
    brought["kv_scales"] = fa4flex.KVScales(*scales)


def _tensors(
    world: World,
    ragged: Ragged | None,
    heads_first: bool,
    extents: tuple[int, ...],
    dtype: torch.dtype,
    mode: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a call: new ones in some layout, or those of an earlier call with other contents."""
    batch, heads, kv_heads, q_len, kv_len, dim = extents
    packed = ragged is not None and ragged.sequences.packed
    if packed:
        q_shape: tuple[int, ...] = (q_len, heads, dim)
    else:
        q_shape = (batch, heads, q_len, dim) if heads_first else (batch, q_len, heads, dim)
    if ragged is not None and ragged.kind == "paged":
        k_shape: tuple[int, ...] = (ragged.pages, ragged.page_size, kv_heads, dim)
    elif packed:
        k_shape = (kv_len, kv_heads, dim)
    else:
        k_shape = (batch, kv_heads, kv_len, dim) if heads_first else (batch, kv_len, kv_heads, dim)
    key = (q_shape, k_shape, dtype)
    known = world.tensors.get(key)
    if known is not None and world.rng.random() < 0.5:
        if world.rng.random() < 0.5:
            for x in known:
                x.data.copy_(torch.randn_like(x))
        return known
    in_mode = (
        torch.inference_mode() if mode == "inference" and world.rng.random() < 0.3 else torch.enable_grad()
    )
    with in_mode:
        found = tuple(laid_out(world, shape, dtype) for shape in (q_shape, k_shape, k_shape))
    if not found[0].is_inference():
        if mode == "grad":
            for x in found:
                x.requires_grad_(world.rng.random() < 0.6)
        world.tensors[key] = found  # type: ignore[assignment]
    return found  # type: ignore[return-value]


def laid_out(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal numbers of some strides, the last of which is 1."""
    how = world.rng.choice(("dense", "dense", "transposed", "wide", "stepped"))
    kind = {"dtype": dtype, "device": world.device}
    if how == "transposed" and len(shape) == 4:
        return torch.randn(shape[0], shape[2], shape[1], shape[3], **kind).transpose(1, 2)
    if how == "wide":
        return torch.randn(*shape[:-1], shape[-1] * 2, **kind)[..., : shape[-1]]
    if how == "stepped":
        return torch.randn(shape[0] * 2, *shape[1:], **kind)[::2]
    return torch.randn(shape, **kind)

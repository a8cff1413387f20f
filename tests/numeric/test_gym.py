"""Every mask and score mod of attention-gym: output, gradients and tile classes against the oracle."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cuda_cases import PlainGather
from gym import Instance, mask_instances, score_instances
from helpers import DRAWS, gradients, no_worse, worst
from mask_zoo import tile_classes
from torch import Tensor

import fa4flex
from fa4flex import reference
from fa4flex.codegen.analyze.tiles import Shape, tile_map

MASKS = {x.name: x for x in mask_instances()}
SCORES = {x.name: x for x in score_instances()}
TILES = ((64, 64), (128, 128), (128, 96))
PARTIAL = 1


def inputs(x: Instance, dtype: torch.dtype) -> list[Tensor]:
    lengths = (x.q_len, x.kv_len, x.kv_len)
    return [torch.randn(x.B, x.H, n, 16, dtype=torch.float64).to(dtype).requires_grad_() for n in lengths]


def results(call: object, tensors: list[Tensor], upstream: list[Tensor]) -> list[Tensor]:
    """out, lse (0 where -inf) and the gradients of sum(out * u) + sum(lse * w) by `tensors`."""
    out, lse = call()  # type: ignore[operator]
    lse = torch.where(lse.isfinite(), lse, 0)
    return [out, lse, *gradients([out, lse], tensors, upstream)]


def plain(
    qkv: list[Tensor], mods: dict[str, object], tensors: list[Tensor], upstream: list[Tensor]
) -> list[Tensor]:
    """`results` of the formula by dense plain PyTorch at the inputs' own precision, from a saved lse."""
    q, k, v = qkv
    raw = q @ k.mT / q.shape[-1] ** 0.5
    allowed = reference.allowed_pairs(mods.get("mask"), tuple(raw.shape))  # type: ignore[arg-type]
    scores = raw.masked_fill(~allowed, -torch.inf)
    if "score_mod" in mods:
        pairs = allowed.nonzero().unbind(-1)
        with PlainGather():
            values = torch.vmap(mods["score_mod"])(raw[pairs], *pairs)  # type: ignore[arg-type]
        scores = scores.index_put(pairs, values.to(scores.dtype))
    some = allowed.any(-1)
    lse = torch.where(some, scores.detach().logsumexp(-1), 0)
    weights = (scores.detach() - lse.unsqueeze(-1)).exp()
    out = weights @ v
    dout, dlse = (u.to(q.dtype) for u in upstream)
    delta = (dout * out.detach()).sum(-1) - torch.where(some, dlse, 0)
    dscores = weights * (dout @ v.detach().mT - delta.unsqueeze(-1))
    return [out, lse, *torch.autograd.grad([scores, out], tensors, [dscores, dout])]


def compare_exact(names: list[str], found: list[Tensor], exact: list[Tensor]) -> None:
    for name, f, e in zip(names, found, exact, strict=True):
        # The gradient of a float32 table is rounded to float32 by both: fp64 sums beside a tie go either way.
        rounded = torch.finfo(f.dtype).eps * e.abs().double()
        error = ((f.double() - e.double()).abs() - rounded).max().item()
        limit = 1e-11 * max(e.abs().max().item(), 1)
        assert error <= limit, f"{name}: {error} against a limit of {limit}"


def compare(x: Instance, mods: dict[str, object], dtype: torch.dtype) -> None:
    """Against the oracle: in fp64 its rounding only, else no worse than plain PyTorch in several draws."""
    names = ["out", "lse", "dq", "dk", "dv", *(f"captured {i}" for i in range(len(x.differentiable)))]
    ours, allowed = [], []
    for _ in range(1 if dtype == torch.float64 else DRAWS):
        qkv = inputs(x, dtype)
        tensors = [*qkv, *x.differentiable]
        upstream = [torch.randn(x.B, x.H, x.q_len, 16).double(), torch.randn(x.B, x.H, x.q_len).double()]
        exact = results(partial(reference.attention, *qkv, **mods), tensors, upstream)  # type: ignore[arg-type]
        found = results(partial(fa4flex.compile(**mods), *qkv, return_lse=True), tensors, upstream)  # type: ignore[arg-type]
        if dtype == torch.float64:
            return compare_exact(names, found, exact)
        # A unit in the last place of the largest element: less than that is luck of the rounding.
        units = [torch.finfo(dtype).eps * e.abs().max().item() for e in exact]
        same = plain(qkv, mods, tensors, upstream)
        ours.append([worst(f, e)[0] for f, e in zip(found, exact, strict=True)])
        allowed.append([max(u, worst(s, e)[0]) for u, s, e in zip(units, same, exact, strict=True)])
    no_worse(ours, allowed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str, dtype: torch.dtype) -> None:
    compare(MASKS[name], {"mask": MASKS[name].fn}, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", SCORES)
def test_score(name: str, dtype: torch.dtype) -> None:
    compare(SCORES[name], {"score_mod": SCORES[name].fn}, dtype)


def test_tile_classes_of_all_masks(capsys: pytest.CaptureFixture[str]) -> None:
    """0 unsound, at most 2 % of truly empty or full tiles left partial; here, none."""
    unsound = undecided = decidable = 0
    for x in MASKS.values():
        allowed = reference.allowed_pairs(x.fn, (x.B, x.H, x.q_len, x.kv_len))
        program = fa4flex.compile(mask=x.fn).program
        for tile in TILES:
            shape = Shape(x.B, x.H, x.q_len, x.kv_len)
            found = tile_map(
                program.facts.mask, program.facts.keys, shape, program.captured(), tile
            ).classes()
            truth = tile_classes(allowed, tile)
            found = found.expand_as(truth)
            unsound += int(((found != PARTIAL) & (found != truth)).sum())
            undecided += int(((found == PARTIAL) & (truth != PARTIAL)).sum())
            decidable += int((truth != PARTIAL).sum())
    with capsys.disabled():
        print(
            f"\n  gym masks: {unsound} unsound, {undecided} of {decidable} empty or full tiles left partial"
        )
    assert unsound == 0
    assert undecided == 0

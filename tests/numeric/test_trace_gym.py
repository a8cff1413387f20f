"""Every mod of attention-gym means the same traced as it does under torch's own vmap."""

from __future__ import annotations

import pytest
import torch
from gym import Instance, mask_instances, score_instances
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from fa4flex.codegen.evaluate import Captured, evaluate
from fa4flex.codegen.trace import Captures, trace

MASKS = {instance.name: instance for instance in mask_instances(seq=300)}
SCORES = {instance.name: instance for instance in score_instances(seq=40)}


def grid(case: Instance) -> dict[str, Tensor]:
    sizes = {"b": case.B, "h": case.H, "q": case.q_len, "kv": case.kv_len}
    shapes = torch.eye(4, dtype=torch.long) * -2 + 1  # -1 in its own place, 1 elsewhere
    return {name: torch.arange(size).view(shapes[i].tolist()) for i, (name, size) in enumerate(sizes.items())}


def nested_vmap(case: Instance, score: Tensor) -> Tensor:
    """Scores as FlexAttention computes them: the score mod vmapped over kv, q, h and b."""
    fn = case.fn
    for dims in (
        (0, None, None, None, 0),
        (0, None, None, 0, None),
        (0, None, 0, None, None),
        (0, 0, None, None, None),
    ):
        fn = torch.vmap(fn, in_dims=dims)
    b, h, q, kv = (torch.arange(n) for n in (case.B, case.H, case.q_len, case.kv_len))
    with torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex():
        return fn(score, b, h, q, kv)


@pytest.mark.parametrize("name", MASKS)
def test_mask_agrees_with_torch(name: str) -> None:
    case = MASKS[name]
    captures = Captures()
    (traced,) = captures.finish(trace(case.fn, "mask", captures))
    expected = create_mask(case.fn, case.B, case.H, case.q_len, case.kv_len, device="cpu")
    tensors = tuple(operand.value() for operand in captures.operands)
    (got,) = evaluate([traced.root], grid(case), Captured(tensors, captures.scalars))
    assert torch.equal(torch.as_tensor(got).expand_as(expected), expected)
    # What torch's and_masks and or_masks put together is no line of the user's.
    parts = traced.root.args if traced.root.op in ("and_", "or_") else (traced.root,)
    assert all(part in traced.origins or part.op == "const" for part in parts)


def mla_scores(case: Instance, score: Tensor) -> Tensor:
    """score + scale * q_rope . k_rope; torch's vmap has no backward for a gather of vectors."""
    q_rope, k_rope = (x.double() for x in case.differentiable)  # as programs are evaluated
    scale = 0.3 if "scaled" in case.name else 1.0
    return score + scale * torch.einsum("bhqd,bkd->bhqk", q_rope, k_rope[:, 0])


@pytest.mark.parametrize("name", SCORES)
def test_score_agrees_with_torch(name: str) -> None:
    case = SCORES[name]
    captures = Captures()
    (traced,) = captures.finish(trace(case.fn, "score", captures))
    score = torch.randn(case.B, case.H, case.q_len, case.kv_len, dtype=torch.float64)
    expected = (mla_scores if "mla" in name else nested_vmap)(case, score)
    tensors = tuple(operand.value() for operand in captures.operands)
    symbols = {**grid(case), "score": score}
    (got,) = evaluate([traced.root], symbols, Captured(tensors, captures.scalars), torch.float64)
    torch.testing.assert_close(got, expected.double(), rtol=1e-5, atol=1e-6)
    assert any(operand.differentiable for operand in captures.operands) == bool(case.differentiable)
    if case.differentiable:
        gradients = torch.autograd.grad(got.sum(), case.differentiable)
        for mine, theirs in zip(
            gradients, torch.autograd.grad(expected.sum(), case.differentiable), strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)

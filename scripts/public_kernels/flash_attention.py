"""Kernels of flash-attn-4 by its public interface, against attention in float64."""

from __future__ import annotations

import importlib
import math
import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from kernel_case import Case, Checks
from torch import Tensor

BOUND = 2**-7
"""Error of results of bf16 kernels: probabilities and results are rounded to 8 bits each."""


@dataclass(frozen=True)
class Problem:
    """q [batch, q_len, heads, dim]; k, v [batch, kv_len, kv_heads, dim and dim_v]. `options` go to the
    interface as they are."""

    q_len: int = 256
    kv_len: int = 384
    heads: int = 2
    kv_heads: int = 1
    dim: int = 128
    dim_v: int = 0
    batch: int = 1
    causal: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def window(self) -> tuple[int | None, int | None]:
        left, right = self.options.get("window_size", (None, None))
        return self.options.get("window_size_left", left), self.options.get("window_size_right", right)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        sizes = (
            (self.q_len, self.heads, self.dim),
            (self.kv_len, self.kv_heads, self.dim),
            (self.kv_len, self.kv_heads, self.dim_v or self.dim),
        )
        q, k, v = (torch.randn(self.batch, *size, dtype=torch.bfloat16, device="cuda") for size in sizes)
        return q, k, v


def cases() -> list[Case]:
    return cases_of(COMMON, BLACKWELL)


def cases_of(common: dict[str, Any], blackwell: dict[str, Any]) -> list[Case]:
    """Those of both chips and, instead or besides, those of Blackwell."""
    found = []
    for arch, chip in (("sm_90a", "Hopper"), ("sm_100a", "Blackwell")):
        for name, run in {**common, **(blackwell if arch == "sm_100a" else {})}.items():
            found.append(Case(f"flash-attn-4, {chip}: {name}", arch, partial(_with_interface, arch, run)))
    return found


def load() -> None:
    """Import flash-attn-4 once, for all processes."""
    importlib.import_module("flash_attn.cute.interface")


def _with_interface(arch: str, run: Any, checks: Checks) -> None:
    environment = {"FLASH_ATTENTION_ARCH": arch.rstrip("a"), "FLASH_ATTENTION_NUM_SMS": "4"}
    with patch.dict(os.environ, environment):
        run(importlib.import_module("flash_attn.cute.interface"), checks)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention in float64, causal from the bottom right; `allowed` is bool [q_len, kv_len], `bias` is added
    to scores [batch, heads, q_len, kv_len]."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    softcap = problem.options.get("softcap")
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    rows = torch.arange(scores.shape[-2])[:, None] + scores.shape[-1] - scores.shape[-2]
    columns = torch.arange(scores.shape[-1])[None]
    left, right = problem.options.get("window_size", (None, None))
    left, right = (
        problem.options.get("window_size_left", left),
        problem.options.get("window_size_right", right),
    )
    if problem.causal:
        right = 0
    if left is not None:
        scores = scores.masked_fill(columns < rows - left, -math.inf)
    if right is not None:
        scores = scores.masked_fill(columns > rows + right, -math.inf)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    sink = problem.options.get("learnable_sink")
    if sink is not None:
        scores = torch.cat((scores, sink.double()[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1)
    if sink is not None:
        weights = weights[..., :-1]
    return (weights @ v).transpose(1, 2)


def forward(problem: Problem, fa4: Any, checks: Checks) -> None:
    q, k, v = problem.tensors()
    out, _ = fa4.flash_attn_func(q, k, v, causal=problem.causal, **problem.options)
    checks.compare(out, attention(q, k, v, problem), BOUND)


def sink(problem: Problem, fa4: Any, checks: Checks) -> None:
    problem.options["learnable_sink"] = torch.randn(problem.heads, dtype=torch.bfloat16, device="cuda")
    forward(problem, fa4, checks)


def backward(problem: Problem, fa4: Any, checks: Checks) -> None:
    q, k, v = problem.tensors()
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        expected = attention(*leaves, problem)
        gradient = torch.randn(expected.shape, dtype=torch.bfloat16, device="cuda")
        expected.backward(gradient.double())
    options = {**problem.options}
    left, right = options.pop("window_size", (None, None))
    windows = {"window_size_left": left, "window_size_right": right}
    out, lse, *_ = fa4._flash_attn_fwd(q, k, v, causal=problem.causal, return_lse=True, **windows, **options)
    found = fa4._flash_attn_bwd(q, k, v, out, gradient, lse, causal=problem.causal, **windows, **options)
    checks.compare(out, expected, BOUND)
    for mine, leaf in zip(found, leaves):
        assert leaf.grad is not None
        checks.compare(mine, leaf.grad, 2 * BOUND)


def varlen(problem: Problem, fa4: Any, checks: Checks) -> None:
    """Three sequences, packed."""
    lengths = ((100, 200), (1, 130), (155, 54 + 101))
    ends = [torch.tensor([0, *(sum(n[i] for n in lengths[: j + 1]) for j in range(3))]) for i in range(2)]
    total = Problem(int(ends[0][-1]), int(ends[1][-1]), problem.heads, problem.kv_heads, problem.dim)
    q, k, v = (x[0] for x in total.tensors())
    cu_q, cu_k = (x.int().to("cuda") for x in ends)
    out, _ = fa4.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=155, max_seqlen_k=200,
        causal=problem.causal,
    )  # fmt: skip
    for i in range(3):
        mine, keys = slice(*ends[0][i : i + 2].tolist()), slice(*ends[1][i : i + 2].tolist())
        expected = attention(q[None, mine], k[None, keys], v[None, keys], problem)[0]
        checks.compare(out[mine], expected, BOUND)


def paged(page: int, problem: Problem, fa4: Any, checks: Checks) -> None:
    """Two sequences of different lengths whose pages lie in any order."""
    used = torch.tensor([problem.kv_len, problem.kv_len - 37], dtype=torch.int32)
    each = -(-problem.kv_len // page)
    table = torch.randperm(2 * each).reshape(2, each).int()
    shape = (2 * each, page, problem.kv_heads, problem.dim)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q = torch.randn(2, problem.q_len, problem.heads, problem.dim, dtype=torch.bfloat16, device="cuda")
    out, _ = fa4.flash_attn_varlen_func(
        q, k, v, page_table=table.to("cuda"), seqused_k=used.to("cuda"), causal=problem.causal,
        **problem.options,
    )  # fmt: skip
    for i in range(2):
        keys, values = (x[table[i].long()].flatten(0, 1)[: used[i]][None] for x in (k, v))
        checks.compare(out[i], attention(q[i : i + 1], keys, values, problem)[0], BOUND)


def splits(problem: Problem, fa4: Any, checks: Checks) -> None:
    """Keys in three parts, and the kernel that combines them."""
    forward(Problem(**{**vars(problem), "options": {**problem.options, "num_splits": 3}}), fa4, checks)


def combine(problem: Problem, fa4: Any, checks: Checks) -> None:
    """The kernel that combines parts, by itself."""
    parts = torch.randn(4, 1, problem.q_len, problem.heads, problem.dim, device="cuda")
    logs = torch.randn(4, 1, problem.heads, problem.q_len, device="cuda").transpose(2, 3)
    out, lse = fa4.flash_attn_combine(parts, logs, out_dtype=torch.bfloat16)
    weights = logs.double().softmax(0)[..., None]
    checks.compare(out, (parts.double() * weights).sum(0), BOUND)
    checks.compare(lse, logs.double().logsumexp(0), 1e-5)


def block_sparse(problem: Problem, fa4: Any, checks: Checks) -> None:
    """Key tiles of 128 by a list: one that a mask decides, and one that is full."""
    import cutlass.cute as cute
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    @cute.jit
    def every_third(batch: Any, head: Any, row: Any, column: Any, lengths: Any, tensors: Any) -> Any:
        return (row + column) % 3 != 0

    q, k, v = problem.tensors()
    rows = -(-problem.q_len // fa4_tile(problem))
    one = torch.ones(1, 1, rows, dtype=torch.int32, device="cuda")
    partial_tile = torch.zeros(1, 1, rows, 1, dtype=torch.int32, device="cuda")
    full_tile = torch.full((1, 1, rows, 1), 2, dtype=torch.int32, device="cuda")
    lists = BlockSparseTensorsTorch(
        one, partial_tile, one.clone(), full_tile, block_size=(fa4_tile(problem), 128)
    )
    out, *_ = fa4._flash_attn_fwd(q, k, v, mask_mod=every_third, block_sparse_tensors=lists)
    row, column = torch.arange(problem.q_len)[:, None], torch.arange(problem.kv_len)[None]
    allowed = torch.where(column < 128, (row + column) % 3 != 0, (column >= 256) & (column < 384))
    checks.compare(out, attention(q, k, v, problem, allowed), BOUND)


def fa4_tile(problem: Problem) -> int:
    """Query rows of a tile in a list of key tiles."""
    return int(problem.options.get("sparse_rows", 128))


def latent(problem: Problem, fa4: Any, checks: Checks) -> None:
    """Attention of latent vectors: scores of 64 rotated and 512 latent numbers, which are the values too."""
    heads, rope, width = problem.heads, 64, 512
    shapes = ((problem.q_len, heads, rope), (problem.q_len, heads, width))
    q, qv = (torch.randn(1, *shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    k, v = (torch.randn(1, problem.kv_len, 1, n, dtype=torch.bfloat16, device="cuda") for n in (rope, width))
    out, _ = fa4.flash_attn_func(q, k, v, qv=qv, causal=problem.causal, **problem.options)
    whole = attention(torch.cat((q, qv), -1), torch.cat((k, v), -1), v, problem)
    checks.compare(out, whole, BOUND)


COMMON = {
    "forward": partial(forward, Problem()),
    "forward, causal, head width 64": partial(forward, Problem(dim=64, causal=True)),
    "forward, window, softcap": partial(
        forward, Problem(options={"window_size": (100, 20), "softcap": 15.0})
    ),
    "forward, sink": partial(sink, Problem(causal=True)),
    "forward, head widths 192 and 128": partial(forward, Problem(dim=192, dim_v=128, causal=True)),
    "forward, head width 256": partial(forward, Problem(dim=256, causal=True)),
    "backward": partial(backward, Problem()),
    "backward, causal, head width 64": partial(backward, Problem(dim=64, causal=True)),
    "varlen": partial(varlen, Problem(causal=True)),
    "pages of 128": partial(paged, 128, Problem(q_len=64)),
    "pages of 64": partial(paged, 64, Problem(q_len=64)),
    "pages of 16": partial(paged, 16, Problem(q_len=64)),
    "pages of 1": partial(paged, 1, Problem(q_len=64)),
    "combine": partial(combine, Problem()),
    "block-sparse": partial(block_sparse, Problem(kv_len=512, kv_heads=2)),
}
BLACKWELL = {
    "block-sparse": partial(block_sparse, Problem(kv_len=512, kv_heads=2, options={"sparse_rows": 256})),
    "split keys": partial(splits, Problem(kv_len=512)),
    "backward, head widths 192 and 128": partial(backward, Problem(dim=192, dim_v=128, causal=True)),
    "backward, head width 256": partial(backward, Problem(dim=256, causal=True)),
    "latent vectors (MLA)": partial(latent, Problem(q_len=4, heads=128, kv_len=256)),
    "latent vectors (MLA), causal, 64 heads": partial(
        latent, Problem(q_len=3, heads=64, kv_len=256, causal=True)
    ),
    "latent vectors (MLA), split keys": partial(
        latent, Problem(q_len=1, heads=64, kv_len=512, options={"num_splits": 2})
    ),
}

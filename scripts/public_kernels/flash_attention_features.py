"""Kernels of flash-attn-4 that users reach by its options, against attention in float64: functions of scores
and masks that read tensors, packed heads, packed sequences in pages, gradients of all of these, 8-bit
numbers, latent vectors of chosen keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from flash_attention import BOUND, Problem, attention, cases_of
from kernel_case import Case, Checks
from torch import Tensor

LENGTHS = ((100, 200), (1, 130), (155, 155))
"""Queries and keys of three sequences, packed."""


def cases() -> list[Case]:
    return cases_of(COMMON, BLACKWELL)


def both_passes(
    problem: Problem, fa4: Any, checks: Checks, allowed: Tensor | None = None, **other: Any
) -> None:
    """`other` goes to the backward pass alone."""
    q, k, v = problem.tensors()
    _compare(fa4, checks, (q, k, v), problem, allowed, other)


def _compare(
    fa4: Any,
    checks: Checks,
    qkv: tuple[Tensor, Tensor, Tensor],
    problem: Problem,
    allowed: Tensor | None,
    backward: dict[str, Any],
    bias: Tensor | None = None,
) -> None:
    leaves = [x.double().requires_grad_() for x in qkv]
    with torch.enable_grad():
        expected = attention(*leaves, problem, allowed, bias)
        gradient = torch.randn(expected.shape, dtype=torch.bfloat16, device="cuda")
        expected.backward(gradient.double())
    options = {**problem.options, "causal": problem.causal}
    out, lse, *_ = fa4._flash_attn_fwd(*qkv, return_lse=True, **options)
    options = {name: option for name, option in options.items() if name not in FORWARD_ONLY}
    found = fa4._flash_attn_bwd(*qkv, out, gradient, lse, **options, **backward)
    checks.compare(out, expected, BOUND)
    for mine, leaf in zip(found, leaves):
        assert leaf.grad is not None
        checks.compare(mine, leaf.grad, 2 * BOUND)


FORWARD_ONLY = ("pack_gqa",)
"""Options that the backward pass does not have."""


# --- functions of scores and masks --------------------------------------------------------------------------


def modified(backward: bool, problem: Problem, fa4: Any, checks: Checks) -> None:
    """A bias for each head and key, from a tensor."""
    import cutlass.cute as cute

    @cute.jit
    def add(
        score: Any, batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
    ) -> Any:
        of_keys = aux_tensors[0]
        read = cute.make_rmem_tensor(kv_idx.shape, of_keys.element_type)
        for i in range(cute.size(kv_idx.shape)):
            read[i] = of_keys[head_idx[0], kv_idx[i]]
        return score + read.load().to(score.dtype)

    @cute.jit
    def add_backward(
        grad: Any, score: Any, batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any,
        aux_tensors: Any,
    ) -> Any:  # fmt: skip
        return grad

    q, k, v = problem.tensors()
    of_keys = torch.randn(problem.heads, problem.kv_len, dtype=torch.bfloat16, device="cuda")
    bias = of_keys.double()[None, :, None]
    given = Problem(**{**vars(problem), "options": {"score_mod": add, "aux_tensors": [of_keys]}})
    if backward:
        _compare(fa4, checks, (q, k, v), given, None, {"score_mod_bwd": add_backward}, bias)
        return
    out, *_ = fa4._flash_attn_fwd(q, k, v, causal=problem.causal, **given.options)
    checks.compare(out, attention(q, k, v, problem, None, bias), BOUND)


def masked(backward: bool, problem: Problem, fa4: Any, checks: Checks) -> None:
    """Documents by a tensor of their numbers."""
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute import utils

    @cute.jit
    def same_document(batch: Any, head: Any, row: Any, column: Any, lengths: Any, tensors: Any) -> Any:
        documents = tensors[0]
        mine = utils.scalar_to_ssa(documents[batch[0], row[0]], cutlass.Int32)
        other = utils.scalar_to_ssa(documents[batch[0], column[0]], cutlass.Int32)
        return mine == other

    assert problem.q_len == problem.kv_len
    documents = torch.arange(problem.q_len, dtype=torch.int32).div(100, rounding_mode="floor")
    allowed = documents[:, None] == documents[None]
    options = {"mask_mod": same_document, "aux_tensors": [documents[None].to("cuda")]}
    given = Problem(**{**vars(problem), "options": options})
    q, k, v = problem.tensors()
    if backward:
        _compare(fa4, checks, (q, k, v), given, allowed, {})
        return
    out, *_ = fa4._flash_attn_fwd(q, k, v, **options)
    checks.compare(out, attention(q, k, v, problem, allowed), BOUND)


# --- packed sequences ---------------------------------------------------------------------------------------


def packed(problem: Problem) -> tuple[Problem, list[Tensor], list[tuple[slice, slice]]]:
    """A problem of all of LENGTHS, where they begin, and the rows and keys of each."""
    ends = [torch.tensor([0, *(sum(n[i] for n in LENGTHS[: j + 1]) for j in range(3))]) for i in range(2)]
    parts = [(slice(*ends[0][i : i + 2].tolist()), slice(*ends[1][i : i + 2].tolist())) for i in range(3)]
    sizes = {"q_len": int(ends[0][-1]), "kv_len": int(ends[1][-1])}
    return Problem(**{**vars(problem), **sizes}), [x.int().to("cuda") for x in ends], parts


def varlen_backward(problem: Problem, fa4: Any, checks: Checks) -> None:
    total, (cu_q, cu_k), parts = packed(problem)
    q, k, v = (x[0] for x in total.tensors())
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    gradient = torch.randn(*q.shape[:2], v.shape[-1], dtype=torch.bfloat16, device="cuda")
    with torch.enable_grad():
        rows = [
            attention(leaves[0][None, i], leaves[1][None, j], leaves[2][None, j], problem)[0]
            for i, j in parts
        ]
        expected = torch.cat(rows)
        expected.backward(gradient.double())
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 155, "max_seqlen_k": 200}
    out, lse, *_ = fa4._flash_attn_fwd(q, k, v, causal=problem.causal, return_lse=True, **lengths)
    found = fa4._flash_attn_bwd(q, k, v, out, gradient, lse, causal=problem.causal, **lengths)
    checks.compare(out, expected, BOUND)
    for mine, leaf in zip(found, leaves):
        assert leaf.grad is not None
        checks.compare(mine, leaf.grad, 2 * BOUND)


def _one(qkv: Sequence[Tensor], rows: slice, keys: slice, problem: Problem) -> Tensor:
    q, k, v = qkv
    return attention(q[None, rows], k[None, keys], v[None, keys], problem)[0]


def used_lengths(problem: Problem, fa4: Any, checks: Checks) -> None:
    """Two padded sequences, of which less is used."""
    q, k, v = Problem(**{**vars(problem), "batch": 2}).tensors()
    rows, keys = (problem.q_len, problem.q_len - 41), (problem.kv_len - 100, problem.kv_len)
    used = {
        "seqused_q": torch.tensor(rows, dtype=torch.int32).to("cuda"),
        "seqused_k": torch.tensor(keys, dtype=torch.int32).to("cuda"),
    }
    out, _ = fa4.flash_attn_varlen_func(q, k, v, causal=problem.causal, **used)
    for i in range(2):
        expected = attention(
            q[i : i + 1, : rows[i]], k[i : i + 1, : keys[i]], v[i : i + 1, : keys[i]], problem
        )
        checks.compare(out[i, : rows[i]], expected[0], BOUND)


def paged_varlen(page: int, problem: Problem, fa4: Any, checks: Checks) -> None:
    """Packed queries of three sequences, whose keys lie in pages."""
    total, (cu_q, _), parts = packed(problem)
    used = torch.tensor([keys for _, keys in LENGTHS], dtype=torch.int32)
    each = -(-int(used.max()) // page)
    table = torch.randperm(3 * each).reshape(3, each).int()
    shape = (3 * each, page, problem.kv_heads, problem.dim)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q = total.tensors()[0][0]
    out, _ = fa4.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_q, max_seqlen_q=155, page_table=table.to("cuda"),
        seqused_k=used.to("cuda"), causal=problem.causal, **problem.options,
    )  # fmt: skip
    for i, (rows, _) in enumerate(parts):
        keys, values = (x[table[i].long()].flatten(0, 1)[: used[i]][None] for x in (k, v))
        checks.compare(out[rows], attention(q[None, rows], keys, values, problem)[0], BOUND)


def combine_varlen(problem: Problem, fa4: Any, checks: Checks) -> None:
    """Parts of three packed sequences."""
    total, (cu_q, _), _ = packed(problem)
    parts = torch.randn(4, total.q_len, problem.heads, problem.dim, device="cuda")
    logs = torch.randn(4, problem.heads, total.q_len, device="cuda").transpose(1, 2)
    out, lse = fa4.flash_attn_combine(parts, logs, out_dtype=torch.bfloat16, cu_seqlens=cu_q)
    weights = logs.double().softmax(0)[..., None]
    checks.compare(out, (parts.double() * weights).sum(0), BOUND)
    checks.compare(lse, logs.double().logsumexp(0), 1e-5)


# --- lists of key tiles -------------------------------------------------------------------------------------


def block_sparse_backward(problem: Problem, fa4: Any, checks: Checks) -> None:
    """Blocks are left out, full, or decided by a mask; the gradients' lists are of query blocks."""
    import cutlass.cute as cute
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    @cute.jit
    def every_third(batch: Any, head: Any, row: Any, column: Any, lengths: Any, tensors: Any) -> Any:
        return (row + column) % 3 != 0

    side = problem.options["side"]
    count = problem.q_len // side
    kinds = torch.tensor([[0, 1, 2, 1], [1, 2, 0, 0], [2, 0, 1, 2], [0, 1, 2, 1]])[:count, :count]
    grown = kinds.repeat_interleave(side, 0).repeat_interleave(side, 1)
    row, column = torch.arange(problem.q_len)[:, None], torch.arange(problem.kv_len)[None]
    allowed = (grown == 2) | (grown == 1) & ((row + column) % 3 != 0)

    def lists(of: Tensor) -> BlockSparseTensorsTorch:
        fields = []
        for kind in (1, 2):
            have = (of == kind).contiguous()
            order = have.int().argsort(dim=1, descending=True, stable=True)
            fields += [have.sum(1).int()[None, None].to("cuda"), order.int()[None, None].to("cuda")]
        return BlockSparseTensorsTorch(*fields, block_size=(side, side))

    q, k, v = problem.tensors()
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        expected = attention(*leaves, Problem(**{**vars(problem), "options": {}}), allowed)
        gradient = torch.randn(expected.shape, dtype=torch.bfloat16, device="cuda")
        expected.backward(gradient.double())
    common = {"mask_mod": every_third}
    out, lse, *_ = fa4._flash_attn_fwd(q, k, v, return_lse=True, block_sparse_tensors=lists(kinds), **common)
    found = fa4._flash_attn_bwd(q, k, v, out, gradient, lse, block_sparse_tensors=lists(kinds.T), **common)
    checks.compare(out, expected, BOUND)
    for mine, leaf in zip(found, leaves):
        assert leaf.grad is not None
        checks.compare(mine, leaf.grad, 2 * BOUND)


def block_lists(problem: Problem, fa4: Any, checks: Checks) -> None:
    """The kernel that finds which tiles a mask leaves whole, in part, or out."""
    import cutlass.cute as cute
    from flash_attn.cute.compute_block_sparsity import compute_block_sparsity

    @cute.jit
    def window(batch: Any, head: Any, row: Any, column: Any, lengths: Any, tensors: Any) -> Any:
        return (column <= row) & (column + 200 > row)

    found = compute_block_sparsity(
        128, 128, 1, 1, problem.q_len, problem.kv_len, window, None, torch.device("cuda")
    )
    row, column = torch.arange(problem.q_len)[:, None], torch.arange(problem.kv_len)[None]
    allowed = (column <= row) & (column + 200 > row)
    tiles = allowed.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2).flatten(2)
    full = tiles.all(-1)
    part = tiles.any(-1) & ~full
    counts, indices, full_counts, full_indices = found[:4]
    for n, i, wanted in ((counts, indices, part), (full_counts, full_indices, full)):
        checks.compare(n[0, 0], wanted.sum(-1), 0.0)
        mine = torch.zeros_like(wanted)
        for tile in range(len(wanted)):
            mine[tile, i[0, 0, tile, : int(n[0, 0, tile])].long()] = True
        checks.compare(mine, wanted, 0.0)


# --- what only Blackwell has --------------------------------------------------------------------------------


def eight_bits(problem: Problem, fa4: Any, checks: Checks) -> None:
    """Numbers of 8 bits, with a scale for each sequence and head; probabilities are rounded to 8 bits too."""
    q, k, v = (x.to(torch.float8_e4m3fn) for x in problem.tensors())
    scales = [0.5 + torch.rand(problem.batch, problem.kv_heads).to("cuda") for _ in range(3)]
    groups = problem.heads // problem.kv_heads
    wide = [x.double() * s.double()[:, None, :, None] for x, s in zip((k, v), scales[1:])]
    of_q = q.double() * scales[0].double().repeat_interleave(groups, 1)[:, None, :, None]
    out, *_ = fa4._flash_attn_fwd(
        q, k, v, causal=problem.causal, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2]
    )
    checks.compare(out, attention(of_q, *wide, problem), 2**-4)


def chosen_keys(backward: bool, problem: Problem, fa4: Any, checks: Checks) -> None:
    """Latent vectors of the keys that an index names for each query."""
    heads, rope, width, count = problem.heads, 64, 512, 128
    shapes = ((problem.q_len, heads, rope), (problem.kv_len, 1, rope))
    more = ((problem.kv_len, 1, width), (problem.q_len, heads, width))
    tensors = [torch.randn(1, *shape, dtype=torch.bfloat16, device="cuda") for shape in (*shapes, *more)]
    chosen = torch.stack([torch.randperm(problem.kv_len)[:count] for _ in range(problem.q_len)])
    allowed = torch.zeros(problem.q_len, problem.kv_len, dtype=torch.bool).scatter_(1, chosen, True)
    index = chosen[None].int().to("cuda")
    leaves = [x.double().requires_grad_() for x in tensors]
    q64, k64, v64, qv64 = leaves
    with torch.enable_grad():
        whole = attention(torch.cat((q64, qv64), -1), torch.cat((k64, v64), -1), v64, problem, allowed)
        if backward:
            gradient = torch.randn(whole.shape, dtype=torch.bfloat16, device="cuda")
            whole.backward(gradient.double())
            given = [x.clone().requires_grad_() for x in tensors]
            out, *_ = fa4.flash_attn_func(*given, gather_kv_indices=index)
            out.backward(gradient)
        else:
            out, *_ = fa4.flash_attn_func(*tensors, gather_kv_indices=index)
    checks.compare(out, whole, BOUND)
    if backward:
        for mine, leaf in zip(given, leaves):
            assert mine.grad is not None and leaf.grad is not None
            checks.compare(mine.grad, leaf.grad, 2 * BOUND)


SMALL = {"q_len": 192, "kv_len": 256}
"""Sizes at which gradients are computed."""
COMMON = {
    "score_mod with a tensor": partial(modified, False, Problem()),
    "score_mod with a tensor, backward": partial(modified, True, Problem(kv_heads=2, **SMALL)),
    "mask_mod with a tensor": partial(masked, False, Problem(kv_len=256)),
    "mask_mod with a tensor, backward": partial(masked, True, Problem(q_len=192, kv_len=192)),
    "packed heads, both passes": partial(
        both_passes, Problem(q_len=100, kv_len=192, heads=4, causal=True, options={"pack_gqa": True})
    ),
    "deterministic backward": partial(both_passes, Problem(causal=True, **SMALL), deterministic=True),
    "backward, window, softcap": partial(
        both_passes,
        Problem(options={"window_size_left": 100, "window_size_right": 20, "softcap": 15.0}, **SMALL),
    ),
    "backward, head width 96": partial(both_passes, Problem(dim=96, **SMALL)),
    "varlen backward": partial(varlen_backward, Problem(causal=True)),
    "varlen backward, head width 64": partial(varlen_backward, Problem(dim=64)),
    "used lengths": partial(used_lengths, Problem(causal=True)),
    "pages of 128, packed queries": partial(paged_varlen, 128, Problem(causal=True)),
    "pages of 16, packed queries": partial(paged_varlen, 16, Problem(causal=True)),
    "combine, packed": partial(combine_varlen, Problem()),
    "block-sparse backward": partial(
        block_sparse_backward, Problem(q_len=512, kv_len=512, kv_heads=2, options={"side": 128})
    ),
    "lists of blocks": partial(block_lists, Problem(q_len=512, kv_len=512)),
}
BLACKWELL: dict[str, Any] = {
    "block-sparse backward": partial(
        block_sparse_backward, Problem(q_len=512, kv_len=512, kv_heads=2, options={"side": 256})
    ),
    "fp8": partial(eight_bits, Problem()),
    "fp8, causal, head width 64": partial(eight_bits, Problem(dim=64, causal=True)),
    "split keys, pages of 64": partial(paged_varlen, 64, Problem(options={"num_splits": 2})),
    "latent vectors of chosen keys": partial(chosen_keys, False, Problem(q_len=4, heads=128, kv_len=256)),
    "latent vectors of chosen keys, backward": partial(
        chosen_keys, True, Problem(q_len=4, heads=128, kv_len=256)
    ),
    "latent vectors of chosen keys, 64 heads, backward": partial(
        chosen_keys, True, Problem(q_len=4, heads=64, kv_len=256)
    ),
}

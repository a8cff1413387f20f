"""Lengths of ragged batches on simulated GPUs: what kernels get of them, in which order tiles are taken, and
what is told of those that are wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import cumulative
from kernel_faults import drop_faults
from sequences_reference import classes, corrected, every_key, sequence_lengths, sorted_tiles
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Schedule, Varlen
from fa4flex.errors import EarlierError, InputError
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import SM90A
from fa4flex.runtime.call import Call, SequenceLengths
from fa4flex.runtime.cuda import engine as engine_module
from fa4flex.runtime.cuda.device import faults
from fa4flex.runtime.cuda.tables.lengths import LengthsKernel, lengths_of
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.variants import causal, document, sliding_window


def causal_keys(first: int, last: int, q_len: int, kv_len: int) -> int:
    return min(max(last + 1 + kv_len - q_len, 0), kv_len)


def window_keys(first: int, last: int, q_len: int, kv_len: int) -> int:
    start = max(first + kv_len - q_len - 39, 0)
    return max(causal_keys(first, last, q_len, kv_len) - start, 0)


MASKS: dict[str, tuple[Any, Callable[..., int]]] = {
    "none": (None, every_key),
    "causal": (causal, causal_keys),
    "window": (sliding_window(40), window_keys),
    "ids": (document(torch.arange(4000) // 50), every_key),
}


def kernel_of(mask: Any, call: Call, tile: tuple[int, int] | None = None) -> LengthsKernel:
    program = fa4flex.compile(**({} if mask is None else {"mask": mask})).program
    form = "none" if mask is None else "spans"
    lengths = "packed" if call.packed else "used"
    problem = Problem(64, 64, lengths=lengths, mask_form=form)  # type: ignore[arg-type]
    passed = SimpleNamespace(facts=program.facts, problem=problem, plan=SimpleNamespace(target=SM90A))
    kinds = dict.fromkeys(range(len(program.scalars)), "int")
    kernel = lengths_of(kinds, call._replace(scalars=program.scalars), passed, tile=tile)  # type: ignore[arg-type]
    assert kernel is not None
    return kernel


def call_of(lengths: tuple[Tensor | None, ...], q_len: int, kv_len: int, batch: int = 0) -> Call:
    """A call of packed tensors, or of padded ones of so many sequences."""
    q, k = (torch.empty(n, 2, 8) if not batch else torch.empty(batch, 2, n, 8) for n in (q_len, kv_len))
    return Call(q, Contiguous(k, k), (), None, SequenceLengths(*lengths), (), 1.0, True, ())


def listed(x: Tensor | None) -> list[int] | None:
    return None if x is None else x.tolist()


def assert_right(call: Call, kernel: LengthsKernel, tile: tuple[int, int], keys: Callable[..., int]) -> None:
    """Corrected lengths and order of this call, which may be wrong in itself.

    Tensors are compared, not lists: of thousands of wrong numbers pytest would print the differences, and
    look for them for minutes.
    """
    found, order = kernel(call)
    shape, given = call.extents(), [listed(x) for x in call.lengths]
    tokens = shape.q_len, shape.kv_len
    for side in range(2):
        right = corrected(given[side], given[side + 2], tokens[side])
        for x, expected in zip(found[side::2], right, strict=True):
            assert (x is None) == (expected is None)
            assert x is None or torch.equal(x, x.new_tensor(expected))
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in found if x is not None)
    lens = [sequence_lengths(given[i], given[i + 2], tokens[i], shape.batch) for i in range(2)]
    rows = shape.q_len // tile[0] + shape.batch if call.packed else -(-shape.q_len // tile[0]) * shape.batch
    work = classes(*lens, tile, keys)
    assert order is not None
    assert torch.equal(order, order.new_tensor(sorted_tiles(work, rows, shape.batch)))


def drawn(form: str, batch: int) -> Call:
    """A random batch in int32 or int64, with strides or without."""
    dtype = random.choice((torch.int32, torch.int64))
    q_lengths, k_lengths = ([random.choice((0, 1, 100, 128, 257, 900)) for _ in range(batch)] for _ in "qk")
    q_lengths[-1] = k_lengths[0] = 900
    used = [torch.tensor([random.randint(0, n) for n in lengths]) for lengths in (q_lengths, k_lengths)]
    cu = [cumulative(q_lengths), cumulative(k_lengths)]
    if form == "padded":
        given: tuple[Tensor | None, ...] = (None, None, *used)
    else:
        given = (*cu, *(used if "used" in form else (None, None)))
    step = random.choice((1, 2))
    given = tuple(None if x is None else x.to(dtype).repeat_interleave(step)[::step] for x in given)
    sizes = (900, 900, batch) if form == "padded" else (sum(q_lengths), sum(k_lengths))
    return call_of(given, *sizes)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("form", ["packed", "packed, used", "padded"])
def test_every_tile_once_and_the_most_work_first(name: str, form: str) -> None:
    mask, keys = MASKS[name]
    tile = random.choice((64, 128, 192)), random.choice((80, 128))
    with ptxsim.device("sm_90a") as gpu:
        for batch in (1, random.randint(2, 60)):
            call = drawn(form, batch)
            assert_right(call, kernel_of(mask, call, tile), tile, keys)
    assert not gpu.findings
    faults.check()


def test_more_sequences_than_threads_and_more_classes_than_bins() -> None:
    lengths = [random.choice((0, 3, 64, 200, 1000)) for _ in range(1100)]
    lengths[300] = 140_000
    cu = cumulative(lengths)
    call = call_of((cu, cu, None, None), sum(lengths), sum(lengths))
    with ptxsim.device("sm_90a"):
        assert_right(call, kernel_of(causal, call, (256, 128)), (256, 128), causal_keys)
        cu[100] = cu[600]  # decreases, and reaches beyond what threads look at together
        assert_right(call, kernel_of(causal, call, (256, 128)), (256, 128), causal_keys)
    assert drop_faults()


def test_one_used_length_of_a_padded_batch() -> None:
    for given in ((torch.tensor([5, 300, 0]), None), (None, torch.tensor([5, 300, 0]))):
        call = call_of((None, None, *given), 300, 300, 3)
        with ptxsim.device("sm_90a"):
            assert_right(call, kernel_of(causal, call, (128, 128)), (128, 128), causal_keys)
    faults.check()


# --- wrong lengths ----------------------------------------------------------------------------------------

LARGE = 1 << 40
WRONG: dict[str, tuple[str, list[int] | None, list[int] | None]] = {
    "cu_seqlens_k starts at 3": ("packed", [3, 300, 1000], None),
    "cu_seqlens_k starts at -3": ("packed", [-3, 300, 1000], None),
    "cu_seqlens_k decreases after entry 1: 300 to 100": ("packed", [0, 300, 100, 1000], None),
    "cu_seqlens_k decreases after entry 2: 900 to -7": ("packed", [0, 300, 900, -7, 1000], None),
    "cu_seqlens_k ends at 1200, k has 1000 tokens": ("packed", [0, 300, 1200], None),
    "cu_seqlens_k ends at 900, k has 1000 tokens": ("packed", [0, 300, 900], None),
    f"cu_seqlens_k ends at {(1 << 31) - 2}, k has 1000 tokens": ("packed", [0, LARGE, LARGE], None),
    "seqused_k of -2": ("packed", [0, 300, 1000], [-1, -2]),
    "seqused_k[1] = 701, sequence 1 has 700 tokens": ("packed", [0, 300, 1000], [300, 701]),
    "seqused_k up to 1005 for a length of 1000": ("padded", None, [1001, 1005]),
    f"seqused_k up to {(1 << 31) - 2} for a length of 1000": ("padded", None, [0, LARGE]),
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_lengths_are_corrected_and_told(words: str) -> None:
    form, cu, used = WRONG[words]
    count = len(used) if cu is None else len(cu) - 1
    right = torch.arange(count + 1) * (1000 // count)
    right[-1] = 1000
    cu_q = None if cu is None else right
    lengths = cu_q, *(None if x is None else torch.tensor(x) for x in (cu, None, used))
    call = call_of(lengths, 1000, 1000, count if form == "padded" else 0)
    with ptxsim.device("sm_90a"):
        kernel = kernel_of(None, call, (128, 128))
        assert_right(call, kernel, (128, 128), every_key)
    with pytest.raises(InputError) as error:
        faults.check()
    assert error.value.given == f"{words}, in a call before this one: its result is not valid"
    assert "FA4FLEX_VALIDATE=1" in error.value.fix
    faults.check()
    if LARGE not in (cu or used or ()):
        with pytest.raises(InputError) as here:  # the host's words
            if form == "padded":
                Varlen(*lengths).check_padded(count, 1000, 1000)
            else:
                Varlen(*lengths).check(1000, 1000)
        assert (here.value.given, here.value.expected) == (words, error.value.expected)


# --- calls ------------------------------------------------------------------------------------------------


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(tokens, heads, 64).bfloat16() for heads in (2, 1, 1))
    return q, k, v


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a.float(), b.float(), atol=0.03, rtol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["auto", "longest_first"])
def test_new_contents_of_a_tensor_are_seen(order: Any) -> None:
    """Also those of inference tensors, whose changes nobody counts."""
    q, k, v = inputs(330)
    attn = fa4flex.compile(mask=causal, schedule=Schedule(order=order))
    with torch.inference_mode():
        uncounted = cumulative([0, 330])
    for cu in (cumulative([0, 330]), uncounted):
        varlen = Varlen(cu)
        for lengths in ([130, 200], [300, 30], [300, 30]):
            with torch.inference_mode(cu.is_inference()):
                if cu[1] != lengths[0]:
                    cu.copy_(cumulative(lengths))
                expected = attn(q, k, v, varlen=Varlen(cu.clone()))
            with ptxsim.device("sm_90a"), torch.no_grad():
                close(attn(q, k, v, varlen=varlen), expected)


def launches(gpu: Any) -> list[str]:
    """Launches of the kernel of lengths."""
    return [result.kernel for result in gpu.results if "sequences" in result.kernel]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_wrong_lengths_are_those_they_are_corrected_to(arch: str) -> None:
    """Forward and backward, to the last bit of what has one order of sums; then the next call tells."""
    qkv = tuple(x.requires_grad_() for x in inputs(80))
    attn = fa4flex.compile(mask=causal)
    dout = torch.randn(80, 2, 64).bfloat16()
    results = []
    cu = cumulative([30, 20, 30])
    varlen = Varlen(cu, cu)
    for wrong in (False, True):
        cu.copy_(torch.tensor([0, 70, -1000, 2000] if wrong else [0, 70, 70, 80]))
        with ptxsim.device(arch) as gpu:
            out = attn(*qkv, varlen=varlen)
            if wrong:
                with pytest.raises(EarlierError, match="decreases after entry 1: 70 to -1000"):
                    attn(*qkv, varlen=varlen)
            gradients = torch.autograd.grad(out, qkv, dout)
        assert all(result.fault is None for result in gpu.results)
        results.append((out, *gradients))
    for right, found in zip(*results, strict=True):
        close(found, right)
    assert torch.equal(*(x[0] for x in results))
    assert drop_faults(), "the backward pass tells again"


def test_an_error_of_an_earlier_call_is_not_the_present_one() -> None:
    """It is told once, by any call or by synchronize, and bears no note of the call that tells it."""
    qkv = inputs(80)
    cu = cumulative([30, 50])
    varlen, attn = Varlen(cu, cu), fa4flex.compile(mask=causal)
    for again in (lambda: attn(*(x[None] for x in qkv)), fa4flex.synchronize):
        with ptxsim.device("sm_90a"), torch.no_grad():
            attn(*qkv, varlen=varlen)  # tensors of a new look lie on a CPU here, and are checked at once
            cu.copy_(torch.tensor([0, 90, 80]))
            attn(*qkv, varlen=varlen)
            with pytest.raises(EarlierError, match="cu_seqlens_q decreases after entry 1: 90 to 80") as error:
                again()
            assert not getattr(error.value, "__notes__", [])
            cu.copy_(cumulative([30, 50]))
            attn(*qkv, varlen=varlen)
            fa4flex.synchronize()


def test_lengths_are_checked_before_a_launch_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = inputs(80)
    cu = cumulative([30, 50])
    varlen, attn = Varlen(cu, cu), fa4flex.compile(mask=causal)
    monkeypatch.setattr(engine_module, "VALIDATE", True)
    with ptxsim.device("sm_90a") as gpu, torch.no_grad():
        attn(*qkv, varlen=varlen)
        count = len(gpu.results)
        cu.copy_(torch.tensor([0, 90, 80]))
        with pytest.raises(InputError, match="cu_seqlens_q decreases after entry 1: 90 to 80"):
            attn(*qkv, varlen=varlen)
        assert len(gpu.results) == count

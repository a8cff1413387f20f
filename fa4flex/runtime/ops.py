"""The functions of torch's operators of attention (operators.py has their schemas): what computes them, their
shapes without data, and what stands above autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from fa4flex import later
from fa4flex.contents import validating
from fa4flex.default_device import on_the_host
from fa4flex.errors import UnsupportedError
from fa4flex.operators import OPERATORS, below, library
from fa4flex.primitives.paging import Paging, conditions_of
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import autocast, flops, packing, sharding
from fa4flex.runtime.call import Call, lengths_of, results_of
from fa4flex.runtime.compute import backward, forward, on_gpu
from fa4flex.runtime.cuda import in_place
from fa4flex.runtime.cuda.calls.launch_cache import MISSING
from fa4flex.runtime.flex.choice import by_flex
from fa4flex.runtime.gradients import Attend, Outline
from fa4flex.runtime.key_sources import Paged
from fa4flex.runtime.layouts import empty_output, laid_out
from fa4flex.runtime.programs import Forward, Published, read
from fa4flex.torch_internals import below_autograd, forward_ad
from ptxsim.active import simulating

_ATTENTION, _BACKWARD, _IN_PAGES = (
    OPERATORS[name] for name in ("attention", "attention_gradients", "attention_in_pages")
)
_WITH_MORE, _IN_PAGES_WITH_MORE = (OPERATORS[x + packing.WITH_MORE] for x in packing.NAMES.values())

# --- calls ------------------------------------------------------------------------------------------------


def attend(program: Published, call: Call, observed: bool) -> tuple[Any, ...]:
    """Results of a call with heads first, with gradients where autograd wants some. `observed`: something
    traces or intercepts operators, which then see one."""
    if observed:
        _follow()
        return packing.results_by_operator(program, call)
    if not torch.is_grad_enabled() or not call.wants_gradients:
        return forward(program, call, differentiable=False)
    return Attend.of(Outline.of(program, lambda call: forward(program, call), call), call)


def _follow() -> None:
    """Register with parts of torch that were loaded since the last call; loading them is not ours."""
    sharding.follow(library)
    flops.follow()


_follow()


# --- contiguous keys --------------------------------------------------------------------------------------


def attention(*arguments: Any) -> Forward:
    return _attention(_ATTENTION.named(arguments))


def attention_with_statistics(*arguments: Any) -> Forward:
    return _attention(_WITH_MORE.named(arguments))


@on_the_host
def _attention(value: dict[str, Any]) -> Forward:
    with autocast.off(value["q"]):
        return forward(read(value["program"]), packing.call_of(value))


@on_the_host
def attention_gradients(*arguments: Any) -> list[Tensor]:
    value = _BACKWARD.named(arguments)
    call, gradients = packing.call_of(value), (value["upstream"], value["saved"])
    with autocast.off(call.q):
        result = backward(read(value["program"]), call, gradients, value["needs"])
    qkv = map(value.__getitem__, "qkv")
    return [*map(laid_out, result, qkv), *(x.contiguous() for x in result[3:])]


def attention_backward(*arguments: Any) -> list[Tensor]:
    return [x.contiguous() for x in attention_gradients(*arguments)]


def attention_with_gradients(*arguments: Any) -> Any:
    return _with_gradients(_ATTENTION.named(arguments))


def attention_with_statistics_and_gradients(*arguments: Any) -> Any:
    return _with_gradients(_WITH_MORE.named(arguments))


def _with_gradients(value: dict[str, Any]) -> Any:
    _follow()
    program, call = read(value["program"]), packing.call_of(value, data=False)

    def compute(call: Call) -> Any:
        with below_autograd():
            return packing.results_by_operator(program, call)

    _refuse_tangents(call)
    if not torch.is_grad_enabled() or not call.wants_gradients:
        return compute(call)
    return Attend.of(Outline.of(program, compute, call, registered=True), call)


def _refuse_tangents(call: Call) -> None:
    """Raise UnsupportedError where a compiled graph brings tangents, which an operator would drop."""
    if forward_ad._current_level < 0:
        return
    tensors = (call.q, call.kv.k, call.kv.v, call.sinks, *call.operands)
    if any(x is not None and unpack_dual(x).tangent is not None for x in tensors):
        raise UnsupportedError(
            "forward-mode derivatives of attention in code that torch.compile traces",
            "forward mode outside of torch.compile, and backward passes in it",
            "call the function that takes the derivative under torch.compiler.disable",
        )


gradients_below, backward_below = map(below, ("attention_gradients", "attention_backward"))


def attention_fake(*arguments: Any) -> Forward:
    value = _ATTENTION.named(arguments)
    out, lse, largest = _results_fake(value, heads_first=True)
    if out.device.type != "cpu":
        return out, lse, largest, lse.new_empty(0)
    return out, lse, lse.new_empty(lse.shape), lse.new_empty(lse.shape)


def attention_with_statistics_fake(*arguments: Any) -> Forward:
    value = _WITH_MORE.named(arguments)
    made = attention_fake(*_ATTENTION.packed(value))
    return *made, *_more_fake(value, made[1], value["q"].shape[1])


def _more_fake(arguments: dict[str, Any], lse: Tensor, heads: Any) -> tuple[Tensor, Tensor]:
    """max_logit and entropy, which are empty where they are not wanted."""
    entropy = lse.new_empty(lse.shape if arguments["entropy"] else (0,))
    return lse.new_empty((heads,) if arguments["max_logit"] else (0,)), entropy


def _results_fake(arguments: dict[str, Any], heads_first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and max_scores, which are empty where they are not wanted."""
    q, precision = arguments["q"], read(arguments["program"]).precision
    rows: Sequence[Any] = (q.shape[1], q.shape[0])
    if arguments["cu_seqlens_q"] is None:
        rows = q.shape[:3] if heads_first else (q.shape[0], q.shape[2], q.shape[1])
    out = empty_output(q, arguments["v"].shape[-1], precision.output_dtype(q.dtype))
    dtype, wanted = precision.compute_dtype(q.dtype), arguments["max_scores"]
    return out, q.new_empty(rows, dtype=dtype), q.new_empty(rows if wanted else (0,), dtype=dtype)


def attention_gradients_fake(*arguments: Any) -> list[Tensor]:
    value = _BACKWARD.named(arguments)
    sinks, operands = value["sinks"], value["operands"]
    made = [empty_output(x, x.shape[-1], x.dtype) for x in map(value.__getitem__, "qkv")]
    like = [*([] if sinks is None else [sinks]), *(operands[slot] for slot in value["needs"])]
    return made + [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]


def attention_backward_fake(*arguments: Any) -> list[Tensor]:
    made = attention_gradients_fake(*arguments)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in made]


# --- keys in pages, without gradients ---------------------------------------------------------------------


def attention_in_pages(*arguments: Any) -> tuple[Tensor, ...]:
    return _in_pages(_IN_PAGES.named(arguments))


def attention_in_pages_with_statistics(*arguments: Any) -> tuple[Tensor, ...]:
    return _in_pages(_IN_PAGES_WITH_MORE.named(arguments))


@on_the_host
def _in_pages(value: dict[str, Any]) -> tuple[Tensor, ...]:
    """out in the layout of q; lse [B, Hq, Sq], or [Hq, Tq] of packed queries; max_scores alike, empty where
    they are not wanted. Kernels read pages where they lie; where there is none for a call, and on a CPU, all
    pages of the table are copied first.

    Contents are looked at on a CPU, and with FA4FLEX_VALIDATE=1 on a device. Else kernels find what does not
    fit, or, where pages are copied, conditions that nobody waits for; and a later call tells.
    """
    program, call = read(value["program"]), packing.call_of(value, Paged)
    kv = call.kv
    assert isinstance(kv, Paged)
    paging, pool, on_device = Paging(kv.page_table, kv.paged_keys), kv.k, not call.q.is_cpu or simulating()
    if not on_device or validating():
        paging.check_contents(pool)
    with autocast.off(call.q):
        if on_gpu(call.q) and not by_flex(program.backend, call.q) and not call.empty:
            result = _by_kernel(program, call, kv.heads_first() if call.heads_first else kv)
            if result is not None:
                return result
        if on_device:
            for condition, message in conditions_of(paging, pool):
                later.require_at_each_replay(condition, message)
        return _copied(program, call, kv)


def _by_kernel(program: Published, call: Call, kv: Paged) -> tuple[Tensor, ...] | None:
    """The results by a kernel that reads the pages; None where there is none."""
    call = call._replace(kv=kv)
    ready = program.engine.find(call)
    if ready is MISSING:
        ready = in_place.made(program.engine, call)
    if ready is None:
        return None
    out, lse, *more = ready(call)
    assert lse is not None
    return out, lse, *[lse.new_empty(0) if x is None else x for x in more]


def _copied(program: Published, call: Call, kv: Paged) -> tuple[Tensor, ...]:
    """The results over a copy of all pages."""
    copy = kv.spread(call.q, Varlen(*call.lengths) if call.packed else None, call.heads_first)
    over = call._replace(kv=copy.kv, lengths=lengths_of(copy.varlen, copy.kv))
    made = forward(program, over.turned(), differentiable=False)
    out, lse, largest, *more = results_of(made, call.statistics)
    return over.turn(out), lse, largest if "max_scores" in call.statistics else lse.new_empty(0), *more


def attention_in_pages_fake(*arguments: Any) -> tuple[Tensor, ...]:
    value = _IN_PAGES.named(arguments)
    return _results_fake(value, value["heads_first"])


def attention_in_pages_with_statistics_fake(*arguments: Any) -> tuple[Tensor, ...]:
    value = _IN_PAGES_WITH_MORE.named(arguments)
    made, q = _results_fake(value, value["heads_first"]), value["q"]
    return *made, *_more_fake(value, made[1], q.shape[1 if q.ndim == 3 or value["heads_first"] else 2])

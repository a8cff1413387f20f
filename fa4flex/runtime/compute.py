"""Both passes of a call, by whatever computes them: a GPU's kernels, torch's flex_attention, or PyTorch
operations tile by tile. Nothing here is seen by torch's dispatcher or by autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fa4flex.errors import UnsupportedError
from fa4flex.runtime.call import Call, Results
from fa4flex.runtime.cuda.backward import run_backward
from fa4flex.runtime.cuda.calls.launch_cache import MISSING
from fa4flex.runtime.cuda.launches.ready_backward import Saved
from fa4flex.runtime.cuda.mass import key_mass as sums_by_kernel
from fa4flex.runtime.flex.choice import by_flex
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.runtime.latent_rows import LatentRows
from fa4flex.runtime.layouts import empty_output
from fa4flex.runtime.programs import Forward, Published
from fa4flex.torch_internals import outside_operators
from ptxsim.active import simulating

Gradients = tuple[Sequence[Tensor], Sequence[Tensor]]
"""([dout, dlse, dentropy], what the forward pass returned); without the last, or both, where nothing depends
on the entropy, or the lse."""


def on_gpu(q: Tensor) -> bool:
    """True if such queries are on a GPU, or a simulated one."""
    return q.is_cuda or simulating()


def forward(program: Published, call: Call, differentiable: bool = True) -> Forward:
    """Results of a call with heads first, of contiguous keys. What only a backward pass reads may be empty
    where the result is not `differentiable`."""
    there = on_gpu(call.q)
    if "lse" not in call.statistics:
        call = call._replace(statistics=("lse", *call.statistics))
    if by_flex(program.backend, call.q) and not call.empty:
        return _by_flex(program, call)
    results = _by_engine(program, call) if there and not call.empty else None
    if results is not None:
        out, *statistics = results
        lse, largest, *more = _present(statistics)
        return out, lse, largest, lse.new_empty(0), *more
    from fa4flex.runtime import blockwise

    if there:
        return blockwise.forward_on_gpu(program, call)
    return blockwise.forward(program, call, differentiable)


def _by_engine(program: Published, call: Call) -> Results | None:
    """The results by a kernel; None for dropout, for weights other than the softmax's, and for latent rows
    and wide heads that no kernel computes."""
    engine = program.engine
    if call.latent:
        results = _if_made(program, call._replace(kv=LatentRows(call.kv.k, call.kv.v)))
        if results is not None:
            return results
    if program.facts.softmax:
        needed = program.facts.kept is None and not (call.wide and engine.schedule.tile is None)
        return engine.run(call) if needed or engine.serves(call) else None
    return _if_made(program, call)


def _if_made(program: Published, call: Call) -> Results | None:
    """The results by a kernel; None where there is none."""
    engine = program.engine
    ready = engine.find(call)
    if ready is MISSING:
        try:
            ready = engine.made(call)
        except UnsupportedError:
            ready = None
            engine.keep(call, None)
    results: Results | None = None if ready is None else ready(call)
    return results


def key_mass(program: Published, call: Call, lse: Tensor) -> Tensor | None:
    """Sums of probabilities per key by a kernel, or by tiles on a CPU; None where neither is for it."""
    if not on_gpu(call.q):
        from fa4flex.runtime import blockwise

        return blockwise.key_mass(program, call, lse) if call.q.is_cpu else None
    if call.empty or by_flex(program.backend, call.q) or call.q.dtype not in _OF_KERNELS:
        return None
    return sums_by_kernel(program.engine, call, lse)


_OF_KERNELS = (torch.bfloat16, torch.float16)


def _present(statistics: Sequence[Tensor | None]) -> list[Tensor]:
    """The log-sum-exp and what follows, empty in place of None."""
    lse = statistics[0]
    assert lse is not None
    return [lse.new_empty(0) if x is None else x for x in statistics]


def backward(program: Published, call: Call, gradients: Gradients, needs: Sequence[int]) -> list[Tensor]:
    """[dq, dk, dv, dsinks if there are sinks, then a gradient per operand slot in `needs`]."""
    if by_flex(program.backend, call.q) and not call.empty:
        return _backward_by_flex(program, call, gradients[0], needs)
    if on_gpu(call.q):
        by = _backward_blockwise if call.empty else backward_by_kernels
        return by(program, call, gradients, needs)
    from fa4flex.runtime import blockwise

    return blockwise.backward(program, call, gradients, needs)


def backward_by_kernels(
    program: Published, call: Call, gradients: Gradients, needs: Sequence[int]
) -> list[Tensor]:
    """Gradients of a call on a GPU by kernels where there are some, else blockwise.

    Probabilities are exp(score - lse): where scores are so large that the lse has no digits left for the
    number of keys (some 1e7), rows of equal scores get too large a gradient.
    """
    (dout, *of_rows), (out, lse, *more) = gradients
    dlse, dentropy = (*of_rows, None, None)[:2]
    if dout.dtype == out.dtype == call.q.dtype:
        saved = Saved(out, lse, dout, dlse, dentropy, None if dentropy is None else more[-1])
        result = run_backward(program.engine, call, saved, needs)
        if result is not None:
            return [x for x in (*result[:4], *result.captured) if x is not None]
    return _backward_blockwise(program, call, gradients, needs)


def _backward_blockwise(
    program: Published, call: Call, gradients: Gradients, needs: Sequence[int]
) -> list[Tensor]:
    from fa4flex.runtime import blockwise

    (dout, *of_rows), (out, *statistics) = gradients
    turned = [call.turn(dout), *of_rows], (call.turn(out), *statistics)
    made = blockwise.backward_on_gpu(program, call.turned(), turned, needs)
    return [*map(call.turn, made[:3]), *made[3:]]


# --- by torch's flex_attention ----------------------------------------------------------------------------


def _by_flex(program: Published, call: Call) -> Forward:
    """The results as an operator returns them."""
    with outside(grad=False):
        result, *statistics = program.flex.attend(call)
    output = program.precision.output_dtype(call.q.dtype)
    out = empty_output(call.q, call.kv.v.shape[-1], output).copy_(result)
    lse, largest, *more = (x.contiguous() for x in _present(statistics))
    if call.q.device.type != "cpu":
        return out, lse, largest, lse.new_empty(0), *more
    largest = largest if largest.numel() else lse.clone()
    return out, lse, largest, (lse > -torch.inf).to(lse.dtype), *more


def _backward_by_flex(
    program: Published, call: Call, upstream: Sequence[Tensor], needs: Sequence[int]
) -> list[Tensor]:
    """Gradients by torch's autograd, of a forward pass that is run again: an operator keeps no graph."""
    with outside(grad=True):
        q, k, v = (x.detach().requires_grad_() for x in (call.q, call.kv.k, call.kv.v))
        sinks = None if call.sinks is None else call.sinks.detach().requires_grad_()
        operands = [x.detach().requires_grad_(slot in needs) for slot, x in enumerate(call.operands)]
        statistics = ("lse",) if len(upstream) > 1 else ()
        again = call._replace(
            q=q, kv=Contiguous(k, v), sinks=sinks, operands=tuple(operands), statistics=statistics
        )
        out, lse, *_ = program.flex.attend(again)
        wanted = [x for x in (q, k, v, sinks) if x is not None] + [operands[slot] for slot in needs]
        outputs = [out.to(upstream[0].dtype)] if lse is None else [out.to(upstream[0].dtype), lse]
        return list(torch.autograd.grad(outputs, wanted, list(upstream), materialize_grads=True))


@contextlib.contextmanager
def outside(grad: bool) -> Iterator[None]:
    """Within, torch dispatches as outside of the operator at hand: vmap, which traces mods, and autograd, if
    `grad`, work there alone."""
    with (
        torch.inference_mode(False),
        outside_operators(),
        torch.set_grad_enabled(grad),
    ):
        yield

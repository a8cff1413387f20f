"""Values and gradients of an output function: by kernels, and where there are none in PyTorch operations.

    out[b, h, q, d] = f(x, b, h, q, d)      x = the normalised output, in float32 (float64 for float64)
    dx = dout * df/dx
    dt[index] = sum of dout * df/dt over the elements that read t[index]

The derivatives are those of the expression. Contents decide nothing on the host where x is on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Ragged
from fa4flex.codegen.analyze.facts import Facts, analyze
from fa4flex.codegen.analyze.gradient import ONE, CapturedGradient, plain_index
from fa4flex.codegen.analyze.overflow import fitted
from fa4flex.codegen.evaluate import Captured, PastTheEnd, Value, evaluate
from fa4flex.codegen.expr import Expr, loads
from fa4flex.runtime.cpu.captured import flat_index
from fa4flex.runtime.cuda import output as kernels
from fa4flex.runtime.flex.choice import by_kernels
from fa4flex.runtime.output_call import OutputCall
from fa4flex.runtime.programs import Published


def forward(program: Published, call: OutputCall) -> Tensor:
    """The function of the output, in its dtype and layout. Rows of no sequence stay as they are."""
    by_kernel = kernels.forward(program, call) if by_kernels(call.out) else None
    return _forward(program, call) if by_kernel is None else by_kernel


def _forward(program: Published, call: OutputCall) -> Tensor:
    applied = _Application(program, call)
    (value,) = applied.evaluate([applied.facts.score])
    result = torch.empty_like(call.out)
    result.copy_(torch.as_tensor(value, device=call.out.device))
    return result if applied.valid is None else torch.where(applied.valid, result, call.out)


def backward(program: Published, call: OutputCall, dout: Tensor, needs: Sequence[int]) -> list[Tensor]:
    """[d out before the function, then a gradient per operand slot in `needs`]."""
    by_kernel = kernels.backward(program, call, dout, needs) if by_kernels(call.out) else None
    return _backward(program, call, dout, needs) if by_kernel is None else by_kernel


def _backward(program: Published, call: OutputCall, dout: Tensor, needs: Sequence[int]) -> list[Tensor]:
    applied = _Application(program, call)
    upstream = dout.to(applied.dtype)
    if applied.valid is not None:
        upstream = upstream.masked_fill(~applied.valid, 0)
    gradient = applied.facts.gradient
    dx = upstream
    if gradient.by_score is not ONE:
        (slope,) = applied.evaluate([gradient.by_score])
        dx = applied.shown(upstream * slope)
    if applied.valid is not None:
        dx = torch.where(applied.valid, dx, 0)
    results = [torch.empty_like(call.out).copy_(dx)]
    sums = {slot: _zeros(call.operands[slot]) for slot in needs}
    for term in gradient.of_slots(needs):
        applied.add(term, upstream, sums[term.slot])
    return results + [sums[slot].to(call.operands[slot].dtype) for slot in needs]


def on_host(x: Tensor) -> bool:
    """True if the host may look at the contents: it waits for no device."""
    return x.device.type == "cpu"


def _zeros(operand: Tensor) -> Tensor:
    """Sums of gradients: in float64 on a CPU, where they are added one after the other."""
    dtype = torch.float64 if on_host(operand) or operand.dtype == torch.float64 else torch.float32
    return torch.zeros(operand.shape, dtype=dtype, device=operand.device)


class _Application:
    """The function at the elements of one call."""

    def __init__(self, program: Published, call: OutputCall) -> None:
        self.call, self.device = call, call.out.device
        self.dtype = program.precision.compute_dtype(call.out.dtype)
        self.host = host = on_host(call.out)
        captured = program.captured_of(call.operands, call.scalars)
        self.captured = captured.signed() if host else captured.clamped_reads()
        self.facts = self._fitted(program.facts, captured if host else captured.unread())
        self.axes = _axes(call)
        self.valid: Tensor | None = None
        self.symbols = self._symbols()
        if not host:
            self._refuse_short_tensors()
        self.from_zero = not call.packed and call.positions is None and call.whole[1] == 0
        self.known = self._views()

    def _fitted(self, facts: Facts, captured: Captured) -> Facts:
        (batch, _, rows), (q_len, _, heads) = sizes_of(self.call), self.call.whole
        extents = Ragged(batch, heads, max(rows, q_len), self.call.out.shape[-1])
        (score,) = fitted((facts.score,), extents, captured)
        return facts if score is facts.score else analyze(score, facts.mask)

    def _refuse_short_tensors(self) -> None:
        """Raise PastTheEnd where a batch entry, head or channel has no element in a tensor, by its shape."""
        sizes = dict(zip(self.axes, self.call.out.shape, strict=True))
        for node in loads(self.facts.score):
            table = self.captured.operands[node.value]
            for index, size in zip(node.args, table.shape, strict=False):
                if index.op == "sym" and index.value != "q" and sizes.get(index.value, 0) > size:
                    raise PastTheEnd(table, f"{index} goes up to {sizes[index.value] - 1}", node)

    def _views(self) -> dict[Expr, Value]:
        """Elements whose index is symbols alone, as `gate[b, h, q, kv]`: views instead of reads by index."""
        sizes, results = dict(zip(self.axes, self.call.out.shape, strict=True)), {}
        for node in loads(self.facts.score) if self.from_zero else ():
            table, names = self.captured.operands[node.value], plain_index(node.args)
            if names is None or any(n < sizes[name] for name, n in zip(names, table.shape, strict=True)):
                continue
            cut = table[tuple([slice(sizes[name]) for name in names])]
            turned = cut.permute(sorted(range(len(names)), key=lambda at: self.axes.index(names[at])))
            view = turned[tuple([slice(None) if axis in names else None for axis in self.axes])]
            kinds = {"float": self.dtype, "int": torch.int64, "bool": torch.bool}
            results[node] = view.to(kinds[node.kind])
        return results

    def _symbols(self) -> dict[str, Value]:
        call = self.call
        sizes = dict(zip(self.axes, call.out.shape, strict=True))
        q_len, first_head, heads = call.whole
        symbols: dict[str, Value] = {"score": call.out.to(self.dtype), "num_heads": heads}
        for name, first in (("h", first_head), ("kv", 0)):
            at = torch.arange(first, first + sizes[name], device=self.device)
            symbols[name] = self._along(at, name)
        if call.packed:
            self._rows_of_sequences(symbols)
            return symbols
        symbols["b"] = self._along(torch.arange(sizes["b"], device=self.device), "b")
        at = torch.arange(sizes["q"], device=self.device) if call.positions is None else call.positions.long()
        symbols["q"] = self._along(at, "q")
        used = call.lengths.seqused_q
        symbols["q_len"] = q_len
        if used is not None:
            symbols["q_len"] = length = self._along(used.long(), "b")
            self._only(torch.as_tensor(symbols["q"]) < length)
        return symbols

    def _rows_of_sequences(self, symbols: dict[str, Value]) -> None:
        """Sequence, place and length of each packed row. Those of no sequence are given some that exist."""
        starts, used = self.call.lengths.cu_seqlens_q, self.call.lengths.seqused_q
        assert starts is not None
        starts = starts.long()
        rows = torch.arange(self.call.out.shape[0], device=self.device)
        count = starts.shape[0] - 1
        b = (torch.searchsorted(starts, rows, right=True) - 1).clamp(0, max(count - 1, 0))
        length = starts.diff() if used is None else used.long()
        if not count:
            length, starts = length.new_zeros(1), length.new_zeros(1)
        q = rows - starts[b]
        inside = (q >= 0) & (q < length[b]) & (rows < starts[-1])
        symbols["b"] = self._along(b, "q")
        symbols["q"] = self._along(torch.where(inside, q, 0), "q")
        symbols["q_len"] = self._along(length[b], "q")
        self._only(self._along(inside, "q"))

    def _only(self, inside: Tensor) -> None:
        """Only elements `inside` take part; on a CPU it is looked at whether all do."""
        if not self.host or not bool(inside.all()):
            self.valid = inside

    def _along(self, values: Tensor, axis: str) -> Tensor:
        sizes = [1] * len(self.axes)
        sizes[self.axes.index(axis)] = -1
        return values.view(sizes)

    def evaluate(self, roots: list[Any], more: dict[str, int] | None = None) -> list[Value]:
        symbols = {**self.symbols, **(more or {})}
        return evaluate(roots, symbols, self.captured, self.dtype, self.known)

    def shown(self, x: Tensor) -> Tensor:
        return x.expand(self.call.out.shape)

    # --- gradients of captured tensors ------------------------------------------------------------------

    def add(self, term: CapturedGradient, upstream: Tensor, total: Tensor) -> None:
        """Take in one place where a captured tensor is read."""
        for point in term.points():
            share = upstream
            if term.value is not ONE:
                (value,) = self.evaluate([term.value], point)
                share = self.shown(upstream * value)
                if self.valid is not None:
                    share = torch.where(self.valid, share, 0)
            names = plain_index(term.index)
            if names is not None and self.from_zero:
                self._add_whole(names, share, total)
            else:
                self._add_scattered(term, point, share, total)

    def _add_whole(self, names: tuple[str, ...], share: Tensor, total: Tensor) -> None:
        """Each element of the tensor is read at one value of each of these symbols, in its own order."""
        summed = [at for at, axis in enumerate(self.axes) if axis not in names]
        if summed:
            share = share.sum(summed, dtype=total.dtype)
        kept = [axis for axis in self.axes if axis in names]
        share = share.permute([kept.index(name) for name in names])
        total[tuple([slice(n) for n in share.shape])].add_(share)

    def _add_scattered(
        self, term: CapturedGradient, point: dict[str, int], share: Tensor, total: Tensor
    ) -> None:
        index = [torch.as_tensor(x, device=self.device) for x in self.evaluate(list(term.index), point)]
        place = flat_index(index, total.shape)
        place = place.view((1,) * (share.ndim - place.ndim) + tuple(place.shape))
        constant = [d for d in range(share.ndim) if place.shape[d] == 1 and share.shape[d] != 1]
        if constant:
            share = share.sum(constant, keepdim=True, dtype=total.dtype)
        place, share = place.expand_as(share).flatten(), share.flatten().to(total.dtype)
        flat = total.view(-1)
        if self.host:
            flat.index_add_(0, place, share)
        else:  # where index_add_ adds in any order, and index_put_ sorts first
            flat.index_put_((place,), share, accumulate=True)


def _axes(call: OutputCall) -> tuple[str, ...]:
    """Symbols of the dimensions of the output."""
    if call.packed:
        return "q", "h", "kv"
    return ("b", "h", "q", "kv") if call.heads_first else ("b", "q", "h", "kv")


def sizes_of(call: OutputCall) -> tuple[int, int, int]:
    """Sequences, heads, and rows of the longest sequence, or more."""
    shape, starts = call.out.shape, call.lengths.cu_seqlens_q
    if starts is not None:
        return starts.shape[0] - 1, shape[1], shape[0]
    return (shape[0], shape[1], shape[2]) if call.heads_first else (shape[0], shape[2], shape[1])

"""Kernels of output functions and of their gradients on simulated GPUs: a launch each, at most twice as far
from the oracle as PyTorch operations at that dtype, and nothing outside the tensors is touched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import cumulative
from paged_pools import guarded
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import reference
from fa4flex.codegen.build import bind_output
from fa4flex.errors import InputError
from fa4flex.primitives.output import as_output
from fa4flex.primitives.precision import Precision
from fa4flex.runtime import output_values
from fa4flex.runtime.call import SequenceLengths
from fa4flex.runtime.cuda import output as kernels
from fa4flex.runtime.output import by_operator, program_of
from fa4flex.runtime.output_call import OutputCall
from fa4flex.variants import causal, gated, head_scale

CHIPS = ("sm_90a", "sm_100a")
B, H, S = 2, 3, 5
LENGTHS = (4, 0, 7, 2)
SPARE = 3
"""Packed rows behind the last sequence's."""

Make = Callable[..., Any]
Shape = tuple[int, ...]


def element(gate: Tensor) -> Any:
    return gated(gate)


def rows(gate: Tensor) -> Any:
    return lambda out, b, h, q_idx, d_idx: out * torch.sigmoid(gate[b, h, q_idx])


def heads(scale: Tensor, shift: Tensor) -> Any:
    return lambda out, b, h, q_idx, d_idx: torch.cos(out * scale[h] + shift)


def chained(gate: Tensor, scale: Tensor) -> Any:
    return as_output(gated(gate)) >> head_scale(scale)


def places(slope: Tensor) -> Any:
    """Indices by themselves, and lengths."""

    def mod(out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any, q_len: Any, num_heads: Any) -> Any:
        kept = torch.where((q_idx + d_idx) % 3 == 0, out, out * slope[h])
        return kept + 0.125 * d_idx - q_idx / 4 + q_len - 2 * num_heads + b + (d_idx - q_idx) * 0.0625

    return mod


def turned(gate: Tensor) -> Any:
    return lambda out, b, h, q_idx, d_idx: out * gate[h, q_idx, b, d_idx]


def channels_first(gate: Tensor) -> Any:
    return lambda out, b, h, q_idx, d_idx: out * gate[d_idx, b, q_idx, h]


def queries(gate: Tensor) -> Any:
    return lambda out, b, h, q_idx, d_idx: out * out * gate[q_idx, h]


def two(gate: Tensor, other: Tensor) -> Any:
    return lambda out, b, h, q_idx, d_idx: out * gate[b, h, q_idx, d_idx] + other[b, h, q_idx, d_idx]


@dataclass(frozen=True)
class Case:
    """make: an output function of tensors of `shapes`, given batch entries, heads, rows and channels."""

    make: Make
    shapes: Callable[[int, int, int, int], Sequence[Shape]]
    width: int = 64
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    layout: str = "bhsd"
    kind: str = "dense"
    dtype: torch.dtype = torch.bfloat16
    learned: bool = True
    precision: Precision = Precision()


_FULL = Case(element, lambda b, h, q, d: [(b, h, q, d)])
_ROWS = Case(rows, lambda b, h, q, d: [(b, h, q)])
_HEADS = Case(heads, lambda b, h, q, d: [(h,), ()])
_PLACES = Case(places, lambda b, h, q, d: [(h,)])
CASES = {
    "a gate of elements": _FULL,
    "heads of 72": replace(_FULL, width=72, layout="bshd"),
    "heads of 96": replace(_FULL, width=96, dtype=torch.float16, dtypes=(torch.float16,)),
    "heads of 192": replace(_FULL, width=192),
    "heads of 8": replace(_FULL, width=8, layout="bshd"),
    "heads of 256": replace(_FULL, width=256, dtypes=(torch.float32,)),
    "a float32 gate": replace(_FULL, width=40, dtypes=(torch.float32,)),
    "a gate of rows": replace(_ROWS, width=72, layout="bshd"),
    "a float32 gate of rows": replace(_ROWS, dtypes=(torch.float32,)),
    "heads": replace(_HEADS, width=96),
    "heads, tokens first": replace(_HEADS, layout="bshd"),
    "chained": Case(chained, lambda b, h, q, d: [(b, h, q, d), (h,)]),
    "indices": replace(_PLACES, width=72),
    "indices, tokens first": replace(_PLACES, layout="bshd", dtypes=(torch.float32,)),
    "another order": Case(turned, lambda b, h, q, d: [(h, q, b, d)]),
    "channels first": Case(channels_first, lambda b, h, q, d: [(d, b, q, h)], 72, layout="bshd"),
    "queries and heads": Case(queries, lambda b, h, q, d: [(q, h)], layout="bshd"),
    "a longer tensor": Case(element, lambda b, h, q, d: [(b + 1, h + 2, q + 3, d + 8)]),
    "a longer vector": replace(_HEADS, shapes=lambda b, h, q, d: [(h + 2,), ()]),
    "two gates": Case(two, lambda b, h, q, d: [(b, h, q, d)] * 2, dtypes=(torch.bfloat16, torch.float32)),
    "padded": replace(_FULL, kind="padded"),
    "padded, rows": replace(_ROWS, kind="padded", layout="bshd", width=72),
    "padded, heads": replace(_HEADS, kind="padded"),
    "padded, indices": replace(_PLACES, kind="padded", width=96),
    "packed": replace(_FULL, kind="packed", width=72),
    "packed, rows": replace(_ROWS, kind="packed"),
    "packed, heads": replace(_HEADS, kind="packed", width=192),
    "packed, indices": replace(_PLACES, kind="packed"),
    "packed and used": replace(_FULL, kind="packed and used"),
}


@dataclass(frozen=True)
class Drawn:
    """A call, its upstream gradient, and of each sequence its rows in the tensors: (batch entry or packed
    place, rows that it has)."""

    case: Case
    tensors: list[Tensor]
    program: Any
    call: OutputCall
    dout: Tensor
    sequences: list[tuple[int, int]]

    @property
    def needs(self) -> list[int]:
        return list(range(len(self.tensors))) if self.case.learned else []

    def by(self, forward: Any, backward: Any) -> list[Tensor]:
        return [forward(self.program, self.call), *backward(self.program, self.call, self.dout, self.needs)]

    def in_pytorch(self) -> list[Tensor]:
        return self.by(output_values._forward, output_values._backward)

    def exact(self) -> list[Tensor]:
        """y, dx and gradients of captured tensors in float64: each sequence by itself."""
        leaves = [x.double().requires_grad_() for x in (self.call.out, *self.tensors)]
        mod = as_output(self.case.make(*leaves[1:]))
        x, packed = leaves[0], self.call.packed
        turned = x if packed or self.call.heads_first else x.transpose(1, 2)
        weight = self.dout.double() if packed or self.call.heads_first else self.dout.double().transpose(1, 2)
        result, total = turned.detach().clone(), torch.zeros((), dtype=torch.float64)
        for n, (first, count) in enumerate(self.sequences):
            where: Any = slice(first, first + count) if packed else (n, slice(None), slice(0, count))
            part = turned[where].transpose(0, 1)[None] if packed else turned[where][None]
            value = reference.modified_output(part, reference.of_sequence(mod, n, 1))[0]
            value = value.transpose(0, 1) if packed else value
            result[where] = value.detach()
            total = total + (value * weight[where]).sum()
        gradients = torch.autograd.grad(total, leaves)
        return [result if packed or self.call.heads_first else result.transpose(1, 2), *gradients]


def drawn(case: Case) -> Drawn:
    packed, count = case.kind.startswith("packed"), len(LENGTHS) if case.kind != "dense" else B
    longest = max(LENGTHS) if case.kind != "dense" else S
    used = torch.tensor([max(n - 1, 0) for n in LENGTHS], dtype=torch.int32)
    starts = None
    if packed:
        starts = cumulative(list(LENGTHS))
        shape: Shape = (sum(LENGTHS) + SPARE, H, case.width)
    else:
        shape = (count, H, longest, case.width) if case.layout == "bhsd" else (count, longest, H, case.width)
    kept = list(LENGTHS) if case.kind == "packed" else used.tolist()
    lengths = SequenceLengths(starts, None, None if case.kind in ("dense", "packed") else used)
    first = starts.tolist()[:-1] if starts is not None else [0] * count
    sequences = list(zip(first, kept if case.kind != "dense" else [S] * count, strict=True))
    shapes = case.shapes(count, H, longest, case.width)
    dtypes = case.dtypes * (len(shapes) if len(case.dtypes) == 1 else 1)
    tensors = [guarded((4 * torch.randn(s)).to(dtype)) for s, dtype in zip(shapes, dtypes, strict=True)]
    bound = bind_output(as_output(case.make(*tensors)))
    out, dout = (guarded(torch.randn(*shape).to(case.dtype)) for _ in range(2))
    program = program_of(bound, case.precision)
    operands = bound.trace.tensors(bound.bases)
    order = [next(i for i, x in enumerate(operands) if x is tensor) for tensor in tensors]
    assert order == sorted(order)
    whole = (longest if not packed else shape[0]), 0, H
    call = OutputCall(out, operands, lengths, None, whole, bound.scalars, case.layout == "bhsd")
    return Drawn(case, tensors, program, call, dout, sequences)


def near(found: Tensor, plain: Tensor, true: Tensor) -> None:
    mine, theirs = ((x.double() - true).abs().max() for x in (found, plain))
    assert found.dtype == plain.dtype and found.shape == plain.shape
    assert mine <= 2 * theirs + 1e-6 * true.abs().max(), f"{mine} where PyTorch has {theirs}"


@contextlib.contextmanager
def by_kernels(chip: str) -> Iterator[Any]:
    """A simulated GPU on which PyTorch operations fail."""
    patch = pytest.MonkeyPatch()
    for name in ("_forward", "_backward"):
        patch.setattr(output_values, name, None)
    try:
        with ptxsim.device(chip, sms=2) as gpu:
            yield gpu
    finally:
        patch.undo()
    assert not gpu.findings, gpu.report()


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", CASES)
def test_a_launch_for_each_pass(name: str, chip: str, seed: int) -> None:
    given = drawn(CASES[name])
    plain, exact = given.in_pytorch(), given.exact()
    with by_kernels(chip) as gpu:
        found = given.by(output_values.forward, output_values.backward)
    assert ["OutputFunction" in x.kernel for x in gpu.results] == [True, False]
    for mine, theirs, true in zip(found, plain, exact, strict=True):
        near(mine, theirs, true)
    assert found[0].stride() == found[1].stride() == given.call.out.stride()


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("case", [_FULL, _ROWS, _HEADS], ids=["elements", "rows", "heads"])
def test_rows_and_heads_of_a_larger_whole(case: Case, wide: bool, chip: str, seed: int) -> None:
    """Rows have positions, and heads begin with another than the first; shifts of all heads are sums."""
    given, kept = drawn(case), torch.tensor([1, 2, 4], dtype=torch.int64 if wide else torch.int32)
    x, dout = (one[:, 1:3, kept.long()].contiguous() for one in (given.call.out, given.dout))
    part = given.call._replace(out=x, positions=kept, whole=(S, 1, H))
    needs = [1] if case is _HEADS else [0]
    plain = (
        output_values._forward(given.program, part),
        output_values._backward(given.program, part, dout, needs),
    )
    leaf = given.tensors[needs[0]].double().requires_grad_()
    others = [t.double() for t in given.tensors]
    others[needs[0]] = leaf
    before = given.call.out.double().requires_grad_()
    value = reference.modified_output(before, as_output(case.make(*others)))[:, 1:3, kept.long()]
    dx, dt = torch.autograd.grad((value * dout.double()).sum(), (before, leaf))
    with by_kernels(chip) as gpu:
        y = output_values.forward(given.program, part)
        found = output_values.backward(given.program, part, dout, needs)
    assert len(gpu.results) == 2
    near(y, plain[0], value.detach())
    near(found[0], plain[1][0], dx[:, 1:3, kept.long()])
    near(found[1], plain[1][1], dt)


def test_rows_of_no_sequence_stay_as_they_are(seed: int) -> None:
    """Whatever the function makes of them; and their gradients are 0."""
    given = drawn(replace(CASES["padded"], make=lambda gate: lambda out, b, h, q, d: out / gate[b, h, q, d]))
    for n, (_, count) in enumerate(given.sequences):
        given.tensors[0][n, :, count:] = 0
    with by_kernels("sm_90a"):
        y, dx, dgate = given.by(output_values.forward, output_values.backward)
    for n, (_, count) in enumerate(given.sequences):
        assert torch.equal(y[n, :, count:], given.call.out[n, :, count:])
        assert not dx[n, :, count:].any() and not dgate[n, :, count:].any()
        assert y[n, :, :count].isfinite().all() and dgate[n, :, :count].any() == (count > 0)


def test_a_gate_that_ends_before_a_sequence(seed: int) -> None:
    """Rows of packed sequences, whose lengths the host does not know, read the last element, and write none
    past it."""
    given = drawn(replace(CASES["packed"], shapes=lambda b, h, q, d: [(b, h, q - 2, d)]))
    with by_kernels("sm_90a"):
        given.by(output_values.forward, output_values.backward)


# --- what PyTorch operations compute ---------------------------------------------------------------------


def scattered(table: Tensor) -> Any:
    return lambda out, b, h, q_idx, d_idx: out * table[(3 * q_idx + d_idx) % 7]


def channels(weight: Tensor) -> Any:
    return lambda out, b, h, q_idx, d_idx: out * weight[h, d_idx]


def summed(table: Tensor) -> Any:
    return lambda out, b, h, q_idx, d_idx: out * table[h, torch.arange(3)].sum()


def counted(table: Tensor) -> Any:
    """Numbers that 32 bits do not hold."""
    return lambda out, b, h, q_idx, d_idx: out * ((table[h] + (1 << 40)) >> 40)


def twice(table: Tensor) -> Any:
    return lambda out, b, h, q_idx, d_idx: out * table[h] + table[h % 2]


OTHERS = {
    "scattered reads": (Case(scattered, lambda b, h, q, d: [(7,)]), True),
    "weights of channels": (Case(channels, lambda b, h, q, d: [(h, d)]), True),
    "read twice": (Case(twice, lambda b, h, q, d: [(h,)]), True),
    "sums": (Case(summed, lambda b, h, q, d: [(h, 3)]), False),
    "float32 outputs": (replace(_FULL, dtype=torch.float32), False),
    "heads of 60": (replace(_FULL, width=60), False),
    "heads of 584": (replace(_FULL, width=584), False),
    "a float64 gate": (replace(_FULL, dtypes=(torch.float64,)), False),
    "a table of numbers": (
        Case(counted, lambda b, h, q, d: [(h,)], dtypes=(torch.int64,), learned=False), False,
    ),
    "arithmetic in float64": (replace(_FULL, precision=Precision("float64")), False),
    "batch entries of packed sequences": (
        Case(lambda t: lambda out, b, h, q, d: out * t[b], lambda b, h, q, d: [(b,)], kind="packed"), True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_kernel(name: str, seed: int) -> None:
    """PyTorch operations compute it, or of both passes the one without a kernel."""
    case, forward = OTHERS[name]
    given = drawn(case)
    plain = given.in_pytorch()
    with ptxsim.device("sm_90a", sms=2) as gpu:
        found = given.by(output_values.forward, output_values.backward)
    assert ["OutputFunction" in x.kernel for x in gpu.results] == [True] * forward
    for mine, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_gate_without_an_element_is_told(seed: int) -> None:
    given = drawn(replace(_FULL, shapes=lambda b, h, q, d: [(b, h - 1, q, d)]))
    with ptxsim.device("sm_90a"), pytest.raises(InputError, match="read past"):
        output_values.forward(given.program, given.call)


# --- what is kept ----------------------------------------------------------------------------------------


def test_calls_that_change(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is that of its own tensors, whatever came before: other layouts, strides, addresses, dtypes,
    numbers and lengths."""
    given = drawn(replace(_FULL, width=64))
    x, gate = given.call.out, given.call.operands[0]
    wide = torch.randn(B, H, S, 72).bfloat16()
    calls = [
        given.call,
        given.call._replace(operands=(gate.float(),)),
        given.call._replace(out=x.transpose(1, 2).contiguous().transpose(1, 2)),
        given.call._replace(operands=(wide[..., 1:65],)),
        given.call._replace(operands=(gate.transpose(1, 2).contiguous().transpose(1, 2),)),
        given.call._replace(lengths=SequenceLengths(None, None, torch.tensor([2, 5]))),
        given.call._replace(lengths=SequenceLengths(None, None, torch.tensor([4, 1], dtype=torch.int32))),
        given.call._replace(out=wide[..., 8:], whole=(S, 0, H)),
        given.call._replace(out=x[:, :, :3], whole=(3, 0, H)),
    ]
    monkeypatch.setattr(kernels, "_known", {})
    for i in [0, *torch.randint(len(calls), (30,)).tolist(), *range(len(calls))]:
        call = calls[i]
        dout = torch.randn(call.out.shape).bfloat16()
        plain = [
            output_values._forward(given.program, call),
            *output_values._backward(given.program, call, dout, [0]),
        ]
        with by_kernels("sm_90a"):
            found = [
                output_values.forward(given.program, call),
                *output_values.backward(given.program, call, dout, [0]),
            ]
        for mine, theirs in zip(found, plain, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_numbers_of_calls(seed: int) -> None:
    """A captured number is an argument: one kernel serves all of its values."""
    x = torch.randn(1, 2, 4, 16).bfloat16()

    def scaled(number: float) -> tuple[Any, Any]:
        bound = bind_output(as_output(lambda out, b, h, q_idx, d_idx: out * number + q_idx))
        return program_of(bound, Precision()), bound.scalars

    numbers = (0.5, -2.0, 8.0)
    with by_kernels("sm_90a") as gpu:
        for number in numbers:
            program, scalars = scaled(number)
            call = OutputCall(x, (), SequenceLengths(), None, (4, 0, 2), scalars, True)
            y = output_values.forward(program, call)
            torch.testing.assert_close(y, (x.float() * number + torch.arange(4).view(4, 1)).bfloat16())
    assert len(gpu.results) == 3


def test_whole_numbers_of_calls(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that 32 bits do not hold are left to PyTorch operations, between others that they do."""
    x, table = torch.randn(1, 2, 4, 16).bfloat16(), torch.randn(2)
    monkeypatch.setattr(kernels, "_known", {})

    def call(number: int) -> tuple[Any, OutputCall]:
        bound = bind_output(as_output(lambda out, b, h, q_idx, d_idx: out * table[(h + number) % 2]))
        operands = bound.trace.tensors(bound.bases)
        given = OutputCall(x, operands, SequenceLengths(), None, (4, 0, 2), bound.scalars, True)
        return program_of(bound, Precision()), given

    numbers = (0, 1, (1 << 40) + 1, 3, -1, 1 << 40, 2)
    with ptxsim.device("sm_90a", sms=2) as gpu:
        for number in numbers:
            wanted = x.float() * table.roll(-(number % 2)).view(1, 2, 1, 1)
            torch.testing.assert_close(output_values.forward(*call(number)), wanted.bfloat16())
    assert not gpu.findings and len(gpu.results) == 5


def test_few_launches_are_kept(seed: int) -> None:
    given = drawn(_FULL)
    with by_kernels("sm_90a"):
        for rows in range(1, 4):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kernels, "MOST", 2)
                part = given.call._replace(out=given.call.out[:, :, :rows], whole=(rows, 0, H))
                output_values.forward(given.program, part)
                assert len(kernels._known) <= 2


def test_shapes_share_a_kernel(seed: int) -> None:
    with by_kernels("sm_90a") as gpu:
        compiled = {
            kernels._ready(given.program, given.call, (0,)).launch  # type: ignore[union-attr]
            for given in (drawn(_FULL), drawn(replace(_FULL, shapes=lambda b, h, q, d: [(b, h, q + 1, d)])))
        }
    assert len(compiled) == 1 and not gpu.results


# --- doors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", CHIPS)
def test_the_operators(chip: str, seed: int) -> None:
    """Operators that torch.compile calls make the same launches."""
    given = drawn(CASES["chained"])
    leaves = [x.detach().requires_grad_() for x in (given.call.out, *given.call.operands)]
    call = given.call._replace(out=leaves[0], operands=tuple(leaves[1:]))
    plain = given.in_pytorch()
    with by_kernels(chip) as gpu:
        y = by_operator(given.program, call)
        gradients = torch.autograd.grad(y, leaves, given.dout)
    assert len(gpu.results) == 2
    for mine, theirs in zip((y, *gradients), plain, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_training(chip: str, seed: int) -> None:
    """Both passes of attention launch one kernel more than without an output function."""
    tensors = [torch.randn(1, 2, 70, 64).bfloat16().requires_grad_() for _ in range(4)]

    def launched(**more: Any) -> tuple[int, int]:
        attn = fa4flex.compile(mask=causal, **more)
        with by_kernels(chip) as gpu:
            out = attn(*tensors[:3])
            forward = len(gpu.results)
            torch.autograd.grad(out.sum(), tensors[: 3 + bool(more)])
        return forward, len(gpu.results) - forward

    plain, own = launched(), launched(output_mod=gated(tensors[3]))
    assert own == (plain[0] + 1, plain[1] + 1)


def test_explanations_say_which(seed: int) -> None:
    def said(mod: Any) -> str:
        attn = fa4flex.compile(mask=causal, output_mod=mod)
        return " ".join(str(attn.explain(16, arch="sm_90a")).split())

    gate = torch.randn(1, 2, 16, 128, requires_grad=True)
    table = torch.randn(7, requires_grad=True)
    assert "with gradients, by a kernel of its own in each pass" in said(gated(gate))
    assert "with gradients, by PyTorch operations: an output function with" in said(scattered(table))

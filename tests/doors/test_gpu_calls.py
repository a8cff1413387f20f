"""Decisions about a call on a GPU, without one: proofs, keys, tables, and what reaches the kernel."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import sequences_reference
import torch
from torch import Tensor

import fa4flex
from fa4flex import Schedule
from fa4flex import lower as lower_module
from fa4flex.codegen.analyze.facts import SCORE, analyze
from fa4flex.codegen.analyze.tilemap import PARTIAL
from fa4flex.codegen.analyze.tiles import Shape, tile_map
from fa4flex.codegen.evaluate import Captured, PastTheEnd, evaluate
from fa4flex.codegen.expr import FALSE, Expr, apply, const, load, sym
from fa4flex.compiler.signature import Signature
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.kernels.plan.arguments import BLOCK_TABLES, COUNTERS, SEQUENCES
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import SM90A
from fa4flex.runtime.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.cuda import engine as engine_module
from fa4flex.runtime.cuda.engine import Engine
from fa4flex.runtime.cuda.launches import ready as ready_module
from fa4flex.runtime.cuda.tables import block_tables as block_tables_module
from fa4flex.runtime.cuda.tables.host_tables import (
    BlockTables,
    ragged_maps,
    to_device,
    turns_to_device,
)
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.runtime.layouts import empty_output
from fa4flex.variants import alibi, causal, document, sliding_window

Q, KV, H, B = (sym(name) for name in ("q", "kv", "h", "b"))
CPU = torch.device("cpu")


# --- block tables -------------------------------------------------------------------------------------


def classes(mask: Expr, shape: Shape, captured: Captured, tile: tuple[int, int], b: int, h: int) -> Tensor:
    """Classes of tiles, from a look at every pair: 0 empty, 1 partial, 2 full. A last tile that passes the
    end of the keys is never full: kernels do not look at the end in full tiles."""
    symbols: dict[str, Any] = {"b": b, "h": h, "q_len": shape.q_len, "kv_len": shape.kv_len}
    symbols |= {"q": torch.arange(shape.q_len).view(-1, 1), "kv": torch.arange(shape.kv_len)}
    (value,) = evaluate([mask], symbols | {"num_heads": shape.heads}, captured)
    allowed = torch.as_tensor(value).expand(shape.q_len, shape.kv_len)
    rows = [
        [2 if part.all() and part.shape[1] == tile[1] else int(part.any()) for part in row.split(tile[1], 1)]
        for row in allowed.split(tile[0])
    ]
    return torch.tensor(rows)


def listed(tables: BlockTables, b: int, h: int, like: Tensor) -> Tensor:
    found = torch.zeros_like(like)
    pairs = ((tables.partial_ptr, tables.partial_tiles), (tables.full_ptr, tables.full_tiles))
    for kind, (pointers, tiles) in enumerate(pairs, 1):
        ends = pointers[b, h].tolist()
        assert all(first == last for first, last in ends[len(like) :]), "rows past the end are empty"
        for row in range(len(like)):
            for tile in tiles[slice(*ends[row])].tolist():
                assert not found[row, tile], "a tile is listed twice"
                found[row, tile] = kind
    return found


MASKS = {
    "causal": apply("le", KV, Q),
    "by head": apply("eq", apply("mod", apply("add", Q, KV), const(3)), H),
    "by batch and length": apply(
        "lt", apply("floordiv", apply("sub", sym("kv_len"), KV), const(8)), apply("add", B, const(3))
    ),
    "table": load(0, (B, H, Q, KV), "bool"),
    "nothing": FALSE,
    "near documents": apply(
        "and_",
        apply("eq", load(1, (B, Q), "int"), load(1, (B, KV), "int")),
        apply("lt", apply("sub", Q, KV), const(9)),
    ),
    "a prefix and a window": apply(
        "or_",
        apply("lt", KV, load(2, (B,), "int")),
        apply("and_", apply("le", KV, Q), apply("lt", apply("sub", Q, KV), apply("add", H, const(5)))),
    ),
}


def operands() -> Captured:
    """Captured tensors: a dense table, documents of each batch entry, lengths of prefixes."""
    ids = torch.randint(0, 5, (3, 60)).sort(-1).values
    return Captured((torch.rand(3, 2, 50, 60) < 0.95, ids.to(torch.int32), torch.randint(0, 30, (3,))))


def sides(lengths: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Lengths of queries, and of keys."""
    q_lengths, k_lengths = torch.tensor(lengths).T
    return q_lengths, k_lengths


@pytest.mark.parametrize("name", MASKS)
def test_tables_list_every_tile_once_and_in_its_class(name: str) -> None:
    mask, tile, shape = MASKS[name], (16, 8), Shape(3, 2, 50, 60)
    captured, facts = operands(), analyze(SCORE, mask)
    tables = to_device([tile_map(facts.mask, facts.keys, shape, captured, tile)], shape, CPU)
    for b in range(3):
        for h in range(2):
            expected = classes(mask, shape, captured, tile, b, h)
            assert torch.equal(listed(tables, b, h, expected), expected)
    lengths = [(50, 60), (0, 3), (17, 9)]
    tables = to_device(ragged_maps(facts, 2, captured, tile, sides(lengths)), shape, CPU)
    for b in (0, 2):
        for h in range(2):
            expected = classes(mask, Shape(3, 2, *lengths[b]), captured, tile, b, h)
            assert torch.equal(listed(tables, b, h, expected), expected)
    assert all(x.dtype == torch.int32 and x.stride(-1) == 1 and x.numel() for x in tables if x is not None)


@pytest.mark.parametrize("name", MASKS)
def test_turns_count_the_later_tiles_of_keys(name: str) -> None:
    """Both classes in the order of their tiles of queries; the last tile of keys to visit one adds first."""
    mask, tile, shape = MASKS[name], (16, 8), Shape(3, 2, 50, 60)
    captured, lengths = operands(), [(50, 60), (0, 3), (17, 9)]
    maps = ragged_maps(analyze(SCORE, mask), 2, captured, tile, sides(lengths))
    maps = [one.transposed() for one in maps]
    turns = turns_to_device(maps, shape, CPU)
    for b, h in product((0, 2), range(2)):
        expected = classes(mask, Shape(3, 2, *lengths[b]), captured, tile, b, h).T
        visits, pointers = expected > 0, turns.pointers[b, h].tolist()
        for row in range(len(expected)):
            of_row = slice(*pointers[row])
            entries, ranks = turns.entries[of_row], turns.ranks[of_row].tolist()
            visited = visits[row].nonzero().flatten()
            assert torch.equal(entries // 2, visited.to(torch.int32)), "every tile, in order"
            partial = expected[row, visited] == PARTIAL
            assert torch.equal(entries % 2 == 1, partial | (visited >= lengths[b][0] // 16))
            assert ranks == visits[row + 1 :, visited].sum(0).tolist()
    assert all(x.dtype == torch.int32 and x.stride(-1) == 1 and x.numel() for x in turns)


# --- calls --------------------------------------------------------------------------------------------


WRITTEN = BLOCK_TABLES.names.index("tables")
"""Place of the tables among the arguments of the kernel that makes them."""


class Recorder:
    """Stand-in for compiled kernels: lists the problems that were compiled, and the arguments of launches.
    Those of block tables stand apart: they stay as empty memory is."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.signatures: list[Signature] = []
        self.launches: list[tuple[Any, ...]] = []
        self.tables: list[tuple[Any, ...]] = []

    def compile(self, source: Any, problem: Problem, signature: Signature, arch: str = "sm_90a") -> Any:
        if source.name == "sequences":
            return lengths_kernel(source, signature)
        launches = self.tables if source.name == "block tables" else self.launches
        if launches is self.launches:
            self.problems.append(problem)
            self.signatures.append(signature)
        return type("Kernel", (), {"launch": staticmethod(lambda *given: launches.append(given))})


def lengths_kernel(source: Any, signature: Signature) -> Any:
    """Stand-in for a compiled kernel of lengths: it computes them, and the order of tiles as they come."""

    def launch(*given: Any) -> None:
        arguments = dict(zip(SEQUENCES.names, given, strict=True))
        tokens = arguments["q_len"], arguments["kv_len"]
        sequences_reference.compute(given[:4], given[4:8], tokens)
        if arguments["order"] is not None:
            arguments["order"].copy_(torch.arange(arguments["order"].numel()).view(-1, 2))

    key = f"{source.key} {signature}"
    return type("Kernel", (), {"launch": staticmethod(launch), "key": key})


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    monkeypatch.setattr(lower_module, "compile_kernel", recorder.compile)
    monkeypatch.setattr(lower_module, "compile_ahead", lambda *given: None)
    monkeypatch.setattr(engine_module, "target_of", lambda device: SM90A)
    monkeypatch.setattr(ready_module, "counters", lambda device: torch.zeros(COUNTERS, dtype=torch.int32))
    yield recorder


def inputs(s: int = 300, d: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, heads, s, d, dtype=torch.bfloat16) for heads in (4, 2, 2))
    return q, k, v


def call_of(
    attn: fa4flex.api.Attention,
    qkv: tuple[Tensor, Tensor, Tensor] | None = None,
    lengths: tuple[Tensor | None, ...] = NO_LENGTHS,
    **changes: Any,
) -> tuple[Engine, Call]:
    prepared, (q, k, v) = attn.prepared, qkv or inputs()
    # An engine of its own: equal programs share what is ready, from other tests too.
    published = prepared.engine
    engine = Engine(published.facts, published.schedule, published.precision, published.kinds)
    now = attn._calling()
    operands, scalars = attn.program.tensors(), now.bound.scalars
    given = NO_LENGTHS if lengths is NO_LENGTHS else SequenceLengths(*lengths)
    call = Call(q, Contiguous(k, v), operands, now.sinks, given, scalars, now.scale(q), True, ("lse",))
    return engine, call._replace(**changes)


def test_a_repeated_call_decides_nothing_anew(recorder: Recorder) -> None:
    engine, call = call_of(fa4flex.compile(score_mod=alibi, mask=causal))
    first, second = engine.run(call), engine.run(call)
    assert len(recorder.problems) == 1 and len(recorder.launches) == 2
    assert first[0].shape == call.q.shape and first[1] is not None and first[1].shape == (2, 4, 300)
    assert first[0].data_ptr() != second[0].data_ptr()
    engine.run(call._replace(q=call.q[:, :, :280].contiguous()))
    assert len(recorder.problems) == 1, "nor does one of other lengths"
    engine.run(call._replace(q=call.q[:, :2].contiguous()))
    assert len(recorder.problems) == 2


def mask_form(recorder: Recorder, mask: Callable[..., Any] | None) -> str:
    engine, call = call_of(fa4flex.compile(mask=mask))
    engine.run(call)
    assert (recorder.launches[-1][10] is not None) == (recorder.problems[-1].mask_form == "tables")
    return recorder.problems[-1].mask_form


def test_masks_take_the_cheapest_form_that_is_proved(recorder: Recorder) -> None:
    ids = torch.arange(300) // 50
    assert mask_form(recorder, None) == "none"
    assert mask_form(recorder, causal & sliding_window(64)) == "spans"
    assert mask_form(recorder, document(ids)) == "tables"
    assert mask_form(recorder, lambda b, h, q_idx, kv_idx: kv_idx < ids[q_idx] * 50 + 50) == "spans"
    assert (
        mask_form(recorder, lambda b, h, q_idx, kv_idx: ids.flip(0)[q_idx] == ids.flip(0)[kv_idx]) == "tables"
    )
    assert mask_form(recorder, lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 == 0) == "tables"


def test_ends_of_rows_stand_beside_tables_where_order_is_all_that_they_need(recorder: Recorder) -> None:
    ids, longer = torch.arange(300) // 50, torch.arange(310) // 50
    in_order = document(ids)
    masks: list[tuple[int, Any]] = [
        (1, in_order),
        (1, causal & document(ids.expand(2, -1))),
        (2, in_order | sliding_window(64)),
        (1, lambda b, h, q_idx, kv_idx: longer[q_idx] == longer[kv_idx // 2 + 5]),
        (0, lambda b, h, q_idx, kv_idx: longer[q_idx] == longer[kv_idx - 5]),  # from the end, at first
        (0, lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx + 5]),  # past the end, at last
        (0, lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[(kv_idx * 7) % 300]),
        (0, lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (kv_idx % 3 == 0)),
        (0, lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 == 0),
    ]
    for spans, mask in masks:
        assert mask_form(recorder, mask) == "tables"
        assert recorder.problems[-1].row_ends == spans, mask
        tables = recorder.launches[-1][10]
        assert (tables.row_ends is not None) == (tables.in_order is not None) == (spans > 0)
        if spans:
            assert tables.row_ends.shape == (2 * spans, 2, 4, 300) and tables.in_order.shape == (2, 4)
    engine, call = call_of(
        fa4flex.compile(mask=in_order), lengths=(None, None, None, torch.tensor([300, 7], dtype=torch.int32))
    )
    engine.run(call)
    assert recorder.problems[-1].row_ends == 0, "sequences end where their lengths say"


def test_tables_of_the_host_have_no_ends_that_hold(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs are asked by the kernel if there are more tiles than the device has room for."""
    monkeypatch.setattr(block_tables_module, "MOST_BYTES", 0)
    assert mask_form(recorder, causal & document(torch.arange(300) // 50)) == "tables"
    tables = recorder.launches[-1][10]
    assert not recorder.tables and recorder.problems[-1].row_ends == 1
    assert tables.row_ends.shape == (2, 2, 4, 300) and tables.row_ends.stride(-1) == 1
    assert tables.in_order.shape == (2, 4) and not tables.in_order.any()


def test_changed_contents_decide_nothing_anew(recorder: Recorder) -> None:
    """The same kernel reads tables that a launch before each call looks after."""
    ids = torch.arange(300) // 50
    engine, call = call_of(fa4flex.compile(mask=lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]))
    for change in (lambda: None, lambda: ids.copy_(ids.flip(0)), lambda: ids.add_(1)):
        change()
        engine.run(call)
    engine.run(call._replace(operands=(ids.flip(0),)))
    assert [p.mask_form for p in recorder.problems] == ["tables"]
    assert len(recorder.tables) == 4 and recorder.tables[-1][0][0] is not ids
    made = [given[WRITTEN].partial_ptr.data_ptr() for given in recorder.tables]
    assert made == [given[10].partial_ptr.data_ptr() for given in recorder.launches]
    assert made[0] == made[1] == made[2] != made[3], "memory is kept for where contents lie"


def test_large_integers_are_seen_at_the_first_call(recorder: Recorder) -> None:
    """Sums of captured integers are taken to fit in 32 bits, unless the first of them are seen not to."""
    for most, wide in ((1 << 29, False), (1 << 30, True)):
        at = torch.arange(300)
        at[-1] = most
        mod = lambda score, b, h, q_idx, kv_idx: score * ((at[q_idx] - at[kv_idx]) % 3)  # noqa: B023, E731
        engine, call = call_of(fa4flex.compile(score_mod=mod))
        engine.run(call)
        assert recorder.problems[-1].wide_index == wide


def test_a_learned_bias_may_change_without_a_proof(recorder: Recorder) -> None:
    bias = torch.randn(4, 600)
    mod = lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx - kv_idx + 299]  # noqa: E731
    engine, call = call_of(fa4flex.compile(score_mod=mod))
    engine.run(call)
    bias.add_(1)
    engine.run(call._replace(operands=(bias.clone(),)))
    assert len(recorder.problems) == 1 and recorder.problems[0].in_range
    short = lambda score, b, h, q_idx, kv_idx: score + bias[h, (q_idx - kv_idx).abs() * 3]  # noqa: E731
    engine, call = call_of(fa4flex.compile(score_mod=short))
    engine.run(call)
    assert not recorder.problems[-1].in_range


def test_indices_beyond_32_bits_are_computed_wide(recorder: Recorder) -> None:
    mod = lambda score, b, h, q_idx, kv_idx: score + ((q_idx * 100_000 * kv_idx) % 7)  # noqa: E731
    engine, call = call_of(fa4flex.compile(score_mod=mod))
    engine.run(call)
    assert recorder.problems[-1].wide_index
    mod = lambda score, b, h, q_idx, kv_idx: score + ((q_idx * 100 * kv_idx) % 7)  # noqa: E731
    engine, call = call_of(fa4flex.compile(score_mod=mod))
    engine.run(call)
    assert not recorder.problems[-1].wide_index


def test_what_a_kernel_cannot_read_is_converted(recorder: Recorder) -> None:
    table, scale, sinks = torch.rand(300) > 0.5, torch.tensor(2.0), torch.randn(4, dtype=torch.float64)
    mod = lambda score, b, h, q_idx, kv_idx: torch.where(table[kv_idx], score * scale, score)  # noqa: E731
    _, k, v = inputs()
    crooked = torch.randn(2, 4, 300, 65, dtype=torch.bfloat16)[..., 1:]
    engine, call = call_of(fa4flex.compile(score_mod=mod, sinks=sinks), (crooked, k, v))
    engine.run(call)
    given = dict(zip(engine_arguments(), recorder.launches[-1], strict=True))
    assert given["k"] is k and given["q"] is not crooked and torch.equal(given["q"], crooked)
    assert given["q"].data_ptr() % 16 == 0 and all(s % 8 == 0 for s in given["q"].stride()[:-1])
    assert given["sinks"].dtype == torch.float32
    by_rank = {x.dtype: x.shape for x in given["operands"]}
    assert by_rank == {torch.uint8: torch.Size([300]), torch.float32: torch.Size([1])}
    assert torch.equal(next(x for x in given["operands"] if x.dtype == torch.uint8).bool(), table)


def engine_arguments() -> tuple[str, ...]:
    from fa4flex.kernels.plan.arguments import FORWARD

    return FORWARD.names


def test_kernels_get_corrected_lengths(recorder: Recorder) -> None:
    """int32, whatever was given; contents are read anew after a change, and never by the host."""
    used = torch.tensor([300, 7])
    engine, call = call_of(fa4flex.compile(mask=causal), lengths=(None, None, None, used))
    engine.run(call)
    place = engine_arguments().index("seqused_k")
    first = recorder.launches[-1][place]
    assert recorder.problems[-1].lengths == "used" and first.dtype == torch.int32
    assert first is not used and first.tolist() == [300, 7]
    engine.run(call)
    assert recorder.launches[-1][place] is first
    used.copy_(torch.tensor([301, -8]))
    engine.run(call)
    assert recorder.launches[-1][place].tolist() == [300, 0]


@pytest.mark.parametrize("order", ["auto", "longest_first"])
def test_lengths_of_another_batch_are_refused(recorder: Recorder, order: Any) -> None:
    """A launch serves calls of all batches, and its kernels count sequences by these tensors."""
    used = torch.tensor([300, 7])
    attn = fa4flex.compile(mask=causal, schedule=Schedule(order=order))
    engine, call = call_of(attn, lengths=(None, None, None, used))
    engine.run(call)
    count = len(recorder.launches)
    for batch in (1, 3):
        q, k, v = (x[:1].repeat(batch, 1, 1, 1) for x in (call.q, call.kv.k, call.kv.v))
        with pytest.raises(InputError, match=f"lengths of 2 sequences for a batch of {batch}"):
            engine.run(call._replace(q=q, kv=Contiguous(k, v)))
    assert len(recorder.launches) == count


def test_lengths_of_different_batches_are_refused(recorder: Recorder) -> None:
    """Also where nobody made a Varlen of them, as in an exported graph."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in inputs())
    cu, used = torch.tensor([0, 100, 300], dtype=torch.int32), torch.tensor([50, 60], dtype=torch.int32)
    engine, call = call_of(fa4flex.compile(mask=causal), (q, k, v), (cu, cu, used, used))
    engine.run(call)
    for wrong in ((cu, cu, used[:1], used), (cu, cu, used, used[:1]), (cu, cu[:2], used, used)):
        with pytest.raises(InputError, match="has 1 sequences"):
            engine.run(call._replace(lengths=SequenceLengths(*wrong)))


def test_a_ragged_mask_without_closed_form_has_a_map_per_sequence(recorder: Recorder) -> None:
    cu = torch.tensor([0, 100, 100, 300], dtype=torch.int32)
    mask = lambda b, h, q_idx, kv_idx, kv_len: (kv_len - kv_idx) % 3 == b  # noqa: E731
    q, k, v = (torch.randn(300, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    engine, call = call_of(fa4flex.compile(mask=mask), (q, k, v), (cu, cu, None, None))
    _, lse, _ = engine.run(call)
    assert lse is not None and lse.shape == (4, 300)
    tables = recorder.launches[-1][10]
    assert recorder.problems[-1].lengths == "packed" and tables.partial_ptr.shape[:2] == (3, 4)
    assert tables.partial_ptr.stride(1) == 0
    cu.copy_(torch.tensor([0, 200, 300, 300]))
    engine.run(call)
    assert len(recorder.launches) == len(recorder.tables) == 2 and recorder.launches[-1][10] is tables


def test_the_output_lies_as_q_does() -> None:
    q = torch.empty(2, 5, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    assert empty_output(q, 64, q.dtype).stride() == q.stride()
    assert empty_output(q, 128, q.dtype).transpose(1, 2).is_contiguous()
    one = torch.empty(1, 4, 1, 64).as_strided((1, 4, 1, 64), (3, 64, 7, 1))
    assert all(s % 8 == 0 for s in empty_output(one, 64, torch.bfloat16).stride()[:-1])


def test_what_no_kernel_does_is_refused(recorder: Recorder) -> None:
    engine, call = call_of(fa4flex.compile(schedule=Schedule(tile=(48, 48))))
    with pytest.raises(UnsupportedError, match="tile"):
        engine.run(call)
    engine, call = call_of(fa4flex.compile(), inputs(d=60))
    with pytest.raises(UnsupportedError, match="multiple of 8"):
        engine.run(call)
    slopes = torch.rand(3)
    engine, call = call_of(fa4flex.compile(score_mod=lambda score, b, h, q_idx, kv_idx: score * slopes[h]))
    with pytest.raises(PastTheEnd, match="h goes up to 3"):
        engine.run(call)
    ids = torch.arange(200) // 50
    engine, call = call_of(fa4flex.compile(mask=lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]))
    with pytest.raises(PastTheEnd, match="goes up to 299"):
        engine.run(call)
    assert not recorder.launches


# --- the whole way ------------------------------------------------------------------------------------

COMPILE = """
import sys, time, torch, fa4flex
from fa4flex import lower
from fa4flex.runtime.cuda import engine
from fa4flex.runtime.call import NO_LENGTHS, Call
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.runtime.cuda.engine import make_ready
from fa4flex.kernels.plan.target import SM90A
engine.target_of = lambda device: SM90A
kernels = []
compile_kernel = lower.compile_kernel
lower.compile_kernel = lambda *a: kernels.append(compile_kernel(*a)) or kernels[-1]
attn = fa4flex.compile(mask=fa4flex.variants.sliding_window(100))
q = torch.randn(1, 2, 128, 64, dtype=torch.bfloat16)
scalars = attn.program.scalars
call = Call(q, Contiguous(q, q), (), None, NO_LENGTHS, scalars, 0.125, True, ("lse",))
make_ready(attn.prepared.engine, call)
print(kernels[0].compiled, "cutlass" in sys.modules, kernels[0].seconds)
"""


@pytest.mark.slow
def test_a_second_process_neither_compiles_nor_loads_the_compiler(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FA4FLEX_CACHE_DIR", str(tmp_path / "kernels"))
    runs = [
        subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0].startswith("True True") and runs[1].startswith("False False")
    assert float(runs[1].split()[-1]) < 0.5
    (path,) = (tmp_path / "kernels").iterdir()
    path.write_bytes(path.read_bytes()[:5000])
    again = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=True).stdout
    assert again.startswith("True True")


def test_importing_loads_no_compiler() -> None:
    code = (
        "import sys, fa4flex; fa4flex.compile; print(any(x in sys.modules for x in ('cutlass', 'tvm_ffi')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "False"


def test_the_record_of_a_kernel_is_what_was_compiled() -> None:
    from fa4flex.codegen.emit import emit_forward
    from fa4flex.compiler.inspect import inspect
    from fa4flex.kernels.dispatch import plan_forward

    problem, facts = Problem(64, 64, mask_form="spans"), fa4flex.compile(mask=causal).program.facts
    plan = plan_forward(facts, problem)
    found = inspect(emit_forward(facts, plan), problem)
    assert 0 < found.resources.registers <= 255 and found.resources.spill_bytes == 0
    assert found.resources.shared_bytes == plan.memory.total, "the kernel asks for what the plan lays out"
    assert any(name.startswith("wgmma.mma_async") for name in found.instructions)
    assert found.cubin[:4] == b"\x7fELF"

"""Masks as expressions, and the brute force they are judged by: every element, every tile."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fa4flex.codegen.analyze.intervals import key_intervals
from fa4flex.codegen.analyze.tiles import Shape, TileMap, tile_map
from fa4flex.codegen.evaluate import Captured, evaluate
from fa4flex.codegen.expr import Expr, apply, const, load, reduce, scalar, sym

B, H, Q, KV = (sym(name) for name in ("b", "h", "q", "kv"))
Q_LEN, KV_LEN = sym("q_len"), sym("kv_len")


def op(name: str, *args: Expr | int | float | bool) -> Expr:
    return apply(name, *(a if isinstance(a, Expr) else const(a) for a in args))


def both(*masks: Expr) -> Expr:
    return functools.reduce(lambda a, b: op("and_", a, b), masks)


def either(*masks: Expr) -> Expr:
    return functools.reduce(lambda a, b: op("or_", a, b), masks)


def near(a: Expr, b: Expr, radius: Expr | int) -> Expr:
    return op("le", op("abs", op("sub", a, b)), radius)


def clamp(x: Expr, low: int, high: int) -> Expr:
    return op("minimum", op("maximum", x, low), high)


@dataclass(frozen=True)
class Case:
    name: str
    mask: Expr
    captured: Captured = Captured()
    has_keys: bool = False
    """True if key intervals must be found: the mask is a union of a few of them, if its tables are sorted."""


def dense(mask: Expr, shape: Shape, captured: Captured) -> Tensor:
    """The mask at every element, bool [batch, heads, q_len, kv_len]."""
    symbols = {
        "b": torch.arange(shape.batch)[:, None, None, None] if shape.b is None else shape.b,
        "h": torch.arange(shape.heads)[:, None, None],
        "q": torch.arange(shape.q_len)[:, None],
        "kv": torch.arange(shape.kv_len),
        "q_len": shape.q_len,
        "kv_len": shape.kv_len,
        "num_heads": shape.heads,
    }
    (value,) = evaluate([mask], symbols, captured)
    return torch.as_tensor(value).expand(shape.batch, shape.heads, shape.q_len, shape.kv_len)


def tile_classes(allowed: Tensor, tile: tuple[int, int]) -> Tensor:
    """uint8 [batch, heads, q tiles, kv tiles] from all elements: 0 none, 1 some, 2 all allowed."""
    pad = (0, -allowed.shape[3] % tile[1], 0, -allowed.shape[2] % tile[0])
    some, all_ = (
        torch.nn.functional.pad(allowed.byte(), pad, value=fill)
        .unflatten(3, (-1, tile[1]))
        .unflatten(2, (-1, tile[0]))
        .permute(0, 1, 2, 4, 3, 5)
        .flatten(4)
        for fill in (0, 1)
    )
    return some.amax(-1) + all_.amin(-1)


def check_classes(
    mask: Expr, shape: Shape, captured: Captured, tile: tuple[int, int], allowed: Tensor | None = None
) -> list[TileMap]:
    """Maps with and without key intervals, both found equal to brute force."""
    expected = tile_classes(dense(mask, shape, captured) if allowed is None else allowed, tile)
    found = []
    for keys in {key_intervals(mask), None}:
        tiles = tile_map(mask, keys, shape, captured, tile)
        classes = tiles.classes()
        same = classes.expand_as(expected) == expected
        assert same.all(), (str(mask), shape, tile, keys, (~same).nonzero()[:5].tolist())
        found.append(tiles)
    return found


def morton(x: Expr) -> tuple[Expr, Expr]:
    """Row and column of place x on a 16 x 16 Z-order curve."""

    def every_other_bit(x: Expr) -> Expr:
        bits = [op("shl", op("bitand", op("shr", x, 2 * i), 1), i) for i in range(4)]
        return functools.reduce(lambda a, b: op("bitor", a, b), bits)

    return every_other_bit(op("shr", x, 1)), every_other_bit(x)


def zoo(size: int = 256, heads: int = 3, batch: int = 2) -> list[Case]:
    """Masks of the literature on indices below `size`, with tables drawn from torch's generator."""
    causal = op("ge", Q, KV)
    window = op("lt", op("sub", Q, KV), scalar(0, "int"))
    documents = torch.randint(0, 6, (size,))
    sorted_ids = documents.sort().values.int()
    by_batch = torch.randint(0, 5, (batch, size)).sort(1).values
    same = op("eq", load(0, (Q,), "int"), load(0, (KV,), "int"))
    scalars = (37, 0.5)
    cases = [
        Case("all", const(True), has_keys=True),
        Case("none", const(False), has_keys=True),
        Case("causal", causal, has_keys=True),
        Case("causal, bottom right", op("ge", op("add", Q, op("sub", KV_LEN, Q_LEN)), KV), has_keys=True),
        Case("sliding window", both(causal, window), Captured((), scalars), True),
        Case("symmetric window", near(Q, KV, scalar(0, "int")), Captured((), scalars), True),
        Case("prefix", either(causal, op("lt", KV, 50)), has_keys=True),
        Case(
            "prefix by batch",
            either(causal, op("lt", KV, load(0, (B,), "int"))),
            Captured((torch.tensor([30, 90]),)),
            True,
        ),
        Case("documents", same, Captured((sorted_ids,)), True),
        Case(
            "causal documents in a window", both(same, causal, window), Captured((sorted_ids,), scalars), True
        ),
        Case("documents, not sorted", same, Captured((documents,)), True),
        Case(
            "documents of each batch",
            op("eq", load(0, (B, Q), "int"), load(0, (B, KV), "int")),
            Captured((by_batch,)),
            True,
        ),
        Case("not causal or document", op("not_", either(causal, same)), Captured((sorted_ids,)), True),
        Case("sinks and window", either(op("lt", KV, 4), near(Q, KV, 20)), has_keys=True),
        Case("two touching spans", either(causal, op("gt", KV, Q)), has_keys=True),
        Case(
            "chunked",
            op("eq", op("floordiv", Q, scalar(0, "int")), op("floordiv", KV, scalar(0, "int"))),
            Captured((), scalars),
            True,
        ),
        Case(
            "window by head", near(Q, KV, load(0, (H,), "int")), Captured((torch.tensor([3, 70, 0]),)), True
        ),
        Case("causal in some heads", either(op("ne", H, 1), causal), has_keys=True),
        Case(
            "some rows of another mask",
            either(
                both(op("eq", op("mod", Q, 7), 3), near(Q, KV, 5)), both(op("ne", op("mod", Q, 7), 3), causal)
            ),
            has_keys=True,
        ),
        Case("scattered", op("eq", KV, op("mod", op("mul", Q, 89), size)), has_keys=True),
        Case("dilated", both(near(Q, KV, 60), op("eq", op("mod", op("sub", Q, KV), 3), 0))),
        Case("strided", op("eq", op("mod", KV, 16), 5)),
        Case(
            "float slope",
            op("lt", op("mul", op("sub", Q, KV), 0.37), op("add", scalar(1, "float"), op("to_float", H))),
            Captured((), scalars),
        ),
        Case("hash", op("lt", op("mod", op("bitxor", op("mul", Q, 40503), op("mul", KV, 30011)), 97), 20)),
    ]
    return cases + _grids(size) + _tables(size, heads, batch)


def _grids(size: int) -> list[Case]:
    row_q, column_q, row_kv, column_kv = (op(f, x, 16) for x in (Q, KV) for f in ("floordiv", "mod"))
    radius = 3
    natten_1d = near(clamp(Q, 20, size - 21), KV, 20)
    natten_2d = both(
        near(clamp(row_q, radius, 12), row_kv, radius), near(clamp(column_q, radius, 12), column_kv, radius)
    )
    (my, mx), (ny, nx) = morton(op("mod", Q, 256)), morton(op("mod", KV, 256))
    tile_q, tile_kv = op("floordiv", Q, 24), op("floordiv", KV, 24)
    half = size // 2
    block_q, block_kv = (op("floordiv", op("mod", x, half), 16) for x in (Q, KV))
    clean_q, clean_kv = op("ge", Q, half), op("ge", KV, half)
    diffusion = either(
        both(op("eq", block_q, block_kv), op("eq", clean_q, clean_kv)),
        both(op("gt", block_q, block_kv), clean_kv, op("not_", clean_q)),
        both(op("ge", block_q, block_kv), clean_kv, clean_q),
    )
    disc = op(
        "le",
        op("add", *(op("mul", d, d) for d in (op("sub", row_q, row_kv), op("sub", column_q, column_kv)))),
        20,
    )
    return [
        Case("natten 1-D", natten_1d, has_keys=True),
        Case("natten 2-D", natten_2d),
        Case("morton order", both(near(my, ny, 3), near(mx, nx, 3))),
        Case("sliding tile", near(tile_q, tile_kv, 1), has_keys=True),
        Case("block diffusion", diffusion),
        Case("disc", disc),
    ]


def _tables(size: int, heads: int, batch: int) -> list[Case]:
    nodes = 40
    parent = [0] + [int(torch.randint(0, i, ())) for i in range(1, nodes)]
    ancestor = torch.eye(nodes, dtype=torch.bool)
    for i in range(1, nodes):
        ancestor[i] |= ancestor[parent[i]]
    start = size - nodes
    inside = op("minimum", op("maximum", op("sub", KV, start), 0), nodes - 1)
    row = op("minimum", op("maximum", op("sub", Q, start), 0), nodes - 1)
    tree = either(
        both(op("lt", KV, start), op("ge", Q, KV)), both(op("ge", KV, start), load(0, (row, inside), "bool"))
    )
    blocks = -(-size // 32)
    block_classes = torch.randint(0, 3, (batch, heads, blocks, blocks), dtype=torch.uint8)
    place = load(0, (B, H, op("floordiv", Q, 32), op("floordiv", KV, 32)), "int")
    block_map = either(op("eq", place, 2), both(op("eq", place, 1), op("ge", Q, KV)))
    chosen = torch.randint(0, blocks, (batch, heads, blocks, 3), dtype=torch.int32)
    step = sym("k0")
    vsa = reduce(
        "any", "k0", 3, op("eq", load(0, (B, H, op("floordiv", Q, 32), step), "int"), op("floordiv", KV, 32))
    )
    marks = torch.rand(size) < 0.02
    globals_ = either(near(Q, KV, 9), load(0, (Q,), "bool"), load(0, (KV,), "bool"))
    distance = torch.randint(0, 4, (size, size), dtype=torch.int16)
    padding = torch.arange(size) < torch.tensor([[size // 2], [size - 9]])
    offsets = torch.tensor([0, 30, 100, 101, size])
    which = torch.bucketize(torch.arange(size), offsets[1:], right=True)
    packed = both(op("le", load(0, (load(1, (Q,), "int"),), "int"), KV), op("ge", Q, KV))
    relative = op("gt", load(0, (op("add", op("sub", Q, KV), size - 1),), "float"), 0.8)
    return [
        Case("tree", tree, Captured((ancestor,))),
        Case("block map", block_map, Captured((block_classes,)), True),
        Case("chosen blocks", vsa, Captured((chosen,)), True),
        Case("global tokens", globals_, Captured((marks,))),
        Case("graph distance", op("le", load(0, (Q, KV), "int"), 1), Captured((distance,)), True),
        Case("padding", load(0, (B, KV), "bool"), Captured((padding,))),
        Case("packed offsets", packed, Captured((offsets, which)), True),
        Case("relative table", relative, Captured((torch.rand(2 * size).sort().values,))),
        Case(
            "counts from the end",
            op("eq", load(0, (op("neg", op("add", KV, 1)),), "int"), 1),
            Captured((torch.randint(0, 2, (size,)),)),
            True,
        ),
    ]

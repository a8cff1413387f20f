"""Every published mask with drawn parameters, and its definition from the papers, with plain loops."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from helpers import cumulative
from torch import Tensor

from fa4flex import variants as v
from fa4flex.primitives.mask import Mask

Pairs = Callable[[int, int, int], bool]


@dataclass(frozen=True)
class Case:
    """A mask with drawn parameters; `allowed(b, q, kv)` is the oracle."""

    mask: Mask
    allowed: Pairs
    q_len: int
    kv_len: int
    batch: int = 1


def by_loops(case: Case) -> Tensor:
    rows = [
        [[case.allowed(b, q, kv) for kv in range(case.kv_len)] for q in range(case.q_len)]
        for b in range(case.batch)
    ]
    return torch.tensor(rows)


def lengths(rng: random.Random) -> tuple[int, int]:
    return rng.randint(1, 20), rng.randint(1, 20)


# --- masks that compare positions: bottom-right ---------------------------------------------------------


def causal(rng: random.Random) -> Case:
    q_len, kv_len = lengths(rng)
    # The last query sees all keys, the one before it all but the last, ...
    return Case(v.causal(), lambda b, q, kv: kv_len - 1 - kv >= q_len - 1 - q, q_len, kv_len)


def sliding_window(rng: random.Random) -> Case:
    (q_len, kv_len), window = lengths(rng), rng.randint(1, 8)

    def oracle(b: int, q: int, kv: int) -> bool:
        keys = [kv_len - q_len + q - back for back in range(window)]
        return kv in keys

    return Case(v.sliding_window(window), oracle, q_len, kv_len)


def symmetric_window(rng: random.Random) -> Case:
    (q_len, kv_len), window = lengths(rng), rng.randint(1, 6)
    return Case(
        v.symmetric_window(window), lambda b, q, kv: abs(q + kv_len - q_len - kv) <= window, q_len, kv_len
    )


def prefix_lm(rng: random.Random) -> Case:
    (q_len, kv_len), prefix = lengths(rng), rng.randint(0, 9)
    return Case(v.prefix_lm(prefix), lambda b, q, kv: kv < prefix or kv <= q + kv_len - q_len, q_len, kv_len)


def prefix_lm_per_batch(rng: random.Random) -> Case:
    (q_len, kv_len), prefixes = lengths(rng), [rng.randint(0, 9) for _ in range(3)]
    mask = v.prefix_lm(torch.tensor(prefixes, dtype=torch.int32))
    return Case(mask, lambda b, q, kv: kv < prefixes[b] or kv <= q + kv_len - q_len, q_len, kv_len, 3)


def dilated_window(rng: random.Random) -> Case:
    (q_len, kv_len), window, dilation = lengths(rng), rng.randint(1, 9), rng.randint(1, 4)

    def oracle(b: int, q: int, kv: int) -> bool:
        position = q + kv_len - q_len
        steps = range(0, window + 1, dilation)
        return any(kv in (position - step, position + step) for step in steps)

    return Case(v.dilated_window(window, dilation), oracle, q_len, kv_len)


def global_window(rng: random.Random) -> Case:
    (q_len, kv_len), window = lengths(rng), rng.randint(1, 4)
    leading = rng.randint(0, 4)

    def oracle(b: int, q: int, kv: int) -> bool:
        p = q + kv_len - q_len
        return abs(p - kv) <= window or kv < leading or 0 <= p < leading

    return Case(v.global_window(window, leading), oracle, q_len, kv_len)


def global_window_marked(rng: random.Random) -> Case:
    (q_len, kv_len), window = lengths(rng), rng.randint(1, 4)
    chosen = {i for i in range(kv_len) if rng.random() < 0.3}
    marked = torch.tensor([i in chosen for i in range(kv_len)])

    def oracle(b: int, q: int, kv: int) -> bool:
        p = q + kv_len - q_len
        return abs(p - kv) <= window or kv in chosen or p in chosen

    return Case(v.global_window(window, marked), oracle, q_len, kv_len)


def streaming_llm(rng: random.Random) -> Case:
    (q_len, kv_len), sinks, window = lengths(rng), rng.randint(0, 4), rng.randint(1, 6)

    def oracle(b: int, q: int, kv: int) -> bool:
        p = q + kv_len - q_len
        cache = set(range(min(sinks, p + 1))) | {p - i for i in range(window)}
        return kv in cache

    return Case(v.streaming_llm(sinks, window), oracle, q_len, kv_len)


def chunked_local(rng: random.Random) -> Case:
    (q_len, kv_len), chunk = lengths(rng), rng.randint(1, 7)

    def oracle(b: int, q: int, kv: int) -> bool:
        p = q + kv_len - q_len
        return kv <= p and math.floor(kv / chunk) == math.floor(p / chunk)

    return Case(v.chunked_local(chunk), oracle, q_len, kv_len)


# --- masks over absolute indices ------------------------------------------------------------------------


def drawn_lengths(rng: random.Random) -> list[int]:
    return [rng.randint(0, 5) for _ in range(rng.randint(1, 5))] + [rng.randint(1, 5)]


def owners(sizes: list[int]) -> list[int]:
    return [i for i, size in enumerate(sizes) for _ in range(size)]


def document_ids(rng: random.Random) -> Case:
    ids = [rng.randint(0, 3) for _ in range(15)]
    return Case(v.document(torch.tensor(ids)), lambda b, q, kv: ids[q] == ids[kv], 15, 15)


def document_batch(rng: random.Random) -> Case:
    ids = [[rng.randint(0, 3) for _ in range(9)] for _ in range(2)]
    return Case(v.document(torch.tensor(ids)), lambda b, q, kv: ids[b][q] == ids[b][kv], 9, 9, 2)


def document_offsets(rng: random.Random) -> Case:
    sizes = drawn_lengths(rng)
    name = rng.choice(["offsets", "cu_seqlens"])
    of = owners(sizes)
    mask = v.document(**{name: cumulative(sizes)})
    return Case(mask, lambda b, q, kv: of[q] == of[kv], len(of), len(of))


def document_two_sides(rng: random.Random) -> Case:
    q_ids, kv_ids = [rng.randint(0, 2) for _ in range(6)], [rng.randint(0, 2) for _ in range(11)]
    mask = v.document(q_ids=torch.tensor(q_ids), kv_ids=torch.tensor(kv_ids))
    return Case(mask, lambda b, q, kv: q_ids[q] == kv_ids[kv], 6, 11)


def bigbird(rng: random.Random) -> Case:
    from fa4flex.variants.bigbird import draw_blocks

    block, reach, leading, count, seed = (
        rng.randint(1, 4),
        rng.randint(0, 2),
        rng.randint(0, 2),
        2,
        rng.randint(0, 9),
    )
    seq_len = rng.randint(8, 30)
    drawn = draw_blocks(math.ceil(seq_len / block), reach, leading, count, seed)

    def oracle(b: int, q: int, kv: int) -> bool:
        rows, columns = q // block, kv // block
        return min(rows, columns) < leading or abs(rows - columns) <= reach or columns in drawn[rows]

    mask = v.bigbird(seq_len, block, 2 * reach + 1, leading, count, seed)
    return Case(mask, oracle, seq_len, seq_len)


def natten_axis(i: int, j: int, size: int, kernel: int, dilation: int, causal: bool) -> bool:
    """The published loop: walk out from i inside its dilation group, shifting at the border."""
    if i % dilation != j % dilation:
        return False
    members = list(range(i % dilation, size, dilation))
    at = members.index(i)
    if causal:
        return j in members[max(0, at - kernel + 1) : at + 1]
    first = at - kernel // 2
    while first < 0:
        first += 1
    while first + kernel > len(members):
        first -= 1
    return j in members[first : first + kernel]


def natten(rng: random.Random) -> Case:
    axes = rng.randint(1, 3)
    causals = tuple(rng.random() < 0.4 for _ in range(axes))
    dilations = tuple(rng.randint(1, 2) for _ in range(axes))
    kernels = tuple(rng.choice([2, 3]) if causals[i] else rng.choice([1, 3]) for i in range(axes))
    canvas = tuple(kernels[i] * dilations[i] + rng.randint(0, 2) for i in range(axes))
    total = math.prod(canvas)

    def split(token: int) -> list[int]:
        place = []
        for size in reversed(canvas):
            token, inner = divmod(token, size)
            place.append(inner)
        return place[::-1]

    def oracle(b: int, q: int, kv: int) -> bool:
        per_axis = zip(split(q), split(kv), canvas, kernels, dilations, causals, strict=True)
        return all(natten_axis(*axis) for axis in per_axis)

    return Case(v.natten(canvas, kernels, dilations, causals), oracle, total, total)


def sliding_tile(rng: random.Random) -> Case:
    axes = rng.choice([2, 3])
    tile = tuple(rng.randint(1, 2) for _ in range(axes))
    tiles = tuple(rng.randint(1, 3) for _ in range(axes))
    windows = tuple(rng.randint(1, n) for n in tiles)
    text = rng.randint(0, 3)
    canvas = tuple(n * t for n, t in zip(tiles, tile, strict=True))
    kernel = tuple(n * t for n, t in zip(windows, tile, strict=True))
    grid = [()]
    for n in tiles:
        grid = [(*place, i) for place in grid for i in range(n)]
    tokens = [place for place in grid for _ in range(math.prod(tile))]

    def oracle(b: int, q: int, kv: int) -> bool:
        if q >= len(tokens) or kv >= len(tokens):
            return True
        for i, j, n, width in zip(tokens[q], tokens[kv], tiles, windows, strict=True):
            first = i - width // 2
            first = 0 if first < 0 else n - width if first + width > n else first
            if not first <= j < first + width:
                return False
        return True

    mask = v.sliding_tile(canvas, kernel, tile, text)
    return Case(mask, oracle, len(tokens) + text, len(tokens) + text)


def block_diffusion(rng: random.Random) -> Case:
    seq_len, block = rng.randint(1, 10), rng.randint(1, 5)

    def oracle(b: int, q: int, kv: int) -> bool:
        q_half, q_at = divmod(q, seq_len)
        kv_half, kv_at = divmod(kv, seq_len)
        q_block, kv_block = q_at // block, kv_at // block
        block_diagonal = q_half == kv_half == 0 and q_block == kv_block
        offset_block_causal = q_half == 0 and kv_half == 1 and q_block > kv_block
        block_causal = q_half == 1 and kv_half == 1 and q_block >= kv_block
        return block_diagonal or offset_block_causal or block_causal

    return Case(v.block_diffusion(seq_len, block), oracle, 2 * seq_len, 2 * seq_len)


def shared_prefix(rng: random.Random) -> Case:
    sizes, prefix_of = [], []
    for _ in range(rng.randint(1, 3)):
        prompt = len(sizes)
        for _ in range(rng.randint(1, 4)):
            sizes.append(rng.randint(1, 4))
            prefix_of.append(prompt)
    of = owners(sizes)

    def oracle(b: int, q: int, kv: int) -> bool:
        return (of[q] == of[kv] and kv <= q) or (of[q] != of[kv] and prefix_of[of[q]] == of[kv])

    return Case(v.shared_prefix(cumulative(sizes), torch.tensor(prefix_of)), oracle, len(of), len(of))


def drawn_tree(rng: random.Random) -> list[int]:
    return [rng.randint(-1, node - 1) for node in range(rng.randint(1, 10))]


def above(parents: list[int], node: int) -> set[int]:
    return set() if node < 0 else {node} | above(parents, parents[node])


def tree(rng: random.Random) -> Case:
    parents, prefix = drawn_tree(rng), rng.randint(0, 4)

    def oracle(b: int, q: int, kv: int) -> bool:
        return kv < prefix or kv - prefix in above(parents, q)

    return Case(v.tree(parents, prefix), oracle, len(parents), prefix + len(parents) + 2)


def tree_per_batch(rng: random.Random) -> Case:
    parents = drawn_tree(rng)
    other = [-1] * len(parents)
    matrices = torch.tensor(
        [
            [[j in above(tree_, i) for j in range(len(parents))] for i in range(len(parents))]
            for tree_ in (parents, other)
        ]
    )
    prefixes = [rng.randint(0, 4) for _ in range(2)]

    def oracle(b: int, q: int, kv: int) -> bool:
        return kv < prefixes[b] or kv - prefixes[b] in above((parents, other)[b], q)

    mask = v.tree(ancestors=matrices, prefix_len=torch.tensor(prefixes))
    return Case(mask, oracle, len(parents), 4 + len(parents), 2)


def checkerboard(rng: random.Random) -> Case:
    block = rng.randint(1, 4)
    q_len, kv_len = lengths(rng)
    return Case(v.checkerboard(block), lambda b, q, kv: (q // block) % 2 == (kv // block) % 2, q_len, kv_len)


def vision_cross(rng: random.Random) -> Case:
    spans = [sorted((rng.randint(0, 9), rng.randint(0, 9))) for _ in range(3)]
    each = rng.randint(1, 3)

    def oracle(b: int, q: int, kv: int) -> bool:
        return q in range(*spans[kv // each])

    return Case(v.vision_cross(torch.tensor(spans), each), oracle, 10, 3 * each)


CASES = [
    causal, sliding_window, symmetric_window, prefix_lm, prefix_lm_per_batch, dilated_window, global_window,
    global_window_marked, streaming_llm, chunked_local, document_ids, document_batch, document_offsets,
    document_two_sides, bigbird, natten, sliding_tile, block_diffusion, shared_prefix, tree, tree_per_batch,
    checkerboard, vision_cross,
]  # fmt: skip

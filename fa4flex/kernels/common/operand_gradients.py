"""Gradients of captured tensors from pairs of a tile of transposed scores, and how they get to memory.

Pairs whose place is the same are added up in registers, as far as it is known which: those of a head, of a
key, of a query, or with the same distance. Only what is left of a tile goes to memory, by reductions there:
sums come in any order. A gradient may have several copies, to be added up afterwards, because memory adds to
one place at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute, select_

from fa4flex.kernels.common.folds import repeated
from fa4flex.kernels.common.fragment import packed
from fa4flex.kernels.common.hooks import At, Share
from fa4flex.kernels.common.transposed import Slab

Values = dict[tuple[int, int], Float32]
"""Values by (row, column) of a tile."""

QUAD, EIGHT = 4, 8
"""A row of an accumulator lies in four lanes, and a column in eight."""

DqStore = Callable[[int, int, Any], None]
"""Takes steps in queries and keys, and 32 bits."""


@dataclass(frozen=True)
class Target:
    """The gradient of one captured tensor: [copies, shape...], and the copy that a warp adds to."""

    gradient: cute.Tensor
    copy: Int32

    def pointer(self, place: Sequence[Any]) -> cute.Pointer:
        """Address of the element at `place`, moved into the tensor: what lies outside is 0 and adds
        nothing."""
        shape = self.gradient.shape[1:]
        index = tuple(
            cutlass.max(cutlass.min(i if isinstance(i, Int64) else Int32(i), n - 1), 0)
            for i, n in zip(place or (0,), shape, strict=True)
        )
        return self.gradient.iterator + cute.crd2idx((self.copy, *index), self.gradient.layout)

    def add(self, place: Sequence[Any], value: Float32) -> None:
        """Adds the value where it is not 0."""
        cute.arch.inline_ptx(
            "{ .reg .pred some; setp.neu.f32 some, {$r1}, 0f00000000; "
            "@some red.relaxed.gpu.global.add.f32 [{$r0}], {$r1}; }",
            read_only_args=[self.pointer(place).toint(), value],
        )

    def writer(self, share: Share, at: At, q: Int32, kv: Int32, guard: bool) -> DqStore:
        """A writer of elements that one pair has for itself, by steps from (q, kv)."""
        place = share.place.element(at.but(q=q, kv=kv))
        base = self.gradient.iterator + cute.crd2idx((self.copy, *place), self.gradient.layout)
        across, along = (self.gradient.stride[1 + axis] for axis in share.axes)

        def write(queries: int, keys: int, value: Float32 | Int32) -> None:
            inside = (q + queries < at.q_len) & (kv + keys < at.kv_len) if guard else Boolean(True)
            cute.arch.inline_ptx(
                "{ .reg .pred inside; setp.ne.b32 inside, {$r2}, 0; @inside st.global.b32 [{$r0}], {$r1}; }",
                read_only_args=[(base + queries * across + keys * along).toint(), value, Int32(inside)],
            )

        return write


def targets(gradients: Sequence[cute.Tensor], number: Int32) -> tuple[Target, ...]:
    """`number` is of the warp among all of a launch."""
    return tuple(Target(x, number % x.shape[0]) for x in gradients)


def sums_of(shares: Sequence[Share]) -> tuple[cute.Tensor, ...]:
    """Registers for what is added up until a head is done: of each thread, or of each of its keys."""
    count = {"uniform": 1, "column": 2}
    return tuple(cute.make_rmem_tensor((count.get(share.rate, 1),), Float32) for share in shares)


@dataclass(frozen=True)
class Collector:
    """The shares of one head and tile of keys. `lane` is of the warp; `sums` are those of sums_of. Elements
    lie in lanes as in an accumulator of a warpgroup's product; key_lanes have a key in common."""

    key_lanes: ClassVar[int] = QUAD

    shares: tuple[Share, ...]
    slab: Slab
    targets: tuple[Target, ...]
    sums: tuple[cute.Tensor, ...]
    lane: Int32

    def begin(self) -> None:
        for x in self.sums:
            x.fill(0.0)

    def early(self, scores: cute.Tensor, q_first: Int32, guard: bool) -> dict[int, Values]:
        """The weights that need scores, which hold q.k here, by share."""
        return {
            i: self.slab.values(share.weight, q_first, guard, scores)
            for i, share in enumerate(self.shares)
            if share.weight is not None and share.weight.scored
        }

    def take(
        self, scaled: bool, ds: cute.Tensor, q_first: Int32, guard: bool, early: dict[int, Values]
    ) -> None:
        """A tile. ds (row, column): gradients of the modified scores, or of the scaled ones."""
        for i, share in enumerate(self.shares):
            if share.scaled == scaled and share.loop:
                self.take_loop(i, share, ds, q_first, guard)
            elif share.scaled == scaled:
                values = self.weighted(share, ds, q_first, guard, early.get(i))
                getattr(self, f"take_{share.rate}")(i, share, values, q_first, guard)

    def take_loop(self, i: int, share: Share, ds: cute.Tensor, q_first: Int32, guard: bool) -> None:
        """Every place of a loop in turn. No register waits for the end of a head: there are too many."""
        places = [] if share.weight is None else list(self.slab.elements(share.weight, q_first, guard))

        def round(n: Int32) -> None:
            indices = []
            for extent in reversed(share.loop):
                indices.append(Int32(n % extent))
                n = n // extent
            loop = tuple(reversed(indices))
            one = replace(self, slab=replace(self.slab, at=self.slab.at.but(loop=loop)))
            weights = {(r, c): share.weight.element(at.but(loop=loop)) for r, c, at in places}
            values = one.weighted(share, ds, q_first, guard, weights)
            self.sums[i].fill(0.0)
            getattr(one, f"take_{share.rate}")(i, share, values, q_first, guard)
            one.finish_share(share, self.sums[i])

        repeated(math.prod(share.loop), round)

    def weighted(
        self, share: Share, ds: cute.Tensor, q_first: Int32, guard: bool, known: Values | None
    ) -> Values:
        places = [(r, c) for c in range(len(self.slab.queries)) for r in range(len(self.slab.keys))]
        values = {place: ds[place] for place in places}
        if share.weight is None:
            return values
        weights = self.slab.values(share.weight, q_first, guard) if known is None else known
        for place in places:
            product = values[place] * weights[place]
            # What the mask hides has the gradient 0, and may have any weight.
            values[place] = select_(values[place] == 0.0, Float32(0.0), product) if guard else product
        return values

    # --- one way of adding up for each rate ---------------------------------------------------------------

    def take_uniform(self, i: int, share: Share, values: Values, q_first: Int32, guard: bool) -> None:
        # Four sums side by side: one after the other, each addition waits for the last.
        parts = [Float32(0.0)] * 4
        for n, value in enumerate(values.values()):
            parts[n % 4] = parts[n % 4] + value
        self.sums[i][0] = self.sums[i][0] + ((parts[0] + parts[1]) + (parts[2] + parts[3]))

    def take_column(self, i: int, share: Share, values: Values, q_first: Int32, guard: bool) -> None:
        for r in range(len(self.slab.keys)):
            total = self.sums[i][r]
            for c in range(len(self.slab.queries)):
                total = total + values[r, c]
            self.sums[i][r] = total

    def take_row(self, i: int, share: Share, values: Values, q_first: Int32, guard: bool) -> None:
        """The eight lanes of a column divide columns among themselves."""
        count = len(self.slab.queries)
        sums = [self.of_keys(values, c) for c in range(count)]
        for distance in (16, 8, 4):
            sums = halved(sums, distance, self.lane)
        first = q_first - self.lane % QUAD * 2
        for n, value in enumerate(sums):
            c = self.lane // QUAD * len(sums) + n
            self.add_to_row(share, first + c // 2 * 8 + self.lane % QUAD * 2 + c % 2, value)

    def of_keys(self, values: Values, c: int) -> Float32:
        total = values[0, c]
        for r in range(1, len(self.slab.keys)):
            total = total + values[r, c]
        return total

    def take_diagonal(self, i: int, share: Share, values: Values, q_first: Int32, guard: bool) -> None:
        """Lane 4 a + b has key a + 8 r and query 8 j + 2 b + i: they are 8 (r - j) + (a - 2 b - i) apart."""
        lowest, sums = self.by_distance(values)
        while len(sums) % QUAD:
            sums.append(Float32(0.0))
        for distance in (1, 2):
            sums = halved(sums, distance, self.lane)
        a, b = self.lane // QUAD, self.lane % QUAD
        first = self.slab.kv_first - a - (q_first - 2 * b)
        skipped = b % 2 * (2 * len(sums)) + b // 2 * len(sums)
        for n, value in enumerate(sums):
            self.add_to_diagonal(share, first + a + 8 * (lowest + skipped + n), value)

    def by_distance(self, values: Values) -> tuple[int, list[Float32]]:
        """(m, sums): of lane 4 a + b, sums[n] belongs to the distance 8 (m + n) + a."""
        mine: dict[tuple[int, int], Float32] = {}
        for (r, c), value in values.items():
            key = self.slab.keys[r] // 8 - self.slab.queries[c] // 8, self.slab.queries[c] % 2
            mine[key] = mine[key] + value if key in mine else value
        lowest = min(m for m, _ in mine) - 1
        sums: dict[int, Float32] = {}
        a, b = self.lane // QUAD, self.lane % QUAD
        for i in range(2):
            source = a + 2 * b + i
            lane, around = source % EIGHT * QUAD + b, source >= EIGHT
            moved = {m: cute.arch.shuffle_sync(x, lane) for (m, which), x in mine.items() if which == i}
            for m in (*sorted(moved), min(moved) - 1):
                here, above = moved.get(m, Float32(0.0)), moved.get(m + 1, Float32(0.0))
                value = select_(around, above, here)
                sums[m] = sums[m] + value if m in sums else value
        return lowest, [sums[m] for m in sorted(sums)]

    def take_pair(self, i: int, share: Share, values: Values, q_first: Int32, guard: bool) -> None:
        for r, c, at in self.slab.elements(share.place, q_first, guard):
            self.add(share, at, values[r, c])

    def take_once(self, i: int, share: Share, values: Values, q_first: Int32, guard: bool) -> None:
        target = self.targets[share.which]
        if target.gradient.element_type.width == 16:
            self.write_pairs(share, target, values, q_first, guard)
            return
        write = target.writer(share, self.slab.at, q_first, self.slab.kv_first, guard)
        for (r, c), value in values.items():
            write(self.slab.queries[c], self.slab.keys[r], value)

    def write_pairs(self, share: Share, target: Target, values: Values, q_first: Int32, guard: bool) -> None:
        """16-bit numbers: 8 x 8 of them, transposed, are two neighbouring keys of one query for each lane."""
        a, b = self.lane // QUAD, self.lane % QUAD
        first = q_first - 2 * b + a, self.slab.kv_first - a + 2 * b
        write = target.writer(share, self.slab.at, *first, guard)
        for j in range(len(self.slab.queries) // 2):
            for r, key in enumerate(self.slab.keys):
                word = packed(values[r, 2 * j], values[r, 2 * j + 1], target.gradient.element_type)
                moved = cute.arch.inline_ptx(
                    "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
                    write_only_types=[Int32],
                    read_only_args=[word],
                )
                write(8 * j, key, moved)

    def add_to_row(self, share: Share, q: Int32, value: Float32) -> None:
        q = cutlass.max(cutlass.min(q, self.slab.at.q_len - 1), Int32(0))
        self.add(share, self.slab.at.but(guard=True, q=q, q_float=q.to(Float32)), value)

    def add_to_diagonal(self, share: Share, offset: Int32, value: Float32) -> None:
        number = offset.to(Float32)
        at = self.slab.at.but(guard=True, offset=offset, offset_float=number)
        self.add(share, at.but(offset_base=offset, offset_base_float=number, offset_step=0), value)

    def add(self, share: Share, at: At, value: Float32) -> None:
        self.targets[share.which].add(share.place.element(at), value)

    # --- at the end of a head -----------------------------------------------------------------------------

    def finish(self) -> None:
        """Writes what was added up over all tiles of queries."""
        for share, total in zip(self.shares, self.sums, strict=True):
            if not share.loop:
                self.finish_share(share, total)

    def finish_share(self, share: Share, total: cute.Tensor) -> None:
        if share.rate == "uniform":
            value = cute.arch.warp_reduction_sum(total[0])
            self.add(share, self.slab.at, select_(self.lane == 0, value, Float32(0.0)))
        if share.rate == "column":
            for r, key in enumerate(self.slab.keys):
                value = self.of_key(total[r])
                kv = cutlass.max(cutlass.min(self.slab.kv_first + key, self.slab.at.kv_len - 1), Int32(0))
                number = kv.to(Float32)
                at = self.slab.at.but(guard=True, kv=kv, kv_float=number, kv_base=kv, kv_step=0)
                self.add(share, at.but(kv_base_float=number), value)

    def of_key(self, total: Float32) -> Float32:
        """The sum over the lanes of a key, in its first one; 0 in the others."""
        if self.key_lanes == 1:
            return total
        total = cute.arch.warp_reduction_sum(total, threads_in_group=self.key_lanes)
        return select_(self.lane % self.key_lanes == 0, total, Float32(0.0))


def halved(values: list[Float32], distance: int, lane: Int32) -> list[Float32]:
    """Sums with the lane `distance` away: the lower lane gets the first half of them, the upper the rest."""
    half = len(values) // 2
    upper = lane // distance % 2 == 1
    found = []
    for low, high in zip(values[:half], values[half:], strict=True):
        given = cute.arch.shuffle_sync_bfly(select_(upper, low, high), offset=distance)
        found.append(select_(upper, high, low) + given)
    return found

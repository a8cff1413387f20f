"""The plan of a Hopper backward kernel. Data only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from fa4flex.kernels.bwd_sm90.config import Config, Split
from fa4flex.kernels.bwd_sm90.cost import backward_units
from fa4flex.kernels.bwd_sm90.pair_topology import pair_topology
from fa4flex.kernels.bwd_sm90.roles import SHARES, barrier_table
from fa4flex.kernels.bwd_sm90.topology import backward_topology
from fa4flex.kernels.fwd_sm90.tiles import pad
from fa4flex.kernels.plan.backward_time import BackwardTime
from fa4flex.kernels.plan.bound import Size
from fa4flex.kernels.plan.candidates import among, least, listed
from fa4flex.kernels.plan.constants import constants_of
from fa4flex.kernels.plan.groups import Groups
from fa4flex.kernels.plan.kernel_time import many
from fa4flex.kernels.plan.memory import NUMBER, Memory, lay_out, tile_bytes
from fa4flex.kernels.plan.pairs import of_one_cta
from fa4flex.kernels.plan.pipeline import EVERY, Checked, Pipeline
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import Request, taking
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.topology import Topology
from fa4flex.kernels.plan.walks import Form

KEYS_APART = 128
"""The widest heads of which warpgroups always have keys of their own."""

TILE = (64, 128)
ROOMY_TILE = (128, 128)
"""Tile where registers hold 128 queries, and operands are read from shared memory less often: narrow heads
without slopes, elements of each pair, or gradients of what is read by query or key, which take more."""

LONG_TILE = (80, 128)
"""Tile where neither mask nor scores take registers, nor gradients of captured tensors: more queries per step
share what a step costs, and operands are read less often. Were registers short, the assembler would let
products wait for each other."""

LATENT = (192, 128)
LATENT_TILE = (32, 128)
LONG_LATENT_TILE = (48, 128)
"""Tiles for heads of 192 and values of 128, where warpgroups have keys of their own too. Besides the sums of
these, registers hold so few queries; the latter where neither scores nor masks take registers."""

SHORT_TILE = TILE
"""Tile of plain scores where longer steps would compute more than they save: the last one has rows past the
end, and under a mask the first ones have rows that see nothing."""

FEW_KEYS = 128
"""Keys of a sequence that one tile holds: the block that has them writes dQ itself."""

FEW_CLEARED = 1536
"""Queries of a sequence up to which blocks clear no sums for later ones where scores are plain, of heads
wider than NARROW: at 512 clearing took 10 us more of 351, at 3,001 9 us less of 355. Where between them it
turns is not measured, and what zeros cost beside additions no figure tells the model. Causal steps are longer
beyond as many queries: then one launch serves both."""

NARROW = 96
"""Widest heads of which nobody has timed that: blocks clear."""

HALF_TILE = (64, 64)
"""Tile where tiles of WHOLE keys are so few that half of the multiprocessors would have none, of heads up to
KEYS_APART: twice as many multiprocessors have shorter steps, of one consumer warpgroup, or of two that share
out columns. Its steps were timed at one size, where half of the chip's L2 cache was asked for: what the model
says of more tiles than these rests on nothing, so they are no candidates there."""

SHARING = 2
"""Blocks that share a multiprocessor where the mask is a map of blocks that usual tiles are too large for and
one warpgroup has all columns: one computes scores under the products of the other."""

WHOLE = 128
"""Keys of other tiles, of which HALF_TILE has half."""

ALONE = 96
"""The widest heads of which one warpgroup has registers for 64 keys and all columns of dQ."""

SHARED_SPLITS = {64: (32, 224), ALONE: (24, 232)}
"""Registers of a thread of blocks that share a multiprocessor, of the producer's warpgroup and a consumer, by
the widest heads: with 24, the warp that writes dQ spills; with 224, the consumer of wide heads does."""

WIDE_TILE = (64, 64)
"""Else, the sums of 64 keys take more registers than a warpgroup has, and warpgroups share out products, or
columns."""

PAIR_TILE = (64, 128)
"""Tile of a pair of CTAs, each of which has a WIDE_TILE."""

PRODUCTS_APART = 192
"""The widest heads of which warpgroups share out products: one has dV and the other dK, each beside V or K in
registers. Were it 0, all heads wider than KEYS_APART would be shared out by columns: a comparison sets it."""

PAIRED = 192
"""The widest heads of which CTAs come in pairs where products are shared out: each then adds half of the
columns of dQ for the keys of both, and the L2 cache takes half of the sums. Were it 0, each would be by
itself: a comparison sets it."""

ROOMY_PRODUCTS = 160
"""The widest heads of which K has room in registers whatever the variant, where products are shared out."""

STAGES = ((2, 2, 2), (2, 2, 1), (2, 1, 1), (1, 1, 1))
"""Tiles of Q, dO and dQ in flight, best first; shared memory decides."""


@dataclass(frozen=True)
class HopperBackwardPlan(Checked):
    """A backward kernel for `problem` on `target`.

    tile         queries per step, and keys per block
    stages       tiles of Q, dO and dQ in flight
    ctas         CTAs of a tile of keys
    stores_dq    a block has all keys of its queries, and a warpgroup its part of their dQ by one product: the
                 warp that would have added it up then stores it
    clears       heads go in sections, and blocks that have tiles of keys of one clear the sums of the next:
                 they are still in the L2 cache when they are added to
    others       tiles that it was chosen among
    """

    target: Target
    problem: Problem
    tile: tuple[int, int]
    head_dim: int
    head_dim_v: int
    stages: tuple[int, int, int]
    ctas: int = 1
    stores_dq: bool = False
    clears: bool = False
    others: tuple[tuple[int, int], ...] = ()

    module: ClassVar[str] = "fa4flex.kernels.bwd_sm90"
    copies: ClassVar[bool] = True

    @property
    def split(self) -> Split:
        width = max(self.head_dim, self.head_dim_v)
        if self._halved:
            return "keys" if width <= ALONE else "columns"
        if self.tile not in (WIDE_TILE, PAIR_TILE) or width <= KEYS_APART:
            return "keys"
        return "columns" if width > PRODUCTS_APART or self.problem.gradients else "products"

    @property
    def _halved(self) -> bool:
        return self.tile == HALF_TILE and max(self.head_dim, self.head_dim_v) <= KEYS_APART

    @property
    def blocks(self) -> int:
        """Blocks that share a multiprocessor."""
        return SHARING if self.problem.blocks and self._halved and self.split == "keys" else 1

    @property
    def _shared_registers(self) -> dict[str, int]:
        """Registers of blocks that share a multiprocessor; others have what configurations begin with."""
        if self.blocks == 1:
            return {}
        width = max(self.head_dim, self.head_dim_v)
        producer, consumer = next(split for most, split in SHARED_SPLITS.items() if width <= most)
        return {"producer_registers": producer, "consumer_registers": consumer}

    @property
    def keeps_k(self) -> bool:
        """True if K has room in registers, beside dV and what scores and masks take."""
        short = self.problem.long_scores or self.problem.mask_form == "tables"
        roomy = not short or max(self.head_dim, self.head_dim_v) <= ROOMY_PRODUCTS
        return self.split == "products" and roomy

    @property
    def persistent(self) -> bool:
        """True if blocks take one tile of keys after another: dK and dV of a tile then leave by the tiles of
        dQ. Where sums are ordered, each tile has a block of its own, except in dense batches without masks
        and captured gradients, which have sums of each tile. It takes registers that long scores need, and
        ragged batches of wide heads; brief weights take few."""
        long = self.problem.long_scores and not (self.problem.brief and self.split == "keys")
        if long or self.split == "columns":
            return False
        plain = self.problem.mask_form == "none" and self.problem.lengths == "dense"
        if self.problem.deterministic and (not plain or self.problem.gradients):
            return False
        if self.split == "products" and (self.ctas > 1 or self.head_dim > ROOMY_PRODUCTS):
            return False
        if self.head_dim > KEYS_APART and self.problem.lengths != "dense":
            return False
        return self.head_dim_v <= self.head_dim

    @property
    def dk_by_ds(self) -> bool:
        """True if dK of persistent blocks leaves by the memory of dS, which is large enough, and of which the
        writer copies nothing. Two stages of dQ take dK and dV together: nobody has to meet for that."""
        (m, n), copies = self.tile, any(adding == "once" for _, adding in self.problem.gradients)
        room = SHARES * m * n >= n * self.head_dim
        return self.persistent and self.split == "keys" and self.stages[2] == 1 and room and not copies

    def may_store_dq(self) -> bool:
        """True if a block that has all keys can write their dQ by one product of each warpgroup."""
        by_keys = self.split == "keys" and (self.head_dim, self.head_dim_v) != LATENT
        return by_keys and self.problem.lengths == "dense" and self.tile[1] >= FEW_KEYS

    def may_clear(self) -> bool:
        """True if blocks can clear sums of dQ for later ones."""
        if self.problem.lengths != "dense" or self._halved or self.problem.mask_form == "none":
            return False
        return self.persistent and self.split == "keys"

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        (m, n), (q_stages, do_stages, dq_stages) = self.tile, self.stages
        size, d, dv = self.problem.itemsize, self.head_dim, self.head_dim_v
        n, config = n // self.ctas, self.config()
        scores = 2 * tile_bytes(m, n, size)
        sizes = {
            "next": NUMBER,
            "lse2": NUMBER * m * q_stages,
            "delta": NUMBER * m * do_stages,
            "q": tile_bytes(m, d, size) * q_stages,
            "dout": tile_bytes(m, dv, size) * do_stages,
            "k": tile_bytes(n, d, size),
            "v": tile_bytes(n, dv, size),
            "k_peer": tile_bytes(n, d // 2, size) * (self.ctas - 1),
            "ds": scores,
            "ds_peer": scores * (self.ctas - 1),
            "p": {"keys": 0, "columns": scores, "products": NUMBER * m * n}[self.split],
            "dq": NUMBER * config.dq_room * config.dq_parts * dq_stages,
        }
        memory = lay_out(sizes, {"k_peer": "v"}, barrier_table(config).count, self.target)
        return replace(memory, capacity=self.target.shared_memory_of(self.blocks))

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        copies = any(adding == "once" for _, adding in self.problem.gradients)
        if self.ctas > 1:
            return pair_topology(self.config(), self.problem.itemsize)
        return backward_topology(self.config(), self.problem.itemsize, copies)

    @property
    def of_one_cta(self) -> Topology:
        """Topology of one CTA."""
        return of_one_cta(self.topology) if self.ctas > 1 else self.topology

    def config(self) -> Config:
        """Configuration of the hand-written kernel."""
        (tile_m, tile_n), (q_stages, do_stages, dq_stages) = self.tile, self.stages
        return Config(
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            depths=self.problem.depths,
            columns=self.problem.head_dim if self.problem.head_dim < self.head_dim else None,
            tile_m=tile_m,
            tile_n=tile_n,
            split=self.split,
            keeps_k=self.keeps_k,
            q_stages=q_stages,
            do_stages=do_stages,
            dq_stages=dq_stages,
            masked=self.problem.mask_form != "none",
            one_body=self.problem.many_reads,
            lengths=self.problem.lengths,
            deterministic=self.problem.deterministic,
            stores_dq=self.stores_dq,
            dk_by_ds=self.dk_by_ds,
            clears=self.clears,
            workers=self.target.multiprocessors * self.blocks if self.persistent else 0,
            ctas=self.ctas,
            blocks=self.blocks,
            **self._shared_registers,
        )

    @cached_property
    def time(self) -> BackwardTime:
        """The model of the time of a call."""
        problem, config = self.problem, self.config()
        return BackwardTime(
            self.target,
            form_of(problem),
            self.tile,
            (problem.head_dim, problem.head_dim_v),
            backward_units(config, self.target),
            in_sections=config.masked or problem.lengths == "packed",
            packed=problem.lengths == "packed",
            sums=not self.stores_dq,
            clears=self.clears,
            ctas=self.ctas,
        )

    def check_resources(self) -> None:
        """PlanError or UnsupportedError unless sums of bytes and barriers, and regions fit."""
        self.memory.check()
        # The kernel has room for what only persistent blocks use.
        self.of_one_cta.check_fits(self.memory, self.target, self.of_one_cta.unused)

    def explain(self, size: Size | None = None) -> str:
        """The plan in words; with a `size`, also what it was chosen among, and what each would take there."""
        config, (q_stages, do_stages, dq_stages) = self.config(), self.stages
        lines = [
            f"backward kernel for {self.target.name} ({self.target.chip}): {self.problem.explain()}",
            f"tile: {self.tile[0]} queries x {self.tile[1]} keys, q and k {self.head_dim} wide, v"
            f" {self.head_dim_v}; Q {q_stages}, dO {do_stages} and dQ {dq_stages} deep",
            f"warpgroups: 1 producer, {config.consumers} consumers of {config.producer_registers} and"
            f" {config.consumer_registers} registers, which share out {_SPLITS[self.split]}",
            f"order: {taking(self.persistent, self.persistent, self.blocks)}",
            *["query heads that share keys: in parts, where tiles of keys are few"] * self.problem.grouped,
            *self._told_of_dq(),
            *self._told_of_candidates(size),
            "shared memory:",
            self.memory.explain(),
            "pipeline (steps are tiles of queries):",
            self.of_one_cta.explain(),
        ]
        return "\n".join(lines)

    def _told_of_dq(self) -> list[str]:
        if self.stores_dq:
            return ["dQ is written by the block that has all of its keys: nothing is cleared, or added up"]
        ordered = "sums of dQ come in one order: each block awaits its turn"
        cleared = "sums of dQ are cleared by the blocks that have the section of heads before"
        return [ordered] * self.problem.deterministic + [cleared] * self.clears

    def _told_of_candidates(self, size: Size | None) -> list[str]:
        if size is None:
            return []
        kv_heads = size.h if size.kv_heads is None else size.kv_heads
        groups = Groups(max(size.h // kv_heads, 1), kv_heads, self.time)
        extents = size.b, size.q_len, size.kv_len
        parts = groups.candidates(*extents) if self.problem.grouped else []
        origin, of_call = constants_of(self.target).origin, groups.sizes(*extents)
        tiles = among(self.others or (self.tile,), _named, lambda tile: self._at(tile).time.predict(of_call))
        lines = listed(tiles, self.tile, origin)
        if parts:
            lines += listed(parts, groups.parts(*extents), origin)[1:]
        return lines

    def _at(self, tile: tuple[int, int]) -> HopperBackwardPlan:
        """The same with another tile; a pair's of its own tile."""
        return self if self.ctas > 1 else replace(self, tile=tile)


def form_of(problem: Problem) -> Form:
    """The pairs that are allowed, as far as a plan knows: keys that are met alike under a mask are those up
    to one that rises with the query."""
    if problem.mask_form == "none":
        return "full"
    return "causal" if problem.met_alike else "other"


def _named(tile: tuple[int, int]) -> str:
    return f"{tile[0]} queries x {tile[1]} keys"


_SPLITS = {"keys": "keys", "columns": "columns of dK and dV", "products": "S, dV and dP, dK"}


def plan_hopper_backward(request: Request) -> HopperBackwardPlan:
    """The plan of the tile that takes least, and the deepest rings that fit."""
    problem, sizes = request.problem, request.sizes
    widths = pad(problem.head_dim), pad(problem.head_dim_v)
    if widths == (160, LATENT[1]):
        widths = LATENT  # dQ', 160 rows, is no whole number of an instruction's 64
    tiles = _tiles(request, *widths)
    offered = tuple(dict.fromkeys((*tiles, *_untried(request, tiles))))
    plans = [replace(_of_tile(request, tile, widths), others=offered) for tile in tiles]
    if len(plans) == 1:
        return plans[0]
    error = constants_of(request.target).backward.error
    # Windows and the like have diagonals, too: steps past them are more like causal ones than like none.
    times = [replace(one.time, form="causal") if one.time.form == "other" else one.time for one in plans]

    def decide(q_len: int) -> int:
        size = many(sizes.heads, 1, q_len)  # as if each had keys of its own: groups may come in parts
        return least([one.predict(size).seconds for one in times], error)

    return plans[sizes.chosen(decide, len(plans))]


def _of_tile(request: Request, tile: tuple[int, int], widths: tuple[int, int]) -> HopperBackwardPlan:
    problem, target, sizes = request.problem, request.target, request.sizes
    ctas = _ctas(problem, tile, *widths)
    tile = PAIR_TILE if ctas > 1 else tile
    plan = HopperBackwardPlan(target, problem, tile, *widths, STAGES[0], ctas)
    stores = plan.may_store_dq() and _one_tile(sizes)
    clears = plan.may_clear() and not stores and not _few_cleared(problem, sizes)
    plan = replace(plan, stores_dq=stores, clears=clears)
    plans = [replace(plan, stages=stages) for stages in STAGES]
    return next((p for p in plans if p.memory.total <= p.memory.capacity), plans[-1])


def _ctas(problem: Problem, tile: tuple[int, int], width: int, width_v: int) -> int:
    """CTAs that take a tile of keys together."""
    wide = tile == WIDE_TILE and max(width, width_v) > KEYS_APART
    if not wide or problem.gradients:
        return 1
    # Half of the columns of K must have room where V was.
    fits = width // 2 <= width_v
    return 2 if fits and max(width, width_v) <= min(PAIRED, PRODUCTS_APART) else 1


def _tiles(request: Request, width: int, width_v: int) -> tuple[tuple[int, int], ...]:
    """The tiles that a problem is planned with, those first that were measured most. A kernel's registers
    leave one in most cases."""
    problem = request.problem
    few = problem.brief and max(width, width_v) <= KEYS_APART
    long = (problem.long_scores and not few) or problem.long_masks or problem.gradients
    # The rows of packed sequences begin at multiples of ROW_BLOCK, which is no whole number of long steps.
    roomy = not long and problem.lengths == "dense" and problem.mask_form != "tables"
    if (width, width_v) == LATENT and not problem.gradients:
        return (LONG_LATENT_TILE if roomy else LATENT_TILE,)
    if max(width, width_v) > KEYS_APART:
        return (WIDE_TILE,)
    if problem.dropout or problem.weights == "softpick":
        return (TILE,)
    if problem.blocks or _few_tiles(request):
        return (HALF_TILE,)
    if (problem.sloped and not few) or problem.pair_reads or (problem.gradients and problem.long_scores):
        return (TILE,)
    if max(width, width_v) <= 64:
        return (ROOMY_TILE,)
    if not roomy or width != KEYS_APART or problem.mask_form == "spans":
        return (TILE,)
    # A block that writes dQ itself has no product for dQ that is transposed.
    return (SHORT_TILE,) if _one_tile(request.sizes) else (LONG_TILE, SHORT_TILE)


def _untried(request: Request, tiles: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Tiles that kernels have beside these, for problems of which nobody has timed them: explanations and
    benchmarks/choice_regret.py have them among the candidates, plans do not."""
    problem = request.problem
    if max(problem.head_dim, problem.head_dim_v) > KEYS_APART or problem.lengths != "dense":
        return ()
    return tuple(tile for tile in (TILE, HALF_TILE) if tile not in tiles)


def _few_tiles(request: Request) -> bool:
    """True if no block has all keys, and tiles of WHOLE keys would leave half of the multiprocessors idle.
    Shapes alone tell how many there are where lengths are dense."""
    sizes = request.sizes
    if request.problem.lengths != "dense" or _one_tile(sizes):
        return False
    most = request.target.multiprocessors // 2 // max(sizes.heads, 1)
    return sizes.tiles(WHOLE).at_most(most, right="any")


def _one_tile(sizes: Sizes) -> bool:
    """True if a block has all keys. Kernels whose blocks share them are right for so few, too."""
    return sizes.kv.at_most(FEW_KEYS, right="no")


def _few_cleared(problem: Problem, sizes: Sizes) -> bool:
    """True if scores are plain, and queries so few that clearing takes longer than it saves."""
    slow = (problem.sloped or problem.long_scores) and not problem.brief
    long = slow or problem.pair_reads or problem.long_masks
    wide = NARROW < max(problem.head_dim, problem.head_dim_v) <= KEYS_APART
    return not long and wide and sizes.q.at_most(FEW_CLEARED, right="any")


def accepts(problem: Problem, target: Target, sizes: Sizes) -> bool:
    """True for all problems on Hopper, but dropout, gradients of the entropy and softpick in heads so wide
    that warpgroups share out something else than keys: what makes dS' there sees neither the logarithms of P'
    nor the signs of scores. Nor the first two together: dropout makes dS' of P' before the entropy's gradient
    comes in."""
    apart = max(pad(problem.head_dim), pad(problem.head_dim_v)) <= KEYS_APART
    alone = not (problem.dropout and problem.entropy)
    of_scores = problem.dropout or problem.entropy or problem.weights == "softpick"
    return target.family == "sm90" and alone and (apart or not of_scores)


BWD_SM90 = Pipeline(
    "Hopper backward",
    "backward",
    accepts,
    plan_hopper_backward,
    zero_fills=True,
    splits_groups=True,
    drops=True,
    weights=EVERY,
)

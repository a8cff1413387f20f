"""A pipeline: what plans the kernels of one kind, and what such a plan says. Data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from fa4flex.kernels.plan.backward_time import BackwardTime
from fa4flex.kernels.plan.bound import Bound, Size
from fa4flex.kernels.plan.keys import Keys
from fa4flex.kernels.plan.memory import Memory
from fa4flex.kernels.plan.problem import WIDEST, Problem, Weights
from fa4flex.kernels.plan.request import Order
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.splitting import Splitting
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.topology import Topology

EVERY: tuple[Weights, ...] = get_args(Weights)
"""Weights of pipelines whose kernels make any of scores."""

Direction = Literal["forward", "backward", "tangents", "mass", "tables", "sequences", "append", "lists"]

BY_KEYS: frozenset[Direction] = frozenset({"backward", "mass"})
"""Passes whose blocks keep a tile of keys and visit tiles of queries; others the other way round."""


class Plan(Protocol):
    """Everything about a kernel that is decided before any of its code is written."""

    @property
    def module(self) -> str:
        """Import path of the hand-written kernel, below fa4flex.kernels, whose files are part of the key of
        what is compiled: its `config` has the classes of `config()`, its `kernel` the class that hooks go
        into."""
        ...

    @property
    def target(self) -> Target: ...

    @property
    def problem(self) -> Problem: ...

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys that a block multiplies at once."""
        ...

    @property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        ...

    def config(self) -> Any:
        """Configuration of the hand-written kernel."""
        ...

    def check_resources(self) -> None:
        """PlanError or UnsupportedError unless the kernel fits the chip."""
        ...

    def check(self) -> None:
        """PlanError or UnsupportedError unless the plan holds: its resources, and the order of its roles,
        which takes up to a tenth of a second (verify.py)."""
        ...

    def explain(self, size: Size | None = None) -> str:
        """The plan in words; with a `size`, also the time it cannot beat there, where that is known."""
        ...


class ForwardPlan(Plan, Protocol):
    """A forward kernel for `problem` on `target`."""

    @property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        ...

    @property
    def order(self) -> Order:
        """Order of the tiles of queries."""
        ...

    @property
    def packed_heads(self) -> int:
        """Query heads that share a KV head, of which tiles of queries have rows; 1: each head has tiles
        of its own."""
        ...

    @property
    def splitting(self) -> Splitting | None:
        """Number of blocks that share the keys of a tile of queries; None: each has all of them."""
        ...

    @property
    def by_groups(self) -> bool:
        """True if the kernel computes weights for groups of scores."""
        ...

    def bound(self, size: Size) -> Bound:
        """The least time of a launch of this size, and the unit that sets it."""
        ...


class BackwardPlan(Plan, Protocol):
    """A backward kernel for `problem` on `target`. tile: queries per step, and keys per block, or per `ctas`
    of them; head_dim: of the tile that holds rows of q."""

    @property
    def head_dim(self) -> int: ...

    @property
    def ctas(self) -> int:
        """CTAs that have a tile of keys."""
        ...

    @property
    def persistent(self) -> bool:
        """True if blocks take one tile of keys after another."""
        ...

    @property
    def stores_dq(self) -> bool:
        """True if the kernel writes dQ itself, rather than adding to sums of it."""
        ...

    @property
    def clears(self) -> bool:
        """True if the kernel clears most sums of dQ itself, before it adds to them."""
        ...

    @property
    def time(self) -> BackwardTime | None:
        """The model of the time of a call; None where there is none."""
        ...

    @property
    def copies(self) -> bool:
        """True if the kernel copies tiles of dS to gradients of captured tensors that are dS."""
        ...


class Checked:
    """The check that plans with one topology have in common."""

    topology: Any

    @property
    def by_groups(self) -> bool:
        """True if the kernel computes weights for groups of scores, whose logistic function may then depend
        on where they all lie."""
        return False

    def check_resources(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        """PlanError or UnsupportedError unless the plan holds: its resources, and the order of its roles."""
        from fa4flex.kernels.plan.verify import prove  # imported where a kernel is compiled

        self.check_resources()
        prove(self.topology)


@dataclass(frozen=True)
class Pipeline:
    """One kind of kernel.

    name         for people, one of a kind
    direction    the pass that it computes
    accepts      whether it is the one for a problem on a chip, and a call of these sizes, where none before
                 it in the table is
    plan         makes a plan, or raises UnsupportedError in words for what its kernel does not have
    zero_fills   whether a backward kernel writes the zeros of captured gradients in tiles that the mask hides
    splits_groups   whether a backward kernel may take query heads that share keys in parts (groups.py)
    kv_dtype     of the keys and values that it reads, see Problem
    mixes        whether a launch for packed queries has the heads of sequences with few queries packed
    writes_float32  whether its kernel writes an output that is not rounded to 16 bits
    applies_output  whether its kernel has the hook `output`
    drops        whether its kernel has the hook `dropout`, which is of the softmax's weights
    weights      those that its kernel makes of scores
    latent       whether its kernel reads latent rows once, as keys and values, and no others
    widest       columns of the widest heads that its kernel has
    listed       whether its kernel reads the keys that lists select, and no others
    """

    name: str
    direction: Direction
    accepts: Callable[[Problem, Target, Sizes], bool]
    plan: Callable[[Any], Any]
    """ForwardRequest -> ForwardPlan, Request -> BackwardPlan, or that of sums per key."""
    zero_fills: bool = False
    splits_groups: bool = False
    kv_dtype: str = ""
    mixes: bool = False
    writes_float32: bool = False
    applies_output: bool = False
    drops: bool = False
    weights: tuple[Weights, ...] = ("softmax",)
    latent: bool = False
    widest: int = WIDEST
    listed: bool = False

    def reads(self, keys: Keys) -> bool:
        """True if its kernel is for keys of such a source."""
        mine, asked = ((x.latent, x.listed) for x in (self, keys))
        return self.kv_dtype == keys.dtype and mine == asked

"""Traffic of a plan: the bytes of tokens that each rank receives in a forward and in a backward pass.

Exact for tensors that lie as the placement says. What ranks say to agree about shapes, and sums of gradients
of captured tensors, are not counted.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from fa4flex.parallel.exchange import tokens
from fa4flex.parallel.placement import UNEVEN
from fa4flex.parallel.plan import Plan


class Model(NamedTuple):
    """Heads of queries and of keys; head_dim of q and k, and of v; bytes of a number of theirs, and of sums:
    log-sum-exps, and outputs that are merged; batch entries; heads of values, where these are not as many as
    those of keys."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dim_v: int = 128
    size: int = 2
    wide: int = 4
    batch: int = 1
    v_heads: int | None = None

    @property
    def heads_of_values(self) -> int:
        """Number of heads of v."""
        return self.kv_heads if self.v_heads is None else self.v_heads

    @property
    def key(self) -> int:
        """Bytes of a key with its value."""
        return self.batch * (self.kv_heads * self.dim + self.heads_of_values * self.dim_v) * self.size

    @property
    def queries(self) -> int:
        """Numbers of queries, of all heads and batch entries, at each place."""
        return self.batch * self.heads


def by_keys(plan: Plan, rank: int, model: Model) -> tuple[int, int]:
    """Bytes that a rank receives, forward and backward, where keys move."""
    at = plan.exchange
    here, away = (sum(map(tokens, x)) for x in (at.visitors(rank), at.visits(rank)))
    # Keys and visitors come; results of what visits others return.
    visits = here * model.dim * model.size + away * (model.dim_v + 1) * model.wide
    forward = at.received[rank] * model.key + visits * model.queries
    # Gradients of what was sent return. Visitors bring out, lse, and the gradients of both.
    visits = here * 2 * (model.dim_v * model.size + model.wide) + away * model.dim * model.size
    return forward, at.sent[rank] * model.key + visits * model.queries


def by_heads(plan: Plan, rank: int, model: Model) -> tuple[int, int]:
    """Bytes that a rank receives, forward and backward, where tokens go to the ranks of their heads. The
    log-sum-exps are taken to have no gradient."""
    at, ranks = plan.placement, plan.placement.ranks
    queries, keys = tokens(at.queries[rank]), tokens(plan.exchange.held[rank])
    others = at.q_len - queries, at.kv_len - keys
    # Tokens of others for this rank's heads, and its own for all other heads.
    of_q, of_out = (model.queries * dim * model.size for dim in (model.dim, model.dim_v))
    forward = others[0] * of_q + others[1] * model.key
    results = queries * (ranks - 1) * (of_out + model.queries * model.wide)
    gradients = (ranks - 1) * (queries * of_q + keys * model.key)
    return (forward + results) // ranks, (others[0] * of_out + gradients) // ranks


def busiest(plan: Plan, model: Model, moves: str = "keys") -> int:
    """Bytes that the rank receives which receives most, forward and backward. moves: "keys" or "heads"."""
    of_rank = by_heads if moves == "heads" else by_keys
    return max((sum(of_rank(plan, rank, model)) for rank in range(plan.placement.ranks)), default=0)


@lru_cache(maxsize=64)  # nothing makes an answer stale: plans do not change, and are told apart as objects
def heads_move(plan: Plan, model: Model) -> bool:
    """True if all tokens of each rank's heads should be sent: fewer bytes than the keys, or equal work where
    queries are not; False where heads cannot be dealt evenly."""
    ranks = plan.placement.ranks
    if any(n % ranks for n in (model.heads, model.kv_heads, model.heads_of_values)):
        return False
    if (
        plan.placement.imbalance > UNEVEN
    ):  # of few queries with far more keys than others; heads have equal work
        return True
    return busiest(plan, model, "heads") < busiest(plan, model, "keys")

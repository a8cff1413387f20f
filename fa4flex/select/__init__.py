"""Choosing the keys that queries attend to, on the device: pool, score, select.

    scores = select.score(select.pool(q, 64), select.pool(k, 64))      # mean-pooled products
    chosen = select.topk(scores.causal(), 16, first=1, own=1)          # Lists, ascending
    out = fa4flex.compile(mask=causal)(q, k, v, blocks=chosen)

All of it has fixed shapes, and waits for no device: a captured CUDA graph selects anew at each replay. A
selection is a value: several layers may use one, and `within=` selects inside another. Gradients reach
scores, not selections.
"""

from fa4flex.select.choose import mass, threshold, topk
from fa4flex.select.lines import lines
from fa4flex.select.orders import tile_order
from fa4flex.select.pooling import Pooled, pool
from fa4flex.select.scores import Scores
from fa4flex.select.scoring import score

__all__ = ["Pooled", "Scores", "lines", "mass", "pool", "score", "threshold", "tile_order", "topk"]

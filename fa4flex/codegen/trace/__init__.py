"""User function -> Expr: a FlexAttention score_mod or mask_mod, called once on proxies.

    captures = Captures()
    score = trace(score_mod, "score", captures)
    mask = trace(mask_mod, "mask", captures)
    score, mask = captures.finish(score, mask)

`Captures` then lists the tensors and the run-time numbers that the two expressions read, by slot.
"""

from fa4flex.codegen.trace.captures import Captures, Operand
from fa4flex.codegen.trace.dispatch import register_op
from fa4flex.codegen.trace.traced import Pinned, Traced
from fa4flex.codegen.trace.tracer import trace

__all__ = ["Captures", "Operand", "Pinned", "Traced", "register_op", "trace"]

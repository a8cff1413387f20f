"""Keys that `Precision(skip=...)` leaves out of a call, counted in a forward pass of its own."""

from __future__ import annotations

from torch import Tensor

from fa4flex.errors import EarlierError, Fa4flexError, UnsupportedError
from fa4flex.primitives.precision import refuse_codes
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import launch
from fa4flex.runtime.checks import check_descriptions
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.variant import Variant


def skipped(
    variant: Variant, caller: launch.Caller | None, qkv: tuple[Tensor, Tensor, Tensor], varlen: Varlen | None
) -> Tensor:
    """Share of the keys of each query's tiles that the forward pass leaves out. See fa4flex.api.Attention."""
    from fa4flex.runtime import blockwise

    now: launch.Calling | None = None
    try:
        refuse_codes(
            variant.precision, "in skipped()", "leave out qk and pv: codes leave out nearly the same keys"
        )
        if varlen is not None:
            check_descriptions(varlen, None)
        now = launch.calling(variant.shown, caller)
        q, k, v = qkv
        kv = Contiguous(k, v)
        kv.check(q, varlen, now.variant)
        kv.fits(q, varlen)
        call = launch.call_of(now, q, kv, varlen, ("lse",))
        launch.check_call(now, q, kv, varlen, call.operands)
        if q.device.type != "cpu":
            raise UnsupportedError(
                f"the share of keys that a kernel on {q.device} left out",
                "tensors on a CPU: kernels do not count what they leave out",
                "move q, k and v with .cpu(): the rule is the same, tile by tile",
            )
        return blockwise.skipped(now.prepared.program, call.turned())
    except EarlierError:
        raise
    except Fa4flexError as error:
        launch.dress(error, variant, now)
        raise

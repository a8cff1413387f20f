"""After a backward pass over listed keys: sums of dK and dV become gradients in their own dtype."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda
from cutlass import Float32, cute

from fa4flex.kernels.around.postprocess import Postprocess, PostprocessArguments
from fa4flex.kernels.bwd_lists_sm90.arguments import KeyGradientArguments
from fa4flex.kernels.bwd_lists_sm90.config import Config, SumsConfig


class KeyGradients:
    """A launch for each, as of dQ in other passes: keys are its rows."""

    def __init__(self, config: Config) -> None:
        self.of_keys = Postprocess(SumsConfig(config.head_dim))
        self.of_values = Postprocess(SumsConfig(config.head_dim_v))

    @cute.jit
    def __call__(self, arguments: KeyGradientArguments, stream: cuda.CUstream) -> None:
        self.of_keys(_as_rows(arguments.dk_sum, arguments.dk, arguments.scale), stream)
        self.of_values(_as_rows(arguments.dv_sum, arguments.dv, Float32(1.0)), stream)


def _as_rows(sums: cute.Tensor, gradient: cute.Tensor, scale: Float32) -> PostprocessArguments:
    """Packed tokens are rows of one sequence."""
    given: dict[str, Any] = {"dq_sum": sums, "dq": gradient}
    if cute.rank(gradient) == 3:
        one = cute.make_layout(1)
        given = {name: cute.make_tensor(x.iterator, cute.prepend(x.layout, one)) for name, x in given.items()}
    fields = {**dict.fromkeys(PostprocessArguments._fields), **given, "scale": scale}
    return PostprocessArguments(**fields)

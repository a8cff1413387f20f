"""Multi-head latent attention, decompressed: queries and keys are wider than values.

    score = mscale^2 / sqrt(nope + rope) * (q_nope . k_nope + q_rope . k_rope)

Source: DeepSeek-V2, arXiv:2405.04434, sections 2.1.2 and 2.1.3 (nope 128, rope 64, value 128).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.variants._cases import Case, Drawn, Sizes, show_table
from fa4flex.variants._common import finite, whole
from fa4flex.variants.causal import causal


@dataclass(frozen=True)
class Mla:
    """Head dimensions of MLA, and the scale to compile with: fa4flex.compile(scale=mla().scale, ...).

    q, k: [.., nope + rope], the two parts concatenated, k's rope part shared by all heads (expand it);
    v: [.., value]. `mscale` is YaRN's factor on q and on k (arXiv:2309.00071, section 3.4), 1 without YaRN.
    """

    nope: int = 128
    rope: int = 64
    value: int = 128
    mscale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("nope", "rope", "value"):
            whole("mla", name, getattr(self, name))
        finite("mla", "mscale", self.mscale, positive=True)

    @property
    def qk_dim(self) -> int:
        return self.nope + self.rope

    @property
    def scale(self) -> float:
        return self.mscale**2 / math.sqrt(self.qk_dim)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise InputError unless the last dimensions of q, k and v are those of MLA."""
        for name, tensor, dim in (("q", q, self.qk_dim), ("k", k, self.qk_dim), ("v", v, self.value)):
            if tensor.shape[-1] != dim:
                raise InputError(
                    f"{name} with head_dim {tensor.shape[-1]}, {list(tensor.shape)}",
                    f"{dim}" + (f" = nope {self.nope} + rope {self.rope}" if name != "v" else " (value)"),
                    "concatenate the nope and rope parts: torch.cat((nope, rope), -1)"
                    if name != "v"
                    else "decompress v from the latent cache first",
                )


def mla(nope: int = 128, rope: int = 64, value: int = 128, mscale: float = 1.0) -> Mla:
    """The head dimensions of a multi-head latent attention; the defaults are DeepSeek-V2's and V3's."""
    return Mla(nope, rope, value, mscale)


def definition(q: tuple[list[float], list[float]], k: tuple[list[float], list[float]]) -> float:
    """One score from (nope, rope) parts, without YaRN."""
    products = [
        x * y for q_part, k_part in zip(q, k, strict=True) for x, y in zip(q_part, k_part, strict=True)
    ]
    return sum(products) / len(products) ** 0.5


def main() -> None:
    shapes = mla(nope=2, rope=1)
    q, k = ([1.0, 2.0], [3.0]), ([-1.0, 0.5], [2.0])
    joined = sum(x * y for x, y in zip(q[0] + q[1], k[0] + k[1], strict=True)) * shapes.scale
    if not math.isclose(joined, definition(q, k)):
        raise AssertionError(f"{joined} from the joined parts, {definition(q, k)} by definition")
    show_table([("qk_dim", "v_dim", "scale"), (mla().qk_dim, mla().value, mla().scale)])


def _of(s: Sizes, shapes: Mla) -> Drawn:
    composition = {"scale": shapes.scale, "mask": causal}
    dims = shapes.qk_dim, shapes.value
    return Drawn(lambda: composition, None, s.q_len, s.kv_len, dims=dims)


CASES = (Case(lambda s: _of(s, mla())), Case(lambda s: _of(s, mla(4, 2, 3, mscale=1.3)), compiled=False))
PICTURE = None


if __name__ == "__main__":
    main()

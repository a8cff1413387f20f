"""Online softmax of products of codes: they are brought to scale where maxima and exponents are taken, and
probabilities fill the range of e4m3."""

from __future__ import annotations

from dataclasses import dataclass, field

from cutlass import Float32, cute

from fa4flex.kernels.common.softmax import OnlineSoftmax


@dataclass(frozen=True)
class CodeSoftmax(OnlineSoftmax):
    """Softmax in which y of a row is lift * score + bias, of the tile of keys at hand: by row, what a
    consumer says; None: y is the score. headroom: logarithm of base 2 of the largest probability."""

    headroom: float = field(default=0.0)
    lift: cute.Tensor | None = field(default=None)
    bias: cute.Tensor | None = field(default=None)

    def maxima(self, scores: cute.Tensor) -> list[Float32]:
        if self.lift is None:
            return super().maxima(scores)
        found = [self.of_score(x, r) for r, x in enumerate(self.largest(scores))]
        self.note(found)
        return found

    def of_score(self, score: Float32, r: int) -> Float32:
        """y of a score."""
        assert self.lift is not None
        y = score * self.lift[r]
        return y if self.bias is None else y + self.bias[r]

    def shift_of(self, largest: Float32) -> Float32:
        return largest * self.factor - self.headroom if self.headroom else largest * self.factor

    def exponents(self, r: int) -> tuple[Float32, Float32]:
        if self.lift is None:
            return self.factor, self.state.shift[r]
        shift = self.state.shift[r]
        if self.bias is not None:
            shift = shift - self.bias[r] * self.factor
        return self.factor * self.lift[r], shift

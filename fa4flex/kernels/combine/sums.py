"""Sums of what parts of the keys leave of a row, weighted by their shares of the sum of exponentials."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, cute, select_

from fa4flex.kernels.common.softmax import LOG2_E

BATCH = 8
"""Parts that a warp loads at once: most calls have no more than all warps together."""


@dataclass(frozen=True)
class Batch:
    """Log-sum-exps (part) of some parts, and a lane's columns of their outputs (together, piece, part)."""

    log_sums: cute.Tensor
    outputs: cute.Tensor

    @staticmethod
    def of(together: int, pieces: int, parts: int = BATCH) -> Batch:
        """Room for as many parts as a warp loads at once."""
        outputs = cute.make_rmem_tensor((together, pieces, parts), Float32)
        return Batch(cute.make_rmem_tensor((parts,), Float32), outputs)

    @property
    def parts(self) -> int:
        """Number of parts."""
        return cute.size(self.log_sums)

    def add(self, shift: Float32, sums: cute.Tensor, total: Float32) -> Float32:
        """Add all of them to a lane's sums (together, piece); returns the sum of their weights and
        `total`."""
        together, pieces = sums.shape
        for i in range(self.parts):
            weight = cute.math.exp2((self.log_sums[i] - shift) * LOG2_E, fastmath=True)
            total = total + weight
            for piece in range(pieces):
                for j in range(together):
                    # A part without keys has written no output.
                    more = select_(weight > 0, self.outputs[j, piece, i] * weight, Float32(0.0))
                    sums[j, piece] = sums[j, piece] + more
        return total


def largest_of_lanes(x: Float32) -> Float32:
    """The largest of a warp's numbers, in all of its lanes."""
    for distance in range(5):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1 << distance))
    return x

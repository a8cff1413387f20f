"""Attention on a CPU: blockwise, exact, deterministic, in memory O(S x D) plus a bounded tile buffer."""

from fa4flex.runtime.cpu.backward import Gradients, backward
from fa4flex.runtime.cpu.few import single_queries
from fa4flex.runtime.cpu.forward import forward, outputs, skipped
from fa4flex.runtime.cpu.mass import key_mass
from fa4flex.runtime.cpu.sequences import (
    Sequences,
    backward_sequences,
    forward_sequences,
    skipped_sequences,
)
from fa4flex.runtime.cpu.softmax import Forward
from fa4flex.runtime.cpu.tiles import Inputs

__all__ = [
    "Forward",
    "Gradients",
    "Inputs",
    "Sequences",
    "backward",
    "backward_sequences",
    "forward",
    "forward_sequences",
    "key_mass",
    "outputs",
    "single_queries",
    "skipped",
    "skipped_sequences",
]

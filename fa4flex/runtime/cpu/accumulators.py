"""Accumulators of a backward pass, which all rules for weights add to."""

from __future__ import annotations

import torch

from fa4flex.runtime.cpu.captured import SharedGradients
from fa4flex.runtime.cpu.scattered_backward import Upstream
from fa4flex.runtime.cpu.softmax import Forward
from fa4flex.runtime.cpu.tiles import Inputs, Workspace


class Accumulators:
    """The accumulators of one backward pass; those of keys and values are at compute precision."""

    def __init__(self, inputs: Inputs, saved: Forward, upstream: Upstream, shared: SharedGradients) -> None:
        self.inputs, self.saved, self.shared = inputs, saved, shared
        self.dout, self.dlse, self.dentropy = upstream
        self.space = Workspace(inputs.precision)
        self.dq = torch.zeros_like(inputs.q, memory_format=torch.contiguous_format)
        self.dk = torch.zeros(inputs.k.shape, dtype=inputs.precision)
        self.dv = torch.zeros(inputs.v.shape, dtype=inputs.precision)

"""Slots to write to, in pools of full and of sliding layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: torch.Tensor | None = None

"""Layers of older models."""

from __future__ import annotations

from typing import Any

from torch import nn


class Attention(nn.Module):
    processor: Any

"""Names of diffusers that fa4flex's backend uses, as its version 0.42 has them."""

from __future__ import annotations

from diffusers.models.modeling import ModelMixin

__all__ = ["ModelMixin"]
__version__ = "0.42.1"

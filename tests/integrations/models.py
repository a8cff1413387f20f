"""The families of scripts/model_families.py, for tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import model_families  # noqa: E402
from model_family_configs import FAMILIES, Family  # noqa: E402

from fa4flex.integrations.transformers import register  # noqa: E402

register()

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))


def since(minor: int, otherwise: str) -> pytest.MarkDecorator:
    """Skip under versions of transformers before 5.`minor`, where `otherwise` is the case."""
    reason = f"transformers before 5.{minor}, here {transformers.__version__}: {otherwise}"
    return pytest.mark.skipif((5, minor) > VERSION, reason=reason)


__all__ = ["FAMILIES", "Family", "model_families", "since", "transformers"]

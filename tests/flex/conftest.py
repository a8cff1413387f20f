"""Path of the table of variants, which lies beside the tests of our own results."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "numeric"))

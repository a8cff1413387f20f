"""`python tests/sequences` and `python -m tests.sequences`: see running.py."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a folder
    here = Path(__file__).resolve().parent
    sys.path[:1] = [str(here.parent), str(here.parents[1])]
    from sequences.running import main
else:
    from .running import main

sys.exit(main())

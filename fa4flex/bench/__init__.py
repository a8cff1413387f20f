"""`python -m fa4flex bench`: fa4flex and every installed peer, timed in one run. See docs/benchmarks.md.

Whoever imports this has calls wait for the best kernels: times of those that serve meanwhile
(compiler/background.py) would say nothing.
"""

import os

os.environ.setdefault("FA4FLEX_BACKGROUND", "0")

"""python scripts/public_kernels: see run.py."""

import os
import sys
import warnings
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    os.environ.setdefault("QUACK_CACHE_ENABLED", "0")  # cached object files hold no PTX
    warnings.simplefilter("ignore")
    from run import main

    main()

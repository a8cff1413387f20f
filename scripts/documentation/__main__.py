"""python scripts/documentation: see build.py."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from build import main

    sys.exit(main())

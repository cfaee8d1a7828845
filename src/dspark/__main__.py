"""``python -m dspark`` is ``dspark``: for ``torchrun -m dspark train ...``."""

from __future__ import annotations

import sys

from dspark.cli import main

if __name__ == "__main__":
    sys.exit(main())

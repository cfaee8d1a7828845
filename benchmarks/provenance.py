"""Where a number came from: written beside every result."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dspark.training.provenance import provenance as of_this_process


def provenance() -> dict[str, Any]:
    """What the package says of this run, with the date, and without folders in the command."""
    return {
        **of_this_process(),
        "command": [Path(sys.argv[0]).name, *(Path(word).name if "/" in word else word for word in sys.argv[1:])],
        "date": datetime.now(UTC).date().isoformat(),
    }

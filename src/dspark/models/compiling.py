"""What compiled code of this package depends on."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dspark.models.instructions import INSTRUCTIONS

_FILES = sorted(Path(__file__).parent.glob("*.py"))

SOURCE = hashlib.sha256(b"".join(path.read_bytes() for path in _FILES) + repr(INSTRUCTIONS).encode()).hexdigest()
"""Changes with the code of this package, and with the instructions that its products are compiled for.

What numba remembers goes by a function's own file and by the variables of its closure, not by the files of what it
calls: a function to be remembered (`dspark.compiling`) names this in its closure.
"""

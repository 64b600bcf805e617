"""Whether this installation is the compiled wheel (`make wheel-compiled`) or plain Python; both do the same."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from typing import Final

_ONE_OF_THEM: Final = "tidegate.estimate.quantiles"  # a wheel has all of its compiled modules or none


def is_compiled() -> bool:
    """Looks at a file's name; imports nothing that a process would not import anyway."""
    found = find_spec(_ONE_OF_THEM)
    return found is not None and found.origin is not None and found.origin.endswith(tuple(EXTENSION_SUFFIXES))

"""The error with which a build stops."""

from __future__ import annotations


class BuildError(Exception):
    """A model could not be built, quantized or added; the message names the file or the flag and the way out."""

"""A signature is what an artefact takes and gives, read from the artefact itself, in one form for all formats.

A dimension is a length, or a symbol where it varies, or None where the file says nothing. Symbols hold inside of one
artefact only; `tidegate/tools/build/agree.py` finds out which symbols of two artefacts mean the same axis.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.models.manifest import Bounds
from tidegate.types import Datatype

Dimension = int | str | None


@dataclass(frozen=True, slots=True)
class SignaturePort:
    """One input or output. Formats that do not name their outputs leave `name` empty."""

    name: str
    datatype: Datatype
    shape: tuple[Dimension, ...]
    bounds: Bounds | None = None


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """`ranges` holds the least and largest length of symbols whose format limits them; None means no limit."""

    source: str  # the file's name, for messages
    inputs: tuple[SignaturePort, ...]
    outputs: tuple[SignaturePort, ...]
    precision: str
    ranges: dict[str, tuple[int, int | None]] = field(default_factory=dict)

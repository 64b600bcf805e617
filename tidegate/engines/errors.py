"""What goes wrong in an engine. Apart from `engine.py`, so that the engines it loads need not import it back."""

from __future__ import annotations


class EngineError(Exception):
    """An engine could not be loaded or could not run; the message names the artefact and the way out."""

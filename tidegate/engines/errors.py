"""The errors of engines. They are apart from `engine.py`, so that the engines it loads need not import it back.

Too little memory is a kind of its own: the same work in smaller batches may go well, which no other failure promises.
Runtimes report it in many ways and classes (torch's CPU allocator raises a plain RuntimeError, ONNX Runtime's arena a
Fail with a status code in its text), so it is recognized by the text, all in one place.
"""

from __future__ import annotations

from typing import Final

_OUT_OF_MEMORY_TEXTS: Final = (
    "out of memory",  # CUDA, torch and ONNX Runtime's CUDA provider
    "can't allocate memory",  # torch on a CPU: DefaultCPUAllocator
    "not enough memory",  # the same elsewhere
    "failed to allocate memory",  # ONNX Runtime's arenas
    "bad_alloc",  # whatever is written in C++
    "cannot allocate memory",  # ENOMEM
)


class EngineError(Exception):
    """An engine could not be loaded or could not run; the message names the artefact and the way out."""


class UntrustedProgram(EngineError):
    """The file is a program whose digest is not on the trust list; it was not read further."""


class EngineOutOfMemory(EngineError):
    """The device has too little memory for this call; the engine is whole, and smaller calls may go well."""


class InputRefused(EngineError):
    """An input that the artefact can take nowhere: the caller's error, and the engine is whole."""


def failure_of(error: BaseException, words: str) -> EngineError:
    """An EngineError for an exception of a runtime, with `words` before its text."""
    kind = EngineOutOfMemory if is_out_of_memory(error) else EngineError
    return kind(f"{words}: {str(error) or type(error).__name__}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a runtime's exception reports a lack of memory."""
    if isinstance(error, MemoryError | EngineOutOfMemory) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return any(words in text for words in _OUT_OF_MEMORY_TEXTS)

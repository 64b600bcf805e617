"""Gives each tenant a part of its own of what targets keep of prompts.

An engine that keeps the attention of earlier prompts answers sooner where it has some of a new one, and says of how
many tokens (`cached_tokens`). Kept for everybody together, that would show a tenant whether another one has sent a
prompt that it guesses. So a generation goes out with a salt, by which engines keep prompts apart, made of its tenant's
name and of the one that its caller gave, if any: nobody can ask under another tenant's. Requests without a tenant, as a
gateway without `auth` has them, share what there is, as they share all else.

A salt is no secret from a target. It has to be the same on every gateway, so that they share what targets keep.

Pure. Source: "Cache isolation for security", in vLLM's documentation of its prefix cache.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from msgspec.structs import replace

from tidegate.generate.request import CACHE_SALT_KEY
from tidegate.types import InferRequest

_DIGEST_BYTES: Final = 16


def under_tenant(request: InferRequest, tenant: str) -> InferRequest:
    """The generation as targets get it: the same object where neither its tenant nor its caller is to be kept apart."""
    own = request.parameters.get(CACHE_SALT_KEY, "")
    if not tenant and not own:
        return request
    # A header may have brought bytes that are no text.
    said = f"{tenant}\0{own}".encode(errors="surrogatepass")
    salt = blake2b(said, digest_size=_DIGEST_BYTES).hexdigest()
    return replace(request, parameters={**request.parameters, CACHE_SALT_KEY: salt})

"""Ask a fallback model where the request's own model finds no target in time: a late rung of declared degradation.

It comes after everything that placement can do: other targets, other variants, other versions. What brings it on is in
`no_target.py`. A last-known answer (`cached.py`) comes after it.

Inside of admission, so that both attempts have one place; outside of `versions`, which chooses a version of the
fallback model too. The answer is declared: `degraded=1`, the reason `fallback-model`, and `tidegate-fallback-model`.
Where the fallback model fails as well the caller gets the first error, which is of the model that it asked for.

The layer is left out where no manifest names a fallback model.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from msgspec.structs import replace

from gateway.core.versions.fallback_model import may_stand_in
from gateway.layers.no_target import NO_TARGET
from gateway.layers.stack import Layer, Service
from tidegate.models.manifest import Manifest
from tidegate.outcome import ModelNotFound, ServeError
from tidegate.types import Call, Reply

REASON: Final = "fallback-model"


def fallback_model(
    manifest_of: Callable[[str, str], Manifest], now: Callable[[], float], demanded: Callable[[Call], str]
) -> Layer:
    """Args:
    manifest_of: the manifest of a model and version. Raises ModelNotFound.
    demanded: the version that a call demands in a header; "" for none.
    """

    def substitute(call: Call) -> str:
        """The fallback model of a call; "" where it has none."""
        try:
            return manifest_of(call.request.model_name, call.request.model_version).fallback_model
        except ModelNotFound:
            return ""  # the layers further in say so

    def may(call: Call, name: str) -> bool:
        try:
            own, other = manifest_of(call.request.model_name, ""), manifest_of(name, "")
        except ModelNotFound:
            return False
        return may_stand_in(call, own, other, demanded(call))

    def layer(inner: Service) -> Service:
        def service(call: Call) -> Awaitable[Reply]:
            name = substitute(call)
            return with_fallback(call, name) if name else inner(call)

        async def with_fallback(call: Call, name: str) -> Reply:
            try:
                return await inner(call)
            except NO_TARGET as error:
                if (call.deadline is not None and now() >= call.deadline) or not may(call, name):
                    raise
                failed = error
            try:
                reply = await inner(replace(call, request=replace(call.request, model_name=name)))
            except ServeError as error:
                raise failed from error
            route = reply.route
            return replace(
                reply,
                route=None if route is None else replace(route, reason=REASON, degraded=True),
                fallback_model=name,
            )

        return service

    return layer

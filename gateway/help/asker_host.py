"""The asker's host is the gateway as one device may use it, for the requests of its local callers.

It puts the device's identity on every call, or that of the caller whose credential the device passed on, and has the
request paid for, as the guard of callers' ports does (`gateway/identity/guard.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from gateway.core.access.asker import asked_call
from gateway.core.access.entitlement import check_model
from gateway.core.admission.admission import Admission
from tidegate import clock
from tidegate.caller import Identity
from tidegate.models.manifest import Manifest
from tidegate.oip.guard import PresentedCredentials
from tidegate.oip.host import ModelHost, ModelStatistics
from tidegate.types import Call, Reply

Identified = Callable[[PresentedCredentials], Awaitable[Identity]]


class AskerHost:
    """A `ModelHost` that limits another one to what a device may ask for.

    Args:
        device: the identity of the device.
        asker: its name, "edge/NAME".
        identify: proves credentials of callers; None: this gateway has none, and those that are shown mean nothing.
        credential: what the caller of this one request showed to the device; "": nothing.
    """

    def __init__(
        self,
        host: ModelHost,
        admission: Admission,
        device: Identity,
        asker: str,
        *,
        identify: Identified | None = None,
        credential: str = "",
    ) -> None:
        self._host = host
        self._admission = admission
        self._device = device
        self._asker = asker
        self._identify = identify
        self._credential = credential

    def bearing(self, credential: str) -> AskerHost:
        """The same for one request, whose caller showed a credential."""
        return AskerHost(
            self._host, self._admission, self._device, self._asker, identify=self._identify, credential=credential
        )

    @property
    def server_name(self) -> str:
        return self._host.server_name

    def ready(self) -> bool:
        return self._host.ready()

    def manifests(self) -> Sequence[Manifest]:
        return [one for one in self._host.manifests() if self._device.may_use(one.name)]

    def manifest(self, name: str, version: str = "") -> Manifest:
        check_model(self._device, name)
        return self._host.manifest(name, version)

    def model_ready(self, name: str, version: str = "") -> bool:
        return self._device.may_use(name) and self._host.model_ready(name, version)

    def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        """None: a device asks for answers."""
        return ()

    async def infer(self, call: Call) -> Reply:
        """The answer. Raises ServeError; Unauthenticated: the caller's credential is not good."""
        bearer = await self._bearer()
        call = asked_call(call, self._device, self._asker, bearer)
        assert call.identity is not None
        quota = self._admission.tenants.of_identity(call.identity)
        wait_s = quota.ask(now := clock.now())
        if wait_s > 0.0:
            raise self._admission.refuse_over_rate(quota.lacks_requests(now), wait_s)
        return await self._host.infer(call)

    async def _bearer(self) -> Identity | None:
        if not self._credential or self._identify is None:
            return None
        shown = PresentedCredentials(self._credential, "", lambda: None, "help", self._asker)
        return await self._identify(shown)

    def __repr__(self) -> str:
        return f"<AskerHost for {self._asker}{', for a bearer' if self._credential else ''}>"

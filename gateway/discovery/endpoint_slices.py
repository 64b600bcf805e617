"""EndpointSlices are how Kubernetes says which pods a Service has; this is what they mean for a gateway.

    condition of an endpoint              here
    ready (or not said)                   a target
    not ready, not terminating            none: it has not warmed up, or has failed its probe
    terminating, serving                  a target that drains: it finishes what it has, and takes nothing new
    terminating, not serving              none

A pod may be in several slices at once, while the controller moves it, and in one for each address family: it is one
target, by IPv4 where it has that; if any slice has it terminating, it drains. Its id is the pod's name, which a
StatefulSet keeps over restarts; its price and pins come from `zones`, by the endpoint's zone.

What the API server says is bounded here, as it comes over the network; unknown keys are ignored. Pure.

Source: Kubernetes API reference, discovery.k8s.io/v1 EndpointSlice; KEP-1672, "Tracking Terminating Endpoints".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, field

from tidegate.servers.address import format_address

MOST_ENDPOINTS: Final = 16_384  # of one Service, over all slices
NAMED: Final = 8  # in one warning
T = TypeVar("T")
Text = Annotated[str, Meta(max_length=253)]


class BadObject(ValueError):
    """What the API server said is not what it should be; the text says why."""


class Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class TargetRef(msgspec.Struct, frozen=True):
    kind: Text = ""
    name: Text = ""


class Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: Annotated[tuple[Text, ...], Meta(max_length=100)]
    conditions: Conditions = Conditions()
    target_ref: TargetRef | None = None
    hostname: Text | None = None
    zone: Text | None = None


class Port(msgspec.Struct, frozen=True):
    name: Text | None = None
    port: Annotated[int, Meta(ge=0, le=65535)] | None = None


class ObjectMeta(msgspec.Struct, frozen=True, rename="camel"):
    name: Text = ""
    resource_version: Annotated[str, Meta(max_length=256)] = ""
    next_page: Annotated[str, Meta(max_length=65536)] = field(name="continue", default="")


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel"):
    metadata: ObjectMeta
    address_type: Text = "IPv4"
    endpoints: Annotated[tuple[Endpoint, ...], Meta(max_length=1000)] | None = None
    ports: Annotated[tuple[Port, ...], Meta(max_length=1000)] | None = None


class EndpointSliceList(msgspec.Struct, frozen=True):
    metadata: ObjectMeta
    items: Annotated[tuple[EndpointSlice, ...], Meta(max_length=MOST_ENDPOINTS)] | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    """`object` is an EndpointSlice, or, in an `ERROR`, a Status."""

    type: Text
    object: msgspec.Raw


class AnyObject(msgspec.Struct, frozen=True):
    """What every object has; a bookmark's has nothing else."""

    metadata: ObjectMeta


class Status(msgspec.Struct, frozen=True):
    code: int = 0
    reason: str | None = ""
    message: str | None = ""


def decode(kind: type[T], body: bytes | msgspec.Raw) -> T:
    """Raises BadObject."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadObject(f"no {kind.__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class ServiceTarget:
    """A pod that takes requests, or finishes those it has. `zone` is Kubernetes' name for it, or ""."""

    name: str
    address: str
    zone: str = ""
    draining: bool = False


class EndpointSlices:
    """Mutable: the slices of one Service, by name; `targets` is what they say together.

    Args:
        port_name: of the port that gateways dial; None: the only one.
    """

    def __init__(self, port_name: str | None) -> None:
        self._port_name = port_name
        self._slices: dict[str, EndpointSlice] = {}

    def listed(self, slices: Iterable[EndpointSlice]) -> None:
        """All there are now. Raises BadObject where there are too many."""
        found = {one.metadata.name: one for one in slices}
        _check_count(found)
        self._slices = found

    def changed(self, slice_: EndpointSlice) -> None:
        """One was made or changed. Raises BadObject where there are too many."""
        found = {**self._slices, slice_.metadata.name: slice_}
        _check_count(found)
        self._slices = found

    def removed(self, slice_: EndpointSlice) -> None:
        self._slices.pop(slice_.metadata.name, None)

    def targets(self) -> tuple[list[ServiceTarget], str]:
        """The targets by name, and what cannot be used."""
        found: dict[str, ServiceTarget] = {}
        odd: list[str] = [] if self._slices else ["there is no EndpointSlice of this Service: is its name right?"]
        for slice_ in sorted(self._slices.values(), key=_family):
            port, why = self._port(slice_)
            if port is None:
                odd.append(f"{slice_.metadata.name}: {why}")
            else:
                _gather(slice_, port, found)
        if len(odd) > NAMED:
            odd[NAMED:] = [f"and {len(odd) - NAMED} more"]
        return sorted(found.values(), key=lambda one: one.name), "; ".join(odd)

    def _port(self, slice_: EndpointSlice) -> tuple[int | None, str]:
        named = {one.name or "": one.port for one in slice_.ports or () if one.port}
        if self._port_name is not None:
            port = named.get(self._port_name)
            return port, "" if port else f"it has no port {self._port_name!r}"
        if len(named) != 1:
            return None, f"it has {len(named)} ports ({', '.join(sorted(named))[:200]}): set port_name"
        return next(iter(named.values())), ""

    def __len__(self) -> int:
        return len(self._slices)

    def __repr__(self) -> str:
        return f"<EndpointSlices {len(self._slices)} slices>"


def _gather(slice_: EndpointSlice, port: int, found: dict[str, ServiceTarget]) -> None:
    for one in slice_.endpoints or ():
        if not one.addresses or not _is_there(one.conditions):
            continue
        name, draining = _name(one), bool(one.conditions.terminating)
        before = found.get(name)
        if before is None:
            address = format_address(one.addresses[0], port)
            found[name] = ServiceTarget(name, address, one.zone or "", draining)
        elif draining and not before.draining:
            found[name] = ServiceTarget(name, before.address, before.zone, draining)


def _is_there(conditions: Conditions) -> bool:
    ready = conditions.ready is not False  # not said: to be taken as ready
    if conditions.terminating:  # then never ready, whatever its probe says
        return conditions.serving is True
    return ready


def _name(endpoint: Endpoint) -> str:
    if endpoint.target_ref is not None and endpoint.target_ref.kind == "Pod" and endpoint.target_ref.name:
        return endpoint.target_ref.name
    return endpoint.hostname or endpoint.addresses[0].replace(".", "-").replace(":", "-").strip("-")


def _family(slice_: EndpointSlice) -> tuple[bool, str]:
    return slice_.address_type != "IPv4", slice_.metadata.name


def _check_count(slices: dict[str, EndpointSlice]) -> None:
    count = sum(len(one.endpoints or ()) for one in slices.values())
    if count > MOST_ENDPOINTS or len(slices) > MOST_ENDPOINTS:
        raise BadObject(f"{count} endpoints in {len(slices)} EndpointSlices are more than {MOST_ENDPOINTS}")


def resource_version(body: bytes | msgspec.Raw) -> str:
    """Of any object, also of a bookmark's. Raises BadObject."""
    return decode(AnyObject, body).metadata.resource_version

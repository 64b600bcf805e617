"""The targets that exist now: opened and closed as the sources of discovery and the fleet's messages say.

The fleet view decides from numbers; this file owns the connections behind them. Targets that sources find
(`gateway/core/fleet/found_targets.py`; the configuration's own list is one) are opened when they are found. One that
moves keeps what was learned of it and gets a new connection; on the old one nothing new begins, and it is closed when
what is under way there has ended, or after `RETIRE_S`. A device that is known over MQTT gets a target when it is
believed alive, and loses it when it is gone and its link is broken as well: a working link outranks what a broker says.
A device that comes back under another address gets a new connection. A device that dials out (`dial_in.py`) has a
target for as long as its stream stands, whether or not its address may be dialled; with both paths it has one target
all the same (`device.py`).

Events of links go two ways: into the fleet view, and, for devices, back to the register that MQTT feeds, since an
answer is the best sign of life there is. One task does the opening and closing, in order; callbacks only wake it.

Not everything is taken on trust: the offers of a unary target of our own come from what the gateway knows of it, as OIP
has no hello.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial
from typing import Final, Protocol

import structlog
from msgspec.structs import replace

from gateway.catalog import Catalog
from gateway.core.access.networks import AllowedNetworks
from gateway.core.fleet.attestation import Attestation
from gateway.core.fleet.fleet import STATIC_REDIAL_S, Fleet
from gateway.core.fleet.found_targets import FoundTarget, FoundTargets
from gateway.core.fleet.link_events import LinkAttested, LinkDown, LinkEvent, LinkLoad, LinkRtt, LinkUp
from gateway.core.fleet.pricing import Tier
from gateway.core.fleet.target import EdgeTransport, TargetSpec, Transport
from gateway.fleet_sync.freshness import DeviceView, Freshness
from gateway.targets.accepted_link import AcceptedLink
from gateway.targets.address_policy import AddressPolicy
from gateway.targets.attestation_verifier import AttestationVerifier
from gateway.targets.device import DeviceTarget
from gateway.targets.dial_address import allowed_address, unchecked_address
from gateway.targets.dial_pace import DialPace
from gateway.targets.link import BACKOFF_CAP_S, LinkTarget
from gateway.targets.link_evidence import DeviceRegistry
from gateway.targets.openai.target import OpenAITarget
from gateway.targets.site import SiteTarget
from gateway.targets.target import Target
from gateway.targets.unary import UnaryTarget
from tidegate import clock
from tidegate.fleet.conditions import DeviceConditions
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.models.manifest import Manifest
from tidegate.outcome import ServeError
from tidegate.runtime.owned_task import OwnedTask
from tidegate.security.tls import Dialler, PlainDialler
from tidegate.types import TargetId

log = structlog.get_logger(__name__)

UNATTESTED: Final[Mapping[Transport, Attestation]] = {
    "unary": Attestation(
        "it is called by unary gRPC, whose connections change unseen; evidence is of one link stream "
        "(`transport: link`)"
    ),
    "openai": Attestation("it is another maker's server over HTTP, which has no evidence to show"),
}
UNDIALLED: Final = "-"  # the address of a device that only dials
ANYWHERE: Final = AllowedNetworks(("0.0.0.0/0", "::/0"))
OpenAIFactory = Callable[[TargetSpec, Callable[[LinkEvent], None]], OpenAITarget]
RETIRE_S: Final = 30.0  # a connection to a target's former address ends after this, whatever is under way there
LOOK_AGAIN_S: Final = 0.25  # whether a target that is left is over
AT_ONCE: Final = 64  # devices that are looked at without a breath in between: a few ms


@dataclass(slots=True)
class _OpenTarget:
    spec: TargetSpec
    stack: AsyncExitStack
    retired_at: float | None = None  # its target has another connection since


class DialledIn(Protocol):
    """The streams that devices have dialled, here or at another process of this gateway, by target id."""

    @property
    def links(self) -> Mapping[str, AcceptedLink]: ...


class Directory:
    """`async with` opens the targets that are found by then and keeps up with the fleet until it ends."""

    def __init__(
        self,
        fleet: Fleet,
        catalog: Catalog,
        found: FoundTargets,
        *,
        gateway_name: str,
        edge_transport: EdgeTransport,
        max_message_bytes: int,
        draw: Callable[[], float],
        networks: AllowedNetworks = ANYWHERE,
        dialler_of: Callable[[TargetSpec], Dialler] = lambda _: PlainDialler(),
        verifier: AttestationVerifier | None = None,
        dialled_in: DialledIn | None = None,
        make_openai: OpenAIFactory | None = None,
        register: DeviceRegistry | None = None,
    ) -> None:
        """
        Args:
            found: what the sources of discovery say; `found_changed` after each change.
            make_openai: makes the targets behind OpenAI's interface; None: there are none.
            register: what devices report over MQTT; None: no broker is configured.
        """
        self.targets: dict[str, Target] = {}
        self.register = register
        self._fleet = fleet
        self._catalog = catalog
        self.found = found
        self._gateway_name = gateway_name
        self._edge_transport = edge_transport
        self._max_message_bytes = max_message_bytes
        self._draw = draw
        self._networks = networks
        self._advertised = AddressPolicy(networks, edge_transport)
        self.refused = self._advertised.refused
        self._dialler_of = dialler_of
        self._verifier = verifier
        self._dialled_in = dialled_in
        self._make_openai = make_openai
        self._open: dict[str, _OpenTarget] = {}
        self._retired: list[_OpenTarget] = []  # connections to former addresses, with work under way
        self._pace = DialPace()  # of devices; the targets that sources list are few
        self._unheard: set[str] = set()  # devices that were silent when they were last looked at
        self._left: dict[str, None] = {}  # devices to look at although they sent nothing: their paths changed
        self._undescribed: set[str] = set()  # foreign targets that came up and were not asked yet
        self._unlearned: set[str] = set()  # those that were asked in vain; the next sign of life asks again
        self._changed = asyncio.Event()
        self._task = OwnedTask(self._keep_up, name="target directory")

    async def __aenter__(self) -> Directory:
        """Raises ConfigError where a target of the configuration can never be opened: its key or CA is missing."""
        try:
            for one in self.found.targets.values():
                if one.spec.static:
                    await self._follow_one(one)
        except BaseException:
            await self.__aexit__()
            raise
        await self._follow_found()
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()
        for target_id in list(self._open):
            await self._close_target(target_id)
        for held in self._retired:
            await held.stack.aclose()

    def found_changed(self) -> None:
        """The sources of discovery have news: look at them soon."""
        self._changed.set()

    def devices_changed(self) -> None:
        """The register has news: look at it soon."""
        self._changed.set()

    @property
    def settled(self) -> bool:
        """Whether every source was heard, every target tried, and every foreign one that answered is described."""
        opened = all(target_id in self._open for target_id in self.found.targets)
        return self.found.settled and opened and self._fleet.all_tried() and not self._undescribed

    # events of links

    def _on_event_of(self, held: _OpenTarget, event: LinkEvent) -> None:
        """What the connection to a former address says is not of the target any more."""
        if held.retired_at is None:
            self.on_event(event)

    def on_event(self, event: LinkEvent) -> None:
        """Fold an event of a link into the fleet view, and report it to the register."""
        held = self._open.get(event.target_id)
        if held is None:
            return
        if isinstance(event, LinkUp):
            event = self._checked_hello(event, held.spec)
        elif isinstance(event, LinkRtt) and event.target_id in self._unlearned:
            self._undescribed.add(event.target_id)
            self._changed.set()
        self._log(event)
        now = clock.now()
        self._fleet.fold(event, now)
        if held.spec.tier == "edge":
            self._report_evidence(event, TargetId.parse(held.spec.id).name, now)

    def _checked_hello(self, event: LinkUp, spec: TargetSpec) -> LinkUp:
        if spec.foreign:
            self._undescribed.add(spec.id)
            self._changed.set()
            return event
        if spec.transport == "unary":
            return LinkUp(event.target_id, event.name, event.epoch, self._known_offers(spec))
        return event

    def _report_evidence(self, event: LinkEvent, device: str, now: float) -> None:
        if isinstance(event, LinkDown):
            self._look_at(event.target_id)
        if self.register is None:
            return
        match event:
            case LinkLoad(load=load):
                self.register.data_plane(device, load.epoch, load.sequence, load, now)
            case LinkRtt():
                self.register.data_plane_alive(device, now)
            case LinkUp(epoch=epoch):
                self.register.data_plane(device, epoch, 0, None, now)
            case LinkDown():
                self.register.data_plane_lost(device, now)
        if self._fleet.targets[event.target_id].doubt:  # which this may have refuted
            self._changed.set()

    def _log(self, event: LinkEvent) -> None:
        target = self._fleet.targets[event.target_id]
        if isinstance(event, LinkUp):
            models = [offer.name for offer in event.offers]
            log.info("target is up", target=target.id, road=event.path_kind, models=models)
        elif isinstance(event, LinkDown) and target.up:
            # A goodbye is an ordered shutdown: it is worth no warning.
            report = log.info if event.in_order else log.warning
            report("target is down", target=target.id, reason=event.reason)
        elif isinstance(event, LinkDown):
            log.info("target is not there yet", target=target.id, reason=event.reason)

    def _known_offers(self, spec: TargetSpec) -> tuple[ModelOffer, ...]:
        view = self.register.view(TargetId.parse(spec.id).name, clock.now()) if self.register is not None else None
        if view is not None and spec.tier == "edge":
            return view.offers
        return tuple(_offer_of(manifest, spec.tier) for manifest in self._catalog.manifests)

    # opening and closing

    async def _keep_up(self) -> None:
        while True:
            await self._news()
            try:
                await self._follow_found()
                await self._follow()
            except Exception:
                log.exception("cannot keep up with the fleet")  # a defect here must not end all changes for good

    async def _news(self) -> None:
        """Wait for a change; or, while a target or a connection may be over soon, for a moment."""
        soon = clock.now() + LOOK_AGAIN_S if self._retired or self.found.may_drop else None
        try:
            async with asyncio.timeout_at(soon):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    async def _follow_found(self) -> None:
        """Open, move and close targets as the sources of discovery say."""
        now = clock.now()
        for target_id in self.found.drop(now, busy=self._is_busy, up=self._is_up):
            log.info("target is dropped: no source lists it", target=target_id)
            if target_id not in self._open:  # it could never be opened
                continue
            self._fleet.keep_history(target_id, now)
            await self._close_target(target_id)
            if TargetId.parse(target_id).tier == "edge":
                self._look_at(target_id)  # MQTT may know it still
        for one in list(self.found.targets.values()):
            try:
                await self._follow_one(one)
            except Exception:
                log.exception("cannot keep up with a target", target=one.spec.id)
        for held in [one for one in self._retired if self._is_quiet(one, now)]:
            self._retired.remove(held)
            await held.stack.aclose()

    async def _follow_one(self, one: FoundTarget) -> None:
        spec, held = one.spec, self._open.get(one.spec.id)
        if held is not None and held.spec != spec:
            log.info("target has moved", target=spec.id, address=spec.address, before=held.spec.address)
            self._retire(held)
        if held is None or held.spec != spec:
            await self._open_target(spec)
        if self._fleet.targets[spec.id].leaving != one.leaving:
            log.info("target drains" if one.leaving else "target stays", target=spec.id, reason=one.leaving)
            self._fleet.drain(spec.id, one.leaving)

    def _retire(self, held: _OpenTarget) -> None:
        """Begin nothing new on this connection; what is under way there may end."""
        held.retired_at = clock.now()
        self._retired.append(held)
        del self._open[held.spec.id]

    def _is_quiet(self, held: _OpenTarget, now: float) -> bool:
        assert held.retired_at is not None
        return now >= held.retired_at + RETIRE_S or not self._is_busy(held.spec.id)

    def _is_busy(self, target_id: str) -> bool:
        target = self._fleet.targets.get(target_id)
        return target is not None and target.queue_estimate.in_flight > 0

    def _is_up(self, target_id: str) -> bool:
        target = self._fleet.targets.get(target_id)
        return target is not None and (target.up or not target.tried)

    async def _follow(self) -> None:
        for target_id in sorted(self._undescribed):
            await self._describe(target_id)
        left, self._left = self._left, {}
        news = dict(self.register.changed(clock.now(), AT_ONCE)) if self.register is not None else {}
        more = len(news) == AT_ONCE
        for name in left:
            if name not in news:
                news[name] = self.register.view(name, clock.now()) if self.register is not None else None
        for name, view in news.items():
            try:
                await self._settle(name, view)
            except Exception:
                log.exception("cannot keep up with a device", device=name)
        if more:
            self._changed.set()
            await clock.sleep(0.0)  # after an outage all have changed, and no caller should wait for all of them

    async def _settle(self, name: str, view: DeviceView | None) -> None:
        """Open or close the target that this device should have, and report the device to the fleet view."""
        target_id = str(TargetId("edge", name))
        wanted = self._wanted(name, target_id, view)
        held = self._open.get(target_id)
        if held is not None and not held.spec.static and self._is_over(target_id, held.spec, wanted):
            await self._close_target(target_id)
            held = None
        link = self._dialled_in.links.get(target_id) if self._dialled_in else None
        if wanted is None and link is not None and link.open:  # without an address to dial, or dead by what MQTT says
            wanted = TargetSpec(target_id, "edge", UNDIALLED, static=False)
        if held is None and wanted is not None:
            await self._open_target(wanted)
        self._hurry(name, view)
        if view is not None:
            self._hear(view, clock.now())

    def _hurry(self, name: str, view: DeviceView | None) -> None:
        """Dial a device soon that is heard of again: its network is back."""
        if view is not None and view.freshness is not Freshness.FRESH:
            self._unheard.add(name)
            return
        was_unheard = name in self._unheard
        self._unheard.discard(name)
        if view is not None and was_unheard:
            target = self.targets.get(str(TargetId("edge", name)))
            if isinstance(target, DeviceTarget) and isinstance(target.direct, LinkTarget):
                target.direct.hurry()

    def _wanted(self, name: str, target_id: str, view: DeviceView | None) -> TargetSpec | None:
        if view is None or target_id in self.found.targets:  # forgotten, or found anyway
            self._advertised.forget(name)
            return None
        return self._advertised.spec_of(view)

    def _is_over(self, target_id: str, spec: TargetSpec, wanted: TargetSpec | None) -> bool:
        if wanted is not None:
            return wanted != spec
        return not self._fleet.targets[target_id].up

    def _hear(self, view: DeviceView, now: float) -> None:
        doubt = "" if view.freshness.is_usable else f"{view.freshness}: {view.reason}"
        offers = view.offers if self._edge_transport == "unary" else None
        self._fleet.heard(
            str(TargetId("edge", view.name)),
            load=view.load,
            doubt=doubt,
            accepting=view.accepting,
            offers=offers,
            conditions=_conditions_of(view),
            now=now,
        )

    def devices(self) -> tuple[DeviceView, ...]:
        """All that is known over MQTT, by name."""
        return self.register.devices(clock.now()) if self.register is not None else ()

    def _look_at(self, target_id: str) -> None:
        """Soon, whatever its device has said."""
        self._left[TargetId.parse(target_id).name] = None
        self._changed.set()

    async def _open_target(self, spec: TargetSpec) -> None:
        known = self._fleet.targets.get(spec.id)
        if known is not None and changed(known.spec, address=spec.address) == spec:
            self._fleet.relocate(spec, clock.now())
        else:
            if known is not None:
                self._fleet.keep_history(spec.id, clock.now())
            self._fleet.add(spec, clock.now())
        if self._verifier is not None and spec.transport != "link":
            self._fleet.fold(LinkAttested(spec.id, UNATTESTED[spec.transport]), clock.now())
        stack = AsyncExitStack()
        self._open[spec.id] = held = _OpenTarget(spec, stack)
        try:
            target = self._make(spec, partial(self._on_event_of, held))
            self.targets[spec.id] = await stack.enter_async_context(target)
        except BaseException:
            del self._open[spec.id]  # it is opened when its device, or its source, is looked at again
            raise
        link = self._dialled_in.links.get(spec.id) if self._dialled_in else None
        if link is not None and link.open and isinstance(target, DeviceTarget):
            target.accept(link)

    async def _close_target(self, target_id: str) -> None:
        held = self._open.pop(target_id)
        self.targets.pop(target_id, None)
        self._fleet.remove(target_id)
        await held.stack.aclose()

    # devices that dial

    def dialled(self, link: AcceptedLink) -> None:
        """A device's stream was let in."""
        target = self.targets.get(link.id)
        if isinstance(target, DeviceTarget):
            target.accept(link)
        else:
            self._look_at(link.id)

    def hung_up(self, link: AcceptedLink) -> None:
        """A device's stream has ended, and none has taken its place."""
        target = self.targets.get(link.id)
        if isinstance(target, DeviceTarget):
            target.left(link, link.why_not, in_order=False)
        self._look_at(link.id)

    def _make(
        self, spec: TargetSpec, on_event: Callable[[LinkEvent], None]
    ) -> LinkTarget | UnaryTarget | DeviceTarget | OpenAITarget:
        if spec.transport == "openai":
            assert self._make_openai is not None, "a target behind OpenAI's interface, and nothing to make it by"
            return self._make_openai(spec, on_event)
        if spec.tier == "edge" and not spec.foreign:
            make = None if spec.address == UNDIALLED else partial(self._make_direct, spec)
            return DeviceTarget(spec, make, on_event, asks_evidence=self._verifier is not None)
        return self._make_direct(spec, on_event)

    def _make_direct(self, spec: TargetSpec, on_event: Callable[[LinkEvent], None]) -> LinkTarget | UnaryTarget:
        if spec.transport == "link":
            return (SiteTarget if spec.tier == "site" else LinkTarget)(
                spec.id,
                spec.address,
                gateway_name=self._gateway_name,
                on_event=on_event,
                draw=self._draw,
                backoff_cap_s=STATIC_REDIAL_S if spec.static else BACKOFF_CAP_S,
                max_message_bytes=self._max_message_bytes,
                dialler=self._dialler_of(spec),
                resolve=unchecked_address if spec.static else partial(allowed_address, self._networks),
                verifier=self._verifier,
                pace=self._pace if spec.tier == "edge" and not spec.static else None,
            )
        return UnaryTarget(
            spec.id,
            spec.address,
            foreign=spec.foreign,
            models=spec.models if spec.foreign else (),
            on_event=on_event,
            max_message_bytes=self._max_message_bytes,
            dialler=self._dialler_of(spec),
        )

    async def _describe(self, target_id: str) -> None:
        """Learn a foreign server's models; where that fails, its next sign of life asks again."""
        held, target = self._open.get(target_id), self.targets.get(target_id)
        try:
            if held is not None and isinstance(target, UnaryTarget | OpenAITarget):
                self._catalog.learn(await target.describe(held.spec.models))
                self._fleet.repriced()
            self._unlearned.discard(target_id)
        except ServeError as error:
            if target_id not in self._unlearned:
                log.warning("a foreign server's models are unknown", target=target_id, reason=error.message)
            self._unlearned.add(target_id)
        finally:
            self._undescribed.discard(target_id)

    def __repr__(self) -> str:
        return f"<Directory {len(self._open)} targets>"


def _conditions_of(view: DeviceView) -> DeviceConditions:
    """The device's last conditions; the loss of its broker, which it cannot report, is added here."""
    said = view.conditions
    if view.freshness is Freshness.CONTROL_LOST and said.mode == "online":
        return replace(said, mode="control-lost")
    return said


def _offer_of(manifest: Manifest, tier: Tier) -> ModelOffer:
    variants = tuple(
        VariantOffer(
            one.name,
            one.precision,
            max_batch=one.max_batch,
            max_tokens=one.max_tokens,
            quality=one.quality.value if one.quality else None,
            paced=one.paced,
        )
        for one in manifest.variants_for("edge" if tier == "edge" else "pool")
    )
    return ModelOffer(manifest.name, manifest.version, variants)

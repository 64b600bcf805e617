"""The doctor checks everything that a device needs, from outside the agent and without disturbing a running one.

It only reads, except for a small file in `state_dir` that is written, synced and removed, and two messages to topics
without readers (`edge_agent/core/acl_check.py`), sent under the device's second name, `NAME~cli`, so that a running
agent keeps its session. `edge_agent/core/diagnosis.py` judges the readings. No check waits longer than `PATIENCE_S`.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import platform
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Final

import aiohttp

from edge_agent.config import EdgeConfig
from edge_agent.configuration.device_file import DeviceFile, read_device_file
from edge_agent.configuration.record_file import ConfigurationFile
from edge_agent.core import diagnosis
from edge_agent.core.acl_check import AclCheck
from edge_agent.core.diagnosis import DoctorFinding
from edge_agent.fleet.dialling import configured_gateways
from edge_agent.serving.catalogue import CatalogueEntry, read_catalogue
from tidegate import clock
from tidegate.engines.errors import EngineError
from tidegate.engines.onnx_providers import DEVICES, candidates
from tidegate.fleet.messages import BadMessage, decode_gateway_state
from tidegate.fleet.topics import Topics
from tidegate.models.repository import Repository, RepositoryError
from tidegate.mqtt.broker_url import BrokerUrl
from tidegate.mqtt.link import LinkEvent, MqttConnected, MqttDisconnected, MqttLink, MqttMessage, PublishAck
from tidegate.runtime.ports import is_free
from tidegate.runtime.process import StartError
from tidegate.security.authority import validity
from tidegate.security.certificate_identity import CertificateIdentity, alternative_names, identity_of
from tidegate.security.tls import Tls, tls_of
from tidegate.servers.address import format_address
from tidegate.workers.sandbox import missing_here
from tidegate.workers.warming.onnx_devices import providers_here

PATIENCE_S: Final = 5.0
_MOST_FLEETS: Final = 8
_LISTEN_S: Final = 1.0  # for the retained states of gateways
WILDCARDS: Final = ("", "0.0.0.0", "::")
_WRITES: Final = 5
_CLOCK_UNSYNCHRONIZED: Final = 0x40  # STA_UNSYNC of <sys/timex.h>
_TIMEX_BYTES, _STATUS_AT = 512, 40  # generous, and where `status` lies on 64 bits


async def run_checks(config: EdgeConfig) -> list[DoctorFinding]:
    """Every finding, in the order in which they matter."""
    tls, certificate = _certificate(config)
    agent = await _agent(config, tls)
    lent = agent is not None and _has_one_session(config)
    broker, heard, skew_s = await _broker_of_agent(config) if lent else await _broker(config, tls)
    reached = await _reached(config, heard)
    return [
        diagnosis.clock(clock.utc_s(), _synchronized(), skew_s),
        await asyncio.to_thread(_disk, config.state_dir),
        *await asyncio.to_thread(_models, config),
        _processor(),
        await _accelerator(config, agent),
        diagnosis.sandbox(config.sandbox, missing_here()),
        *_ports(config, (agent or {}).get("addresses")),
        certificate,
        *_workers(agent),
        *diagnosis.absent(_absent(agent)),
        *diagnosis.name_taken(str((agent or {}).get("name_taken") or "")),
        *await asyncio.to_thread(_settings, config),
        *diagnosis.event_loop(str((agent or {}).get("loop_stalled") or "")),
        *broker,
        diagnosis.asking_for_help(
            configured=config.help is not None,
            reached=reached,
            told=_helpers(agent),
            neighbours=[one for one in config.help.neighbours if one != config.name] if config.help else (),
        ),
        *_mdns(config, agent),
        *_store(agent),
        diagnosis.gateways(
            reached,
            dial_out=config.dial_out,
            advertised=config.advertise or _own_address(config),
            callers=_callers(agent),
            fleet=config.mqtt is not None,
            unheard=lent,
        ),
    ]


async def _accelerator(config: EdgeConfig, agent: dict[str, Any] | None) -> DoctorFinding:
    found, problem = tuple[str, ...](), ""
    try:
        available = await providers_here()
        found = candidates("auto", available)
        candidates(config.device, available)
    except EngineError as error:
        problem = "" if config.device == "cpu" else str(error)
    untried = [name for name in found if not DEVICES[name].tried]
    return diagnosis.accelerator(config.device, found=found, problem=problem, untried=untried, told=_tried(agent))


def _tried(agent: dict[str, Any] | None) -> list[str]:
    """What the running agent says of the devices that it tried."""
    told = []
    for worker in (agent or {}).get("workers") or ():
        for variant, one in (worker.get("devices") or {}).items():
            told += [f"{worker.get('model')} {variant} on {line}" for line in one.get("tried") or ()]
    return told


def _settings(config: EdgeConfig) -> list[DoctorFinding]:
    """By what is on the disk, which is what a running agent goes by."""
    if config.device_file is None and config.rollout is None:
        return []
    record = ConfigurationFile(config.state_dir).read(mend=False)
    own = DeviceFile() if config.device_file is None else read_device_file(config.device_file, config)
    return diagnosis.settings(
        changed=record.settings_now,
        trying=record.trying is not None,
        at_start=record.at_start,
        taken_back=tuple(record.refused.values()),
        file=own.problem,
    )


def _own_address(config: EdgeConfig) -> str:
    return "" if config.host in WILDCARDS or config.mqtt is None else format_address(config.host, config.grpc_port)


def _synchronized() -> bool | None:
    """Whether the kernel reports a synchronized clock; None where that is unknown."""
    if sys.platform != "linux" or sys.maxsize <= 2**32:
        return None
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes 0: only read
    if ctypes.CDLL(None, use_errno=True).adjtimex(timex) < 0:
        return None
    return not int.from_bytes(timex.raw[_STATUS_AT : _STATUS_AT + 4], sys.byteorder) & _CLOCK_UNSYNCHRONIZED


def _disk(folder: Path) -> DoctorFinding:
    file = folder / ".doctor"
    took: list[float] = []
    # The doctor is often run by root: a folder that it left would be closed to the agent's user.
    absent = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for _ in range(_WRITES):
            began_at = clock.now()
            with file.open("wb") as out:
                out.write(b"0" * 4096)
                out.flush()
                os.fsync(out.fileno())
            took.append(clock.now() - began_at)
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return diagnosis.disk(str(folder), error=error.strerror or str(error), full=full, free_bytes=0, fsync_s=0.0)
    finally:
        with suppress(OSError):  # a full disk leaves an empty file
            file.unlink()
        with suppress(OSError):  # the agent has begun to use it
            for one in absent:
                one.rmdir()
    return diagnosis.disk(str(folder), error="", free_bytes=free_bytes, fsync_s=median(took))


def _models(config: EdgeConfig) -> list[DoctorFinding]:
    """Whether all are whole, by their digests, and fit into memory."""
    advice = "copy the model again, or `tidegate model build`"
    try:
        found = read_catalogue(Repository(config.model_repository), config.models, config.allowed_engines)
    except (StartError, RepositoryError) as error:
        return [DoctorFinding("models", "failure", str(error), advice)]
    problems, right = dict(found.problems), list[CatalogueEntry]()
    for entry in found.entries:
        try:
            config.steps.check(entry.manifest)
            right.append(entry)
        except StartError as error:
            problems[entry.manifest.name] = str(error)
    findings = []
    if right:
        names = ", ".join(f"{one.manifest.name}:{one.manifest.version}" for one in right)
        findings.append(DoctorFinding("models", "ok", f"whole by their digests: {names}"))
    rest = "; the others are served without it" if right else ""
    findings += [
        DoctorFinding("models", "warning", f"{one.manifest.name}: {one.instead}; {_in_version(one)}", advice)
        for one in right
        if one.instead
    ]
    findings += [
        DoctorFinding("models", "failure", f"{name}: {reason}{rest}", advice)
        for name, reason in sorted(problems.items())
    ]
    if right:
        sizes = [sum(loadable.artefact.stat().st_size for loadable in one.loadables) for one in right]
        findings.append(diagnosis.memory(_available_bytes(), sizes))
    return findings


def _in_version(entry: CatalogueEntry) -> str:
    return f"it is served in version {entry.manifest.version}"


def _absent(agent: dict[str, Any] | None) -> dict[str, str]:
    """Why the running agent does not serve models that it is to serve."""
    told = (agent or {}).get("absent")
    return {str(name): str(reason) for name, reason in told.items()} if isinstance(told, dict) else {}


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _processor() -> DoctorFinding:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    lines = (line.partition(":") for line in text.splitlines() if line.startswith(("flags", "Features")))
    return diagnosis.processor(platform.machine(), next((set(words.split()) for _, _, words in lines), set()))


def _ports(config: EdgeConfig, agents: Any) -> list[DoctorFinding]:
    """Args: agents: where the running agent says that it listens, by door; None where none runs."""
    keys = {"grpc": config.grpc_port, "http": config.http_port}
    listens = agents if isinstance(agents, dict) else {}
    return [
        diagnosis.port(
            f"{door}_port",
            format_address(config.host, port),
            free=is_free(config.host, port),
            ours=str(listens.get(door, "")).endswith(f":{port}"),
        )
        for door, port in keys.items()
        if port
    ]


def _certificate(config: EdgeConfig) -> tuple[Tls | None, DoctorFinding]:
    own = f"edge/{config.name}"
    try:
        tls = tls_of(config.tls, lambda: CertificateIdentity("edge", config.name))
    except StartError as error:
        return None, diagnosis.certificate(own, None, error=str(error))
    if tls is None:
        return None, diagnosis.certificate(own, None)
    begins, ends = validity(tls.fresh().cert)
    now = clock.utc_s()
    return tls, diagnosis.certificate(own, ends.timestamp() - now, begins_in_s=begins.timestamp() - now)


def _has_one_session(config: EdgeConfig) -> bool:
    """Whether the broker knows this device by its certificate or user, for which it may have one session."""
    try:
        return config.mqtt is not None and (config.tls is not None or BrokerUrl.parse(config.mqtt).username is not None)
    except ValueError:
        return False


async def _broker_of_agent(config: EdgeConfig) -> tuple[list[DoctorFinding], dict[str, str], float | None]:
    """Beside a running agent whose session one of ours would end: whether the broker answers, and no more."""
    assert config.mqtt is not None
    url = BrokerUrl.parse(config.mqtt)
    where = format_address(url.host, url.port)
    if why_not := await _why_not(where):
        return [diagnosis.broker(where, why_not, ())], {}, None
    words = "the session of this device's user is left to the running agent, whose log has what the broker lets it say"
    return [diagnosis.broker(where, "", [("info", words)])], {}, None


async def _broker(config: EdgeConfig, tls: Tls | None) -> tuple[list[DoctorFinding], dict[str, str], float | None]:
    """What the broker lets this device do; what gateways say where they may be dialled; this clock against theirs."""
    if config.mqtt is None:
        return [], {}, None
    try:
        url = BrokerUrl.parse(config.mqtt)
        topics, device = Topics(config.fleet), config.name
        name = f"{device}~cli"[-64:]
        listening = _BrokerProbe(AclCheck(topics, device), topics)
        link = MqttLink(
            config.mqtt,
            client_id=name,
            # Commands are for the agent.
            subscriptions=(*topics.for_device(device)[1:], (topics.states_of_all_fleets, 1)),
            draw=lambda: 0.5,
            on_activity=listening.wake,
            tls=tls.client_context if tls else None,
        )
    except ValueError as error:
        return [diagnosis.broker("mqtt", str(error), ())], {}, None
    where = format_address(url.host, url.port)
    if why_not := await _why_not(where):
        return [diagnosis.broker(where, why_not, ())], {}, None
    async with link:
        await listening.listen(link)
    fleets = diagnosis.fleets(config.fleet, listening.gateways, listening.others)
    return [diagnosis.broker(where, listening.error, listening.acl), *fleets], listening.links, listening.skew_s


class _BrokerProbe:
    """One session with the broker, and what came of it."""

    def __init__(self, acl: AclCheck, topics: Topics) -> None:
        self.error = f"no session within {PATIENCE_S:g} s"
        self.acl: list[tuple[str, str]] = []
        self.links: dict[str, str] = {}
        self.skew_s: float | None = None
        self.gateways: set[str] = set()  # of this fleet
        self.others: dict[str, str] = {}  # fleet → one of its gateways
        self._check = acl
        self._topics = topics
        self._woken = asyncio.Event()
        self._asked = 0

    def wake(self) -> None:
        self._woken.set()

    async def listen(self, link: MqttLink) -> None:
        done_by = clock.now() + PATIENCE_S
        while clock.now() < done_by:
            self._woken.clear()
            for event in link.take():
                self._take_in(event, link)
            if not self.error and len(self.acl) >= self._asked:
                done_by = min(done_by, clock.now() + _LISTEN_S)
            try:
                async with asyncio.timeout_at(done_by):
                    await self._woken.wait()
            except TimeoutError:
                return

    def _take_in(self, event: LinkEvent, link: MqttLink) -> None:
        match event:
            case MqttConnected():
                self.error = ""
                asked = self._check.topics(event.protocol)
                self._asked = max(1, len(asked))
                if not asked:
                    self._note(self._check.cannot_tell())
                for topic in asked:
                    link.publish(topic, b"{}", qos=1, answered=True)
            case MqttDisconnected():
                self.error = event.reason
            case PublishAck():
                self._note(self._check.answered(event.topic, event.refusal))
            case MqttMessage():
                self._hear(event)

    def _note(self, finding: Any) -> None:
        if finding is not None:
            self.acl.append((finding.severity, finding.words))

    def _hear(self, message: MqttMessage) -> None:
        if (other := self._topics.parse_other_fleet(message.topic)) and len(self.others) < _MOST_FLEETS:
            self.others.setdefault(*other)
        name = self._topics.parse_gateway(message.topic)
        if name is None:
            return
        self.gateways.add(name)
        try:
            state = decode_gateway_state(message.payload)
        except BadMessage:
            return
        self.links.update({address: f"gateway/{name}" for address in state.links if state.online})
        if not message.retained and state.utc_ms:
            self.skew_s = clock.utc_s() - state.utc_ms / 1e3


async def _reached(config: EdgeConfig, heard: dict[str, str]) -> dict[str, str]:
    addresses = sorted({**configured_gateways(config.gateways), **heard})
    return dict(zip(addresses, await asyncio.gather(*map(_why_not, addresses)), strict=True))


async def _why_not(address: str) -> str:
    """Why the address does not answer; "" when it does."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(PATIENCE_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return f"no answer within {PATIENCE_S:g} s"
    except (OSError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else None
        return os.strerror(number) if number is not None and number > 0 else str(error)
    writer.close()
    return ""


async def _agent(config: EdgeConfig, tls: Tls | None) -> dict[str, Any] | None:
    """The state that the running agent reports; None where no agent of this name answers."""
    host = "127.0.0.1" if config.host in WILDCARDS else config.host
    if tls is not None:
        return await _certified(host, config, tls)
    if not config.http_port:
        return None
    try:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"http://{format_address(host, config.http_port)}/v1/state") as answer,
        ):
            found: Any = await answer.json()
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("name") == config.name else None


async def _certified(host: str, config: EdgeConfig, tls: Tls) -> dict[str, Any] | None:
    """Over TLS a device may not call its own servers, which admit gateways and clients; its certificate suffices."""
    doors = {door: port for door, port in (("grpc", config.grpc_port), ("http", config.http_port)) if port}
    own = await asyncio.gather(
        *(_shows(CertificateIdentity("edge", config.name), host, port, tls) for port in doors.values())
    )
    found = {door: format_address(host, port) for (door, port), ours in zip(doors.items(), own, strict=True) if ours}
    return {"name": config.name, "addresses": found} if found else None


async def _shows(identity: CertificateIdentity, host: str, port: int, tls: Tls) -> bool:
    """Whether the server at this address shows a certificate of this name."""
    context = tls.client_context()
    context.check_hostname = False  # the name in the certificate's own form counts
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        async with asyncio.timeout(PATIENCE_S):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except (OSError, ValueError):
        return False
    whose = identity_of(alternative_names(writer.get_extra_info("peercert")))
    writer.close()
    return whose == identity


def _workers(agent: dict[str, Any] | None) -> list[DoctorFinding]:
    """What the running agent says of its workers; an older one, and one that is reached over TLS, says nothing."""
    told = (agent or {}).get("workers")
    found = []
    for one in told if isinstance(told, list) else []:
        try:
            found.append(diagnosis.worker(**{key: value for key, value in one.items() if key != "devices"}))
        except (TypeError, AttributeError):  # a newer agent's, with more to say
            found.append(DoctorFinding("worker", "ok", f"what the agent says of it is not understood: {one}"))
    return found


def _callers(agent: dict[str, Any] | None) -> list[str]:
    links = (agent or {}).get("links")
    return [f"{name} ({path})" for name, path in links.items()] if isinstance(links, dict) else []


def _store(agent: dict[str, Any] | None) -> list[DoctorFinding]:
    """What the running agent says of what it keeps; an older one, and one that is reached over TLS, says nothing."""
    told = (agent or {}).get("store")
    if agent is None or not isinstance(told, dict):
        return []
    return diagnosis.store(
        unavailable=str(told.get("unavailable") or ""),
        waiting=int(told.get("waiting") or 0),
        dead=int(told.get("dead") or 0),
        gateway=str(agent.get("gateway") or ""),
        has_gateway=agent.get("mode") == "online",
    )


def _mdns(config: EdgeConfig, agent: dict[str, Any] | None) -> list[DoctorFinding]:
    if config.mdns is None:
        return []
    told = (agent or {}).get("mdns")
    return [diagnosis.mdns(looks=config.help is not None, told=told if isinstance(told, dict) else None)]


def _helpers(agent: dict[str, Any] | None) -> list[dict[str, Any]] | None:
    """What the running agent says of the gateways that it may ask for help; None where it says nothing."""
    told = (agent or {}).get("help")
    return [one for one in told if isinstance(one, dict)] if isinstance(told, list) else None

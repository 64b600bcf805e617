"""The configuration of an edge agent: each key with its unit, default, and what a larger value buys and costs."""

from __future__ import annotations

import re
import socket
from fnmatch import fnmatchcase
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import SettingsConfigDict

from edge_agent.core.dial_policy import DialOut
from edge_agent.core.help.announcement import MOST_NAME_BYTES
from edge_agent.core.help.neighbour_addresses import neighbours_by_mqtt
from tidegate.config import OPERATOR_TOKEN_FILE, REPOSITORY_POLL_S, ProcessConfig, Section, Shares
from tidegate.engines.onnx_providers import known_device
from tidegate.fleet.topics import DEFAULT_FLEET, checked_name
from tidegate.models.manifest import EngineName
from tidegate.models.trust import TRUSTED
from tidegate.pipeline.config import StepsConfig, default_steps
from tidegate.runtime.logs import Format, Level
from tidegate.security.attestation.attester import AttestationConfig
from tidegate.security.tls import TlsConfig
from tidegate.servers.address import is_loopback
from tidegate.servers.foreign_sites import Origin
from tidegate.servers.limits_config import LimitsConfig, default_limits
from tidegate.serving.repository_control import ControlMode
from tidegate.tracing.config import TracingConfig
from tidegate.workers.sandbox import SandboxMode

Port = Annotated[int, Field(ge=0, le=65535)]
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_][A-Za-z0-9._-]*):(\d{1,5})")
Name = Annotated[str, AfterValidator(lambda name: checked_name(name, "a name in a fleet"))]


def is_gateway_address(text: str) -> bool:
    """Whether the text is HOST:PORT or [IPV6]:PORT, and cannot be taken for a scheme or a path."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found[1]) < 65536


def gateway_address(text: str) -> str:
    """`text` itself. Raises ValueError for what is no [NAME@]HOST:PORT."""
    if not is_gateway_address(text.rpartition("@")[2]) or text.startswith("@"):
        raise ValueError(f"{text!r} is no HOST:PORT or NAME@HOST:PORT")
    return text


def neighbour_address(text: str) -> str:
    """`text` itself. Raises ValueError for what is no NAME[@HOST:PORT]."""
    name, at, address = text.partition("@")
    checked_name(name, "a neighbour's name")
    if at and not is_gateway_address(address):
        raise ValueError(f"{text!r} is no NAME or NAME@HOST:PORT")
    return text


def _host_name() -> str:
    """This device's host name, as far as a fleet's names may be spelled."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname().split(".")[0]).strip("-._")[:64] or "edge"


class StoreConfig(Section):
    """What this device keeps while there is no way to a gateway (`docs/offline.md`)."""

    max_bytes: int = Field(
        64 * 2**20, ge=65_536, le=2**40, description="Bytes kept at most. More bears longer outages, and takes disk."
    )
    max_rows: int = Field(100_000, ge=16, le=10_000_000, description="Things kept at most, however small.")
    request_ttl_s: float = Field(
        86_400.0, gt=0, description="Powered seconds for which a deferred request is kept; then its ticket fails."
    )
    result_ttl_s: float = Field(604_800.0, gt=0, description="Powered seconds for which results and events are kept.")
    forward_results: Literal["none", "unsure", "all"] = Field(
        "none",
        description="Which answers given to local callers a gateway shall hear of later; each costs one disk sync.",
    )


class HelpConfig(Section):
    """What this device may ask its gateways to answer for its local callers (`docs/asking-for-help.md`)."""

    max_in_flight: int = Field(
        8,
        ge=1,
        le=1024,
        description="Requests that gateways are asked for at once; beyond, the device refuses as without help.",
    )
    max_request_bytes: int = Field(
        4 * 2**20,
        ge=1024,
        le=1 << 30,
        description="Largest request that is sent, in bytes of its tensors. More helps with more, and fills the link.",
    )
    models: tuple[str, ...] = Field(
        ("*",), min_length=1, max_length=256, description="Globs of the models whose requests may leave this device."
    )
    unsure: bool = Field(
        True, description="Whether a gateway is asked where the model here is not sure of its answer, too."
    )
    neighbours: tuple[Annotated[str, AfterValidator(neighbour_address)], ...] = Field(
        (),
        max_length=16,
        description="Other devices of this site that may be asked beside gateways, each as NAME, whose address comes "
        "over `mqtt`, or NAME@HOST:PORT of its gRPC port; over TLS the name is demanded. This device's own name is "
        "passed over. Each must allow it by its own `answer_neighbours`.",
    )

    def may_use(self, model: str) -> bool:
        """Whether requests to the model of this name may leave the device."""
        return any(fnmatchcase(model, one) for one in self.models)


class AnswerNeighboursConfig(Section):
    """What this device answers for other devices of its site (`docs/asking-for-help.md`)."""

    devices: tuple[str, ...] = Field(
        min_length=1, max_length=256, description="Globs of the devices that are answered, by their names."
    )
    models: tuple[str, ...] = Field(
        ("*",), min_length=1, max_length=256, description="Globs of the models for which they are answered."
    )
    max_in_flight: int = Field(
        2,
        ge=1,
        le=256,
        description="Requests of all neighbours together that wait or are computed here. More helps more, and a slot "
        "that is at one holds up an own caller until it is done.",
    )

    def may_ask(self, device: str) -> bool:
        """Whether the device of this name is answered."""
        return any(fnmatchcase(device, one) for one in self.devices)

    def may_use(self, model: str) -> bool:
        """Whether neighbours are answered for the model of this name."""
        return any(fnmatchcase(model, one) for one in self.models)


def _interface(text: str) -> str:
    """`text` itself. Raises ValueError for what is no IPv4 address."""
    IPv4Address(text)
    return text


class MdnsConfig(Section):
    """How neighbours find each other on the local network (`docs/asking-for-help.md`)."""

    devices: tuple[str, ...] = Field(
        (),
        max_length=256,
        description="Globs of the devices that may be asked once they were found, beside those of `help.neighbours`. "
        "Each must allow it by its own `answer_neighbours`, and over TLS prove its name.",
    )
    site: str = Field(
        "",
        max_length=64,
        description="Announced, and demanded of others: devices of another site, or fleet, on the same network are "
        "passed over.",
    )
    interfaces: tuple[Annotated[str, AfterValidator(_interface)], ...] = Field(
        (),
        max_length=16,
        description="IPv4 addresses of this device's interfaces on which it announces and looks. None: all but "
        "loopback.",
    )
    ttl_s: float = Field(
        60.0,
        ge=5.0,
        le=4500.0,
        description="Seconds for which others may believe an announcement. Less forgets a device that was killed "
        "sooner, and sends more.",
    )

    def may_ask(self, device: str) -> bool:
        """Whether the device of this name may be asked once it was found."""
        return any(fnmatchcase(device, one) for one in self.devices)

    @property
    def is_loopback(self) -> bool:
        """Whether nothing leaves this machine."""
        return bool(self.interfaces) and all(IPv4Address(one).is_loopback for one in self.interfaces)


class RolloutConfig(Section):
    """How models are rolled out to this device (`docs/rollout.md`)."""

    keys: tuple[Path, ...] = Field(
        min_length=1,
        description="Files with the public keys that may sign what this device shall run, a line each, as `tidegate "
        "keys signing create` writes them.",
    )
    groups: tuple[Name, ...] = Field(
        (),
        max_length=16,
        description="Groups whose documents this device goes by; its own document overrides them, then the first.",
    )
    servers: tuple[Annotated[str, Field(pattern=r"^https?://[^\s?#]+$")], ...] = Field(
        (), max_length=8, description="Base URLs of the servers of model files, instead of those in the documents."
    )
    recheck_s: float = Field(
        5.0, gt=0, le=3600, description="Seconds between looks at what a rollout waits for: link, window, disk, memory."
    )


def _default_store() -> StoreConfig:
    return StoreConfig.model_validate({})  # mypy does not see that every field has a default


class EdgeConfig(ProcessConfig):
    """Configuration of `tidegate edge`. Every key can also come from the environment, as TIDEGATE_EDGE_KEY."""

    model_config = SettingsConfigDict(env_prefix="TIDEGATE_EDGE_")

    name: Name = Field(
        default_factory=_host_name,
        description="This device in its fleet, unique there; answers say served-by edge/NAME. Default: the host name.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 lets a gateway on another machine in.")
    grpc_port: Port = Field(
        9001, description="Port of OIP gRPC and of the gateway's link stream; 0 takes any free one."
    )
    http_port: Port | None = Field(
        9000, description="Port of OIP HTTP for local callers; 0 takes any free one, null listens on none."
    )
    advertise: str | None = Field(
        None,
        pattern=r"^[^\s/]+:\d{1,5}$",
        description="HOST:PORT under which gateways reach this device's gRPC port. Default: host:grpc_port.",
    )
    dial_out: DialOut = Field(
        "auto",
        description="Whether this device dials gateways: `auto` those that do not reach it by themselves, `always` "
        "all, `never` none. A gateway needs `link_port` for it.",
    )
    gateways: tuple[Annotated[str, AfterValidator(gateway_address)], ...] = Field(
        (),
        max_length=64,
        description="HOST:PORT of gateways' `link_port`, or NAME@HOST:PORT; over TLS the name is then demanded, else "
        "a certificate for HOST. Beside these, gateways tell theirs over `mqtt`.",
    )
    dial_key_file: Path | None = Field(
        None,
        description="File with an API key with the right `dial-in`, shown to gateways that this device dials; none: "
        "its certificate (`tls`) says who it is, or nobody asks.",
    )
    help: HelpConfig | None = Field(
        None,
        description="Have gateways answer what this device cannot answer well for its local callers; a gateway needs "
        "`help` too. Pinned requests stay. None: such requests are refused, or kept (`store`).",
    )
    answer_neighbours: AnswerNeighboursConfig | None = Field(
        None,
        description="Answer other devices of this site that have this one in their `help.neighbours`, behind this "
        "device's own callers. None: nobody's requests but a gateway's and local callers'.",
    )
    mdns: MdnsConfig | None = Field(
        None,
        description="Announce this device to neighbours on the local network where it answers them, and look for "
        "those that it may ask, by multicast DNS. Needs `tls`, and the package zeroconf. None: nothing is sent, and "
        "nobody is looked for.",
    )
    model_repository: Path = Field(Path("models"), description="Folder with a folder per model and version.")
    model_control: ControlMode = Field(
        "none",
        description="Which models are served while it runs, as in Triton: none, those of the start (and of rollouts); "
        "explicit, also those that are loaded and unloaded by request (`tidegate model load`); poll, those that are "
        "in the repository, which is followed. Not with `rollout`. docs/loading-models.md.",
    )
    repository_poll_s: float = REPOSITORY_POLL_S
    operator_token_file: Path | None = OPERATOR_TOKEN_FILE
    allowed_engines: tuple[EngineName, ...] = Field(
        TRUSTED,
        description="Engines that may run here. A `torchscript` file is a program that can do what it likes: add it "
        "for files whose makers you trust. `tensorrt` is known, and refused.",
    )
    sandbox: SandboxMode = Field(
        "auto",
        description="Whether workers give up the network, and the disk but for a scratch folder: auto does what the "
        "kernel can and logs what is missing, require does not start without all of it, off leaves them everything.",
    )
    steps: StepsConfig = Field(
        default_factory=default_steps, description="What the steps of models' pipelines may do here: docs/pipelines.md."
    )
    models: tuple[str, ...] | None = Field(
        None,
        description="Models to serve: NAME in its highest version, or NAME:VERSION; one version of each. "
        "Default: all with an edge variant.",
    )
    mqtt: str | None = Field(
        None,
        description="The fleet's broker as mqtt://HOST:PORT or mqtts://HOST; null tells nobody, so gateways need a "
        "static target.",
    )
    tls: TlsConfig | None = Field(
        None,
        description="Encryption: mutual TLS with gateways, local callers over HTTP and the broker. None: plain text.",
    )
    attestation: AttestationConfig | None = Field(
        None, description="Evidence for gateways that require attested targets; needs `tls`. None: there is none."
    )
    fleet: Name = Field(
        DEFAULT_FLEET, description="The fleet to which this device belongs: the third level of MQTT topics."
    )
    state_dir: Path = Field(
        Path("state"), description="Folder for what must survive a restart: the session's number (epoch), and store.db."
    )
    device_file: Path | None = Field(
        None,
        description="YAML file with settings that may change while the agent runs, followed and laid over this "
        "configuration, such as a ConfigMap's (docs/configuring-devices.md). None: nobody changes any here.",
    )
    store: StoreConfig | None = Field(
        default_factory=_default_store,
        description="What is kept in state_dir/store.db for gateways that cannot be reached; null keeps nothing, and "
        "defers nothing.",
    )
    rollout: RolloutConfig | None = Field(
        None,
        description="Take models over the fleet's broker, signed, verified and tried before they are used; kept in "
        "state_dir/rollout. Null: the model repository alone.",
    )
    openai: bool = Field(
        True,
        description="Serve OpenAI's routes too, for models that take text, where `tokenizers` is installed; chats need "
        "`jinja2`.",
    )
    threads: int = Field(
        1, ge=1, le=256, description="Threads of one computation: more is faster alone, and takes cores from the rest."
    )
    device: Annotated[str, AfterValidator(known_device)] = Field(
        "cpu",
        description="Where ONNX models compute: cpu; or a device by name, such as openvino:GPU, cuda:1, tensorrt or "
        "qnn; or auto, which is whatever the installed ONNX Runtime has. Each is compared with the processor when a "
        "model starts, and left out where it is slower or answers otherwise (docs/accelerators.md).",
    )
    nice: int = Field(
        0,
        ge=0,
        le=19,
        description="How far workers step back for the device's own programs: 0 not at all, 19 computes only in time "
        "that nobody wants. The agent itself, which costs little, does not.",
    )
    cgroup: Path | None = Field(
        None,
        description="Folder of cgroup v2 that workers are put into, for limits on their CPU time and memory; none: "
        "they stay where the agent is.",
    )
    remember_costs: bool = Field(
        True,
        description="Keep in state_dir/costs.json what models cost here, so that a restart need not measure them; they "
        "are measured again where artefact, processor or threads are others, and always where `device` is not cpu.",
    )
    paced_slow: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="How many times slower than its artefact a model with `engine: paced` is here; others ignore it.",
    )
    slots: int = Field(
        1,
        ge=1,
        le=64,
        description="Models that compute at once, one call each. Cores used at most: slots x threads.",
    )
    max_queue_size: int = Field(
        64,
        ge=1,
        le=4096,
        description="Requests that may wait. More takes longer bursts; a request that would be late is refused anyway.",
    )
    shares: Shares = Field(
        {},
        description="Weights by which models share this device when there is not room for all, by model or by modality "
        "(text, image, sound, generation, other); others have 1. Deadlines decide first, shares in the long run. "
        "Nothing: deadlines alone decide.",
    )
    generation_cache_bytes: int | None = Field(
        None,
        ge=1 << 20,
        description="Most bytes of attention caches of a model that generates, for all answers that it is at; what has "
        "no room waits. More lets more and longer ones run at once. None: by the model, room for 2048 tokens in each "
        "slot, and for one whole context, as far as 2 GiB hold that.",
    )
    max_message_bytes: int = Field(
        64 * 1024 * 1024, ge=1024, le=1 << 30, description="Largest request or answer, in bytes, on every protocol."
    )
    allowed_origins: tuple[Origin, ...] = Field(
        (),
        description="Web sites whose pages may call the HTTP ports, as https://HOST[:PORT]; `*` is any. Pages of other "
        "sites are refused; programs are never asked.",
    )
    limits: LimitsConfig = Field(
        default_factory=default_limits, description="What strangers can make this process spend: docs/security.md."
    )
    warmup_budget_s: float = Field(
        10.0,
        gt=0,
        le=600,
        description="Seconds to measure what a model costs here; larger sizes are left out after it.",
    )
    hang_timeout_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="Most seconds that one computation may take before its worker counts as hung and is replaced. One "
        "that does not compute is given up earlier, after six times what the slowest of its size take and at least "
        "0.5 s.",
    )
    sensors: Path | None = Field(
        Path("/sys/class"),
        description="Folder where battery and temperature are read, as Linux has it; null reads none.",
    )
    metered: bool = Field(
        False, description="Whether the link to the gateway is paid by the byte: it then gets less, and smaller, work."
    )
    min_battery: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Share of the battery below which no new work is taken unless it charges; 0 works to the end.",
    )
    max_temperature_c: float | None = Field(
        95.0,
        ge=30,
        le=150,
        description="Degrees of the hottest processor zone at which no new work is taken, until it is 5 below; null "
        "leaves it to the kernel's throttling.",
    )
    tracing: TracingConfig | None = Field(
        None, description="Where spans of requests go: docs/observability.md. None: nowhere."
    )
    log_level: Level = Field("info", description="Least severity of logs on stderr; it can be changed at run time.")
    log_format: Format = Field(
        "text", description="Logs as `text` (key=value, or colours on a terminal), or as `json`, an object a line."
    )
    metrics_port: Port | None = Field(
        None,
        description="Port of Prometheus metrics over HTTP (/metrics) on `host`; 0 takes any free one, none: no such "
        "port. Needs the package prometheus-client.",
    )
    drain_s: float = Field(
        2.0, ge=0, le=60, description="Seconds that requests under way get at shutdown before they are refused."
    )

    @model_validator(mode="after")
    def _help_needs_a_gateway_to_dial(self) -> Self:
        if self.help is None:
            return self
        if self.mqtt is None and self.mdns is None and (unknown := neighbours_by_mqtt(self.help.neighbours, self.name)):
            raise ValueError(
                f"help.neighbours: the address of {unknown[0]!r} is told over `mqtt`, which is not set: set it, or say "
                f"{unknown[0]}@HOST:PORT, or set `mdns`"
            )
        if self.help.neighbours or (self.mdns is not None and self.mdns.devices):
            return self
        if self.dial_out == "never":
            raise ValueError("help dials a gateway's link_port, and dial_out: never forbids it: leave one of them out")
        if self.mqtt is None and not self.gateways:
            raise ValueError(
                "help needs a gateway to ask: set `gateways`, or `mqtt`, over which gateways tell theirs; or a "
                "neighbour (`help.neighbours`)"
            )
        return self

    @model_validator(mode="after")
    def _mdns_needs_somebody_and_proof(self) -> Self:
        mdns = self.mdns
        if mdns is None:
            return self
        if self.answer_neighbours is None and self.help is None:
            raise ValueError(
                "mdns announces a device that answers neighbours, and looks for those that one asks: set "
                "`answer_neighbours` or `help`, or leave it out"
            )
        if self.tls is None and not mdns.is_loopback:
            raise ValueError(
                "mdns: on a network anybody may announce any name, and only certificates tell who answers at an "
                "address: set `tls` (docs/security.md), or write addresses: help.neighbours: [NAME@HOST:PORT]"
            )
        if self.answer_neighbours is not None and is_loopback(self.host) and not mdns.is_loopback:
            raise ValueError(f"mdns would announce a device that listens on host: {self.host}: no other reaches that")
        if len(self.name) > MOST_NAME_BYTES:
            raise ValueError(f"mdns: the name {self.name!r} is longer than {MOST_NAME_BYTES} characters")
        return self

"""The configuration of a pool: each key with its unit, its default, and what a larger value buys and costs."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import SettingsConfigDict

from cloud_pool.core.health.adaptive_control import ControlLimits
from cloud_pool.core.health.worker_health import HealthLimits
from cloud_pool.vllm.vllm_config import VllmConfig
from tidegate.config import OPERATOR_TOKEN_FILE, REPOSITORY_POLL_S, ProcessConfig, Section, Shares
from tidegate.engines.onnx_providers import known_device
from tidegate.fleet.topics import DEFAULT_FLEET
from tidegate.models.manifest import EngineName
from tidegate.models.trust import TRUSTED
from tidegate.pipeline.config import StepsConfig, default_steps
from tidegate.placement_pin import Zone
from tidegate.runtime.logs import Format, Level
from tidegate.security.attestation.attester import AttestationConfig
from tidegate.security.tls import TlsConfig
from tidegate.servers.limits_config import LimitsConfig, default_limits
from tidegate.serving.repository_control import ControlMode
from tidegate.tracing.config import TracingConfig
from tidegate.workers.sandbox import SandboxMode

MAX_PORT: Final = 65535
MAX_NAME: Final = 64  # characters
Port = Annotated[int, Field(ge=0, le=MAX_PORT)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
Precision = Literal["fp32", "bf16", "fp16", "int8"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class RecyclingConfig(Section):
    """When a worker is replaced by a fresh one: `core/health/worker_health.py`, `tidegate/workers/recycling.py`."""

    enabled: bool = Field(True, description="False: workers are only replaced when they die or hang.")
    check_s: float = Field(10.0, gt=0, le=600, description="Seconds from one look at the workers to the next.")
    window: int = Field(6, ge=1, le=1000, description="Looks in which a sign must show often enough.")
    failures: int = Field(
        3, ge=1, le=1000, description="How often a sign must show in the window; more is later and surer."
    )
    drift_level: float = Field(
        10.0,
        ge=4,
        le=100,
        description="How long and how far batches may take longer than this worker's normal (h of a CUSUM): 9 is told "
        "sooner, 12 is false less often.",
    )
    p99_limit_s: float | None = Field(
        None,
        ge=0,
        description="Seconds that 99 of 100 batches must keep; 0: no limit. Default: by model, the larger of half of "
        "its `default_budget_s` and three times what warm-up measured for as much work.",
    )
    rss_ratio: float = Field(
        1.5, gt=1, le=100, description="Resident memory, as a multiple of what the warm worker had."
    )
    memory_horizon_s: float = Field(
        21600.0, ge=0, description="A leak is told when memory would be full within so many seconds; 0: never."
    )
    cpu_ratio: float = Field(
        0.95, gt=0, le=10, description="Share of its threads' cores that a worker may use while it has hardly any work."
    )
    min_gap_s: float = Field(
        300.0, ge=0, description="Seconds from the end of one replacement to the next at least, and up to a fifth more."
    )
    after_requests: int = Field(
        0, ge=0, description="Replace a worker after about so many answers (10 % more or less); 0: never for that."
    )

    @property
    def limits(self) -> HealthLimits:
        return HealthLimits(
            drift_level=self.drift_level,
            p99_s=inf if self.p99_limit_s == 0 else self.p99_limit_s,
            rss_ratio=self.rss_ratio,
            horizon_s=self.memory_horizon_s,
            cpu_ratio=self.cpu_ratio,
            window=self.window,
            failures=self.failures,
        )


class ControlConfig(Section):
    """What the pool may change about itself while it serves: `cloud_pool/core/health/adaptive_control.py`."""

    enabled: bool = Field(True, description="False: batch cap, concurrency and precision stay as configured.")
    latency_target_s: float | None = Field(
        None,
        ge=0,
        description="Seconds from arrival to answer that 99 of 100 should keep; 0: latency changes nothing. Default: "
        "by model, half of its `default_budget_s`, and at least three times the least batch that warm-up measured.",
    )
    memory_ratio: float = Field(
        0.9, gt=0, le=1, description="Share of the memory above which fewer workers compute at once, then less a batch."
    )
    dwell_s: float = Field(30.0, ge=0, description="Seconds that a knob rests after it was turned.")
    patience_s: float = Field(
        60.0,
        ge=0,
        description="Seconds that answers must be late before precision is lessened, and calm before back.",
    )
    degrade_to: Precision | None = Field(
        None,
        description="Precision that may answer callers who demand none while answers stay late; each answer says so "
        "(degraded=1). Its variants are loaded as well. None: never.",
    )

    @property
    def target_s(self) -> float | None:
        """Seconds for all models; None: each model's own; infinity: none."""
        return inf if not self.enabled or self.latency_target_s == 0 else self.latency_target_s

    @property
    def limits(self) -> ControlLimits:
        return ControlLimits(
            memory_ratio=self.memory_ratio if self.enabled else inf,
            dwell_s=self.dwell_s,
            patience_s=self.patience_s,
            may_degrade=self.enabled and self.degrade_to is not None,
        )


class PoolConfig(ProcessConfig):
    """Configuration of `tidegate pool`. Every key can also come from the environment, as TIDEGATE_POOL_KEY."""

    model_config = SettingsConfigDict(env_prefix="TIDEGATE_POOL_")

    name: Name = Field("pool", description="This pool's name; answers say served-by pool/NAME.")
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 lets a gateway on another machine in.")
    grpc_port: Port = Field(
        8101, description="Port of OIP gRPC and of the gateway's link stream; 0 takes any free one."
    )
    mqtt: str | None = Field(
        None,
        description="Broker at which this pool announces itself to gateways with `source: announce`, mqtt://host:1883 "
        "or mqtts://host (docs/discovery.md). None: gateways learn of it otherwise. Needs the package paho-mqtt.",
    )
    fleet: Name = Field(DEFAULT_FLEET, description="The fleet in which it announces itself, as its gateways call it.")
    advertise: str | None = Field(
        None,
        pattern=r"^[^\s/]+:\d{1,5}$",
        description="HOST:PORT under which gateways reach the gRPC port, for `mqtt`. Default: host:grpc_port.",
    )
    zone: Zone | None = Field(
        None, description="Where this pool says that it is, for pinned requests; for `mqtt`. None: as gateways have it."
    )
    tls: TlsConfig | None = Field(
        None, description="Encryption: mutual TLS with gateways, who must show one's certificate. None: plain text."
    )
    attestation: AttestationConfig | None = Field(
        None, description="Evidence for gateways that require attested targets; needs `tls`. None: there is none."
    )
    model_repository: Path = Field(Path("models"), description="Folder with a folder per model and version.")
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
        description="Models to serve: NAME in its highest version, or NAME:VERSION, also several of one model. "
        "Default: all with a pool variant.",
    )
    model_control: ControlMode = Field(
        "none",
        description="Which models are served while it runs, as in Triton: none, those of the start; explicit, also "
        "those that are loaded and unloaded by request (`tidegate model load`); poll, those that are in the "
        "repository, which is followed. docs/loading-models.md.",
    )
    repository_poll_s: float = REPOSITORY_POLL_S
    resident_models: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Most models in memory at once, with model_control: the others are loaded on demand, and what is "
        "least worth its memory goes out. None: all that are loaded stay.",
    )
    resident_bytes: int | None = Field(
        None,
        ge=1 << 20,
        description="Most bytes that models hold in memory together, with model_control, in the same way. None: any.",
    )
    state_dir: Path | None = Field(
        None,
        description="Folder in which what models were measured to cost here is kept, so that the next start need not "
        "measure again. None: nothing is kept.",
    )
    operator_token_file: Path | None = OPERATOR_TOKEN_FILE
    device: Device = Field(
        "auto",
        description="Where to compute: cpu, cuda, cuda:1, or auto, which is cuda where there is one.",
    )
    devices: tuple[Device, ...] = Field(
        (),
        max_length=64,
        description="Several devices instead of `device`, each with `workers` of its own, such as [cuda:0, cuda:1]. "
        "They are taken for alike: costs are measured on the first.",
    )
    onnx_device: Annotated[str, AfterValidator(known_device)] = Field(
        "cpu",
        description="Where ONNX models compute, if not on `device`: such as tensorrt, cuda:1 or openvino, or auto, "
        "which is whatever the installed ONNX Runtime has. Compared with the processor when the pool starts, and left "
        "out where it is slower or answers otherwise (docs/accelerators.md). cpu: nothing is tried; `device` holds.",
    )
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Worker processes on each device. On a CPU more of them serve small models better, and each holds "
        "all models in memory; on a GPU one is nearly always best.",
    )
    servers: int = Field(
        1,
        ge=1,
        le=64,
        description="Server processes, for models so fast that one process's Python core is the limit: each is a whole "
        "pool, NAME-0 at grpc_port, NAME-1 at the next port and so on, with `workers` of its own. They divide memory "
        "limits and the CPU's cores; each holds all models in memory and forms batches of its own (docs/pool.md).",
    )
    cpu_affinity: bool = Field(
        False,
        description="Pin each worker to cores of its own: steadier times on a machine that does nothing else, worse "
        "ones beside other work.",
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="Threads of one computation on the CPU; 0 takes all cores, divided among the workers; "
        "less leaves some.",
    )
    paced_slow: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="How many times slower than its artefact a model with `engine: paced` is here; others ignore it.",
    )
    precision: Precision = Field(
        "fp32",
        description="Which variants of a model to serve; a model that has none of it is served in what it has. "
        "Less precision is faster and less exact.",
    )
    also_precisions: tuple[Precision, ...] = Field(
        (),
        description="Variants of these precisions are loaded as well, for callers who demand one (tidegate-variant: "
        "bf16). Each costs its memory and its time to warm up.",
    )
    max_message_bytes: int = Field(
        64 * 1024 * 1024, ge=1024, le=1 << 30, description="Largest request or answer, in bytes, on every protocol."
    )
    limits: LimitsConfig = Field(
        default_factory=default_limits, description="What strangers can make this process spend: docs/security.md."
    )
    memory_limit_bytes: int | None = Field(
        None,
        ge=1 << 20,
        description="Most bytes to use of each device's memory, for models and batches together. Default: 90 % of what "
        "there is (GPU memory; on a CPU the machine's or the control group's, shared by all workers).",
    )
    generation_cache_bytes: int | None = Field(
        None,
        ge=1 << 20,
        description="Most bytes of attention caches of a model that generates on one device, for all answers that it "
        "is at; what has no room waits. More lets more and longer ones run at once. None: by the model, room for 2048 "
        "tokens in each slot, and for one whole context, as far as 2 GiB hold that.",
    )
    vllm: VllmConfig = Field(
        default_factory=lambda: VllmConfig.model_validate({}),
        description="vLLM as the engine of models that generate: docs/generating-models.md.",
    )
    shares: Shares = Field(
        {},
        description="Weights by which models share a device when there is not room for all, by model or by modality "
        "(text, image, sound, generation, other); others have 1. Deadlines decide first, shares in the long run.",
    )
    warmup_budget_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="Seconds to measure what all models cost here; larger sizes are left out after it.",
    )
    hang_timeout_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="Most seconds that one call may take before its worker counts as hung and is replaced. Batches are "
        "given up earlier, after six times what the slowest of their size take and at least 2 s.",
    )
    standby_workers: int = Field(
        0,
        ge=0,
        le=64,
        description="Further workers in reserve: warm, without traffic until a wait is long or a worker is out. Each "
        "costs the memory of a worker.",
    )
    standby_wait_s: float = Field(
        0.1, gt=0, description="Predicted seconds in the queue from which on the reserve helps."
    )
    recycling: RecyclingConfig = Field(
        default_factory=lambda: RecyclingConfig.model_validate({}),
        description="Replacing workers that are not what they were.",
    )
    control: ControlConfig = Field(
        default_factory=lambda: ControlConfig.model_validate({}), description="What the pool may change about itself."
    )
    metrics_port: Port | None = Field(
        None,
        description="Port of Prometheus metrics over HTTP (/metrics) on `host`; 0 takes any free one, none: no such "
        "port. Needs the package prometheus-client.",
    )
    drain_s: float = Field(
        2.0, ge=0, le=60, description="Seconds that requests under way get at shutdown before they are refused."
    )
    tracing: TracingConfig | None = Field(
        None, description="Where spans of requests go: docs/observability.md. None: nowhere."
    )
    log_level: Level = Field("info", description="Least severity of logs on stderr; it can be changed at run time.")
    log_format: Format = Field(
        "text", description="Logs as `text` (key=value, or colours on a terminal), or as `json`, an object a line."
    )

    def conflicts(self) -> list[str]:
        return list(self._against_several_servers()) if self.servers > 1 else []

    def _against_several_servers(self) -> Iterator[str]:
        count, last = self.servers, max(self.grpc_port, self.metrics_port or 0) + self.servers - 1
        if self.grpc_port == 0 or self.metrics_port == 0:
            yield "key 'servers': each has a port of its own; set grpc_port and metrics_port to the first"
        if last > MAX_PORT:
            yield f"key 'servers': {count} servers would need port {last}; set a lower first one"
        if self.metrics_port and abs(self.metrics_port - self.grpc_port) < count:
            yield (
                f"key 'metrics_port' = {self.metrics_port}: {count} servers listen on {self.grpc_port} to "
                f"{self.grpc_port + count - 1} for gRPC; set metrics_port {count} or more away from grpc_port"
            )
        if self.advertise is not None and int(self.advertise.rpartition(":")[2]) + count - 1 > MAX_PORT:
            yield f"key 'advertise': {count} servers would need a port beyond {MAX_PORT}; set a lower one"
        if len(longest := f"{self.name}-{count - 1}") > MAX_NAME:
            yield f"key 'name': {longest!r} is a server's name, and longer than {MAX_NAME} characters; shorten it"
        if self.tls is not None or self.attestation is not None:
            yield "key 'servers': with tls each pool needs a certificate of its name; start several pools"
        if self.operator_token_file is not None:
            yield "key 'operator_token_file': several servers would write one file; leave it out, each has its own"
        if self.cpu_affinity:
            yield "key 'cpu_affinity': workers of several servers would be pinned to the same cores; leave it out"

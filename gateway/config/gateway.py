"""The configuration of one gateway: its ports, its models, its targets and its policies, one field each."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from gateway.config.agreement import AgreementConfig
from gateway.config.artifacts import ArtifactsConfig
from gateway.config.attestation import AttestationPolicyConfig
from gateway.config.auth import AuthConfig
from gateway.config.cache import CacheConfig
from gateway.config.discovery import MAX_SOURCES, SourceConfig
from gateway.config.help import DeviceHelpConfig
from gateway.config.ingest import IngestConfig
from gateway.config.scaling import ScalingConfig, default_scaling
from gateway.config.store import SharedStoreConfig
from gateway.config.targets import TargetConfig
from gateway.config.tenants import TenantConfig
from gateway.core.access.networks import LOOPBACK, PRIVATE, AllowedNetworks
from gateway.core.admission.concurrency import MAX_IN_FLIGHT
from gateway.core.fleet.target import EdgeTransport
from gateway.core.placement.utility import COST_WEIGHT
from tidegate.config import REPOSITORY_POLL_S, ProcessConfig, Shares
from tidegate.fleet.topics import DEFAULT_FLEET
from tidegate.oip.tenant import RULE, is_tenant
from tidegate.runtime.logs import Format, Level
from tidegate.security.tls import TlsConfig
from tidegate.servers.address import is_loopback
from tidegate.servers.foreign_sites import Origin
from tidegate.servers.limits_config import LimitsConfig, default_limits
from tidegate.serving.repository_control import ControlMode
from tidegate.tracing.config import TracingConfig


class GatewayConfig(ProcessConfig):
    """One gateway's configuration, from YAML and the environment. The validators check what concerns two sections."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="TIDEGATE_GATEWAY_", env_nested_delimiter="__"
    )

    name: str = Field("main", min_length=1, description="This gateway's name towards targets and the broker.")
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that serve callers on this machine, on the same ports, beside a keeper and their parent "
        "(docs/gateway-workers.md). More use more cores, and cost some 150 MB each. 1: one process is all.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 lets other machines in.")
    http_port: int = Field(8000, ge=0, le=65535, description="OIP and OpenAI over HTTP; 0 takes a free port.")
    grpc_port: int = Field(8001, ge=0, le=65535, description="OIP over gRPC; 0 takes a free port.")
    metrics_port: int = Field(8002, ge=0, le=65535, description="Prometheus metrics under /metrics.")
    metrics_host: str | None = Field(None, description="Address of the metrics port; none: as `host`.")
    metrics_targets: int = Field(
        100,
        ge=1,
        le=10_000,
        description="Targets with time series of their own, those in trouble first; the rest share one series. More "
        "shows more, and costs Prometheus some 20 series each.",
    )
    metrics_dir: Path | None = Field(
        None,
        description="Folder in which gateways on this machine that share one address leave their counts for each "
        "other, so that a scrape of any gateway covers all of them. None: each answers for itself.",
    )
    metrics_credentials: bool = Field(
        False, description="Whether /metrics requires a credential with the right `metrics`; needs `auth`."
    )
    admin_port: int = Field(8003, ge=0, le=65535, description="State and explanations for operators.")
    admin_host: str = Field(
        "127.0.0.1",
        description="Address of the admin port. Any but a loopback one needs `auth`, and requires the right `admin`.",
    )
    admin_token_file: Path | None = Field(
        None,
        description="File for the token that changes over the admin port require without `auth`, readable by this "
        "account and root. None: admin-PORT.token in the first usable folder for run-time files (docs/security.md).",
    )
    console: bool = Field(True, description="Whether the admin port serves the operators' web page, under /.")
    auth: AuthConfig | None = Field(
        None, description="Which credentials are accepted; none: every caller is let in, and names its own tenant."
    )
    trials_file: Path | None = Field(
        None,
        description="JSON file that remembers which versions are on trial or were promoted (`tidegate model split`). "
        "None: forgotten when the gateway stops.",
    )
    model_control: ControlMode = Field(
        "none",
        description="Which models requests are taken for while it runs, as in Triton: none, those of the start; "
        "explicit, as they are loaded and unloaded by request (`tidegate model load`); poll, those that are in the "
        "repository, which is followed. Targets load and unload by themselves: docs/loading-models.md.",
    )
    repository_poll_s: float = REPOSITORY_POLL_S
    model_repository: Path | None = Field(
        None,
        description="Folder of models; the gateway needs their manifests and tokenizers only. None: foreign models.",
    )
    mqtt: str | None = Field(
        None, description="Broker that edges report to, mqtt://host:1883 or mqtts://host; none: static targets only."
    )
    ingest: IngestConfig | None = Field(
        None, description="Accept and compute what devices stored while offline; needs `mqtt`. None: devices keep it."
    )
    help: DeviceHelpConfig | None = Field(
        None,
        description="Answer requests of devices' local callers that the devices cannot answer well; needs `link_port`: "
        "docs/asking-for-help.md. None: devices refuse them.",
    )
    fleet: str = Field(
        DEFAULT_FLEET, min_length=1, description="Fleet whose edges are used; others on the broker are ignored."
    )
    advertised_networks: tuple[str, ...] | None = Field(
        None,
        description="Networks that devices' advertised addresses must lie in, such as [10.7.0.0/16]. Default: private "
        "ones, and loopback if the broker is on loopback too. Static targets are not checked.",
    )
    tls: TlsConfig | None = Field(
        None,
        description="Encryption: HTTPS and gRPC over TLS for callers, mutual TLS to targets and broker. None: plain "
        "text.",
    )
    attestation: AttestationPolicyConfig | None = Field(
        None,
        description="Which evidence is accepted, for requests that require attested targets; needs `tls`. None: no "
        "evidence is, so that such requests are refused.",
    )
    artifacts: ArtifactsConfig | None = Field(
        None,
        description="Model files for devices, and rollouts (`docs/rollout.md`). None: this gateway ships no models.",
    )
    targets: tuple[TargetConfig, ...] = Field((), description="Targets that are known without MQTT.")
    discovery: tuple[SourceConfig, ...] = Field(
        (),
        max_length=MAX_SOURCES,
        description="Sources of targets that come and go, beside `targets`: docs/discovery.md.",
    )
    link_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port for devices that cannot be dialled (behind NAT) and dial in instead; 0 takes a free one, "
        "none: no dial-in. Over TLS it demands a device's certificate, with `auth` alone the right `dial-in`.",
    )
    link_advertise: str | None = Field(
        None,
        pattern=r"^[^\s/]+:\d{1,5}$",
        description="HOST:PORT under which devices reach `link_port`, sent to them over MQTT. Default: host:link_port, "
        "and nothing if `host` is a wildcard.",
    )
    site_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port for upstream gateways, of which this one is then a target with `tier: site` (docs/sites.md); "
        "0 takes a free one, none: no upstream. Over TLS it demands a gateway's certificate; with `auth`, `tls` is "
        "required.",
    )
    max_dialled_in: int = Field(
        4096, gt=0, description="Devices that may have dialled in; each costs some 100 kB. Beyond, they are refused."
    )
    edge_transport: EdgeTransport = Field("link", description="How edges found over MQTT are called.")
    max_body_bytes: int = Field(
        64 * 2**20, gt=0, description="Largest body or message, in bytes; more takes memory times max_in_flight."
    )
    allowed_origins: tuple[Origin, ...] = Field(
        (),
        description="Web sites whose pages may call the HTTP ports, as https://HOST[:PORT]; `*` is any. Pages of other "
        "sites are refused; programs are never asked.",
    )
    limits: LimitsConfig = Field(
        default_factory=default_limits,
        description="What unauthenticated peers can make this process spend: docs/security.md.",
    )
    max_in_flight: int = Field(
        MAX_IN_FLIGHT,
        gt=0,
        description="Most requests in flight at once; the limit in force adapts below it. Beyond, callers get 429.",
    )
    adaptive_limit: bool = Field(
        True, description="Learn from targets' queues how many requests to let in; false: always `max_in_flight`."
    )
    shed: bool = Field(
        True, description="In overload refuse the least important requests first; false: only queues refuse."
    )
    tenants: dict[str, TenantConfig] = Field(
        {},
        description="What each tenant may use, by name; `default` is for all others. Only `auth` proves names.",
    )
    shares: Shares = Field(
        {},
        description="How much more than others' an answer of a model is worth, by model or by modality (text, image, "
        "sound, generation, other); others have 1. Placement counts it beside the tenant's weight, and overload "
        "refuses a model of weight 2 half as often. Give pools and edges the same.",
    )
    access_log: Literal["none", "text", "json"] = Field(
        "none", description="A line per request: `text` on stderr, `json` as events on stdout; costs some 50 µs each."
    )
    log_sample: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the requests in time that `access_log` has a line of. Requests that were late or failed, "
        "and requests whose trace is kept, always have a line.",
    )
    drain_s: float = Field(
        30.0,
        ge=0,
        le=600,
        description="Seconds that requests under way get at shutdown before they are cut; new ones are refused "
        "meanwhile. At least the longest budget of a request; a service manager's own timeout must be longer.",
    )
    tracing: TracingConfig | None = Field(
        None, description="Where spans of requests go: docs/observability.md. None: nowhere."
    )
    log_level: Level = Field("info", description="Least severity of logs on stderr; it can be changed at run time.")
    log_format: Format = Field(
        "text", description="Logs as `text` (key=value, or colours on a terminal), or as `json`, an object a line."
    )
    policy: Literal["cheapest", "value"] = Field(
        "value",
        description="`cheapest`: the cheapest target that is sure enough; `value` weighs quality, calibrated chance, "
        "cost and externality.",
    )
    cost_weight: float = Field(
        COST_WEIGHT,
        ge=0,
        le=1000,
        description="How many ordinary answers in time a second of a pool is worth, where a target is chosen: more "
        "sends more to devices and shortens the pool's bill, and loses answers once devices are full. 0: cost does not "
        "count. Batteries, heat and metered bytes are weighed by it too. Needs `policy: value`.",
    )
    cloud_budget: float | None = Field(
        None,
        gt=0,
        description="Pool-seconds a second that all gateways together may spend in the cloud; beyond it the price of "
        "the cloud rises until only requests that are worth it go there. Needs `policy: value`. Default: no limit.",
    )
    gateways: int = Field(
        1,
        ge=1,
        le=256,
        description="How many gateways there are at least, this one included: each has its part of every quota. Those "
        "of the fleet that MQTT shows are counted anyway, and quotas divided by what is asked of each.",
    )
    store: SharedStoreConfig | None = Field(
        None,
        description="A Redis or Valkey that all gateways of the fleet share: docs/gateways.md. None: they share by "
        "MQTT alone.",
    )
    sequence_home_key: Path | None = Field(
        None,
        description="File with a key that all gateways have, 32 characters or more a line: answers of sequences then "
        "have a token by which any of the gateways finds their state. The first line signs, each is believed.",
    )
    first_token_race: bool = Field(
        False,
        description="Whether a second target may be asked for the first token of a generation while the first one is "
        "still the better bet (`policy: value`). Fewer late first tokens on jittering links with room to spare; it "
        "costs the prompts of the losers, paid from the budget of hedges.",
    )
    planned_handover: bool = Field(
        False,
        description="Whether the answer of a generating model may be begun by one target and gone on with by a better "
        "one while the first still speaks (`policy: value`): docs/generation.md. It costs prompts that are computed "
        "twice, paid from the budget of hedges.",
    )
    shares_targets: bool | None = Field(
        None,
        description="Whether many other gateways send to the same targets: a decision then looks at a few that chance "
        "chose, so that gateways do not all send to the same one; for a gateway alone it costs a little. None: while "
        "there are a dozen gateways.",
    )
    agreement: AgreementConfig | None = Field(
        None,
        description="A few answers of devices are computed again in the pool, and a device whose answers drift is "
        "demoted: docs/agreement.md. None: answers are not compared.",
    )
    cache: CacheConfig | None = Field(
        None,
        description="Answers to requests that were answered before come from memory, for the models that are named: "
        "docs/known-answers.md. None: each request is computed.",
    )
    scaling: ScalingConfig = Field(
        default_factory=default_scaling, description="How many replicas of the pool the gateway asks for."
    )
    remember_decisions: int = Field(
        4096, ge=0, description="Finished requests that the flight recorder keeps, for `tidegate explain` and traces."
    )
    remember_bytes: int = Field(
        2**25, ge=0, description="Bytes for these requests; one with few targets takes some 800, with many 5 kB."
    )

    @model_validator(mode="after")
    def _check_one_process(self) -> Self:
        alone = {
            "site_port": self.site_port is not None,
            "model_control": self.model_control != "none",
            "agreement": self.agreement is not None,
        }
        if self.workers > 1 and (key := next((key for key, is_set in alone.items() if is_set), None)):
            raise ValueError(
                f"workers: {self.workers} and {key} do not go together: what {key} does is kept in one process. "
                "Leave one of them out, or start several gateways (docs/gateways.md)"
            )
        return self

    @model_validator(mode="after")
    def _certificates_are_requested(self) -> Self:
        requested = self.tls is not None and (self.tls.require_client_cert or self.tls.client_ca is not None)
        if self.auth is not None and self.auth.mtls is not None and not requested:
            raise ValueError(
                "auth.mtls has no effect: certificates are requested of callers by tls.client_ca, over HTTP "
                "only, or by tls.require_client_cert; set one of them, or leave auth.mtls out"
            )
        return self

    @model_validator(mode="after")
    def _operators_are_known(self) -> Self:
        if self.auth is None and not is_loopback(self.admin_host):
            raise ValueError(
                f"admin_host {self.admin_host!r} lets other machines in: set `auth`, or leave it at 127.0.0.1"
            )
        if self.auth is None and self.metrics_credentials:
            raise ValueError("metrics_credentials needs `auth`: without it there are no credentials to ask for")
        return self

    @model_validator(mode="after")
    def _evidence_is_bound_to_certificates(self) -> Self:
        if self.attestation is not None and self.tls is None:
            raise ValueError("attestation needs the section `tls`: evidence is bound to certificates")
        return self

    @model_validator(mode="after")
    def _dial_in_needs_the_link_stream(self) -> Self:
        if self.link_port is not None and self.edge_transport != "link":
            raise ValueError("link_port needs edge_transport: link; devices that dial out speak nothing else")
        return self

    @model_validator(mode="after")
    def _help_needs_the_port_that_devices_dial(self) -> Self:
        if self.help is not None and self.link_port is None:
            raise ValueError("help needs link_port: devices that ask for help dial it")
        return self

    @model_validator(mode="after")
    def _upstream_gateways_are_known(self) -> Self:
        if self.site_port is not None and self.auth is not None and self.tls is None:
            raise ValueError(
                "site_port with auth needs the section `tls`: an upstream gateway is believed what it says of callers, "
                "and without certificates any peer could pass for one"
            )
        return self

    @model_validator(mode="after")
    def _cloud_budget_needs_the_value_policy(self) -> Self:
        if self.cloud_budget is not None and self.policy != "value":
            raise ValueError(f"cloud_budget needs policy: value; {self.policy!r} does not weigh what the cloud costs")
        return self

    @model_validator(mode="after")
    def _cost_weight_needs_the_value_policy(self) -> Self:
        if "cost_weight" in self.model_fields_set and self.policy != "value":
            raise ValueError(
                f"cost_weight needs policy: value; {self.policy!r} takes the cheapest target that is sure enough, "
                "whatever that costs: leave cost_weight out, or set policy: value"
            )
        return self

    @model_validator(mode="after")
    def _sources_can_work(self) -> Self:
        labels = [one.label for one in self.discovery]
        twice = sorted({one for one in labels if labels.count(one) > 1})
        if twice:
            raise ValueError(f"discovery has the source {twice[0]} twice: leave one of them out")
        for one in self.discovery:
            if one.tls and self.tls is None:
                raise ValueError(f"discovery: {one.label} has tls: true, which needs the gateway's own section tls")
            if one.source == "announce" and self.mqtt is None:
                raise ValueError("discovery: source: announce needs `mqtt`: pools announce themselves at the broker")
        return self

    @model_validator(mode="after")
    def _rollouts_need_a_broker(self) -> Self:
        if self.artifacts is not None and self.mqtt is None:
            raise ValueError("artifacts needs `mqtt`: devices receive over the broker which model they shall run")
        if self.artifacts is not None and self.artifacts.advertise is None and self.artifacts.port is not None:
            host = self.artifacts.host or self.host
            if host in ("", "0.0.0.0", "::"):
                raise ValueError(f"artifacts.advertise is needed: with {host!r} no device knows where to fetch models")
        return self

    @field_validator("advertised_networks")
    @classmethod
    def _networks_are_valid(cls, networks: tuple[str, ...] | None) -> tuple[str, ...] | None:
        AllowedNetworks(networks or ())
        return networks

    @property
    def networks(self) -> AllowedNetworks:
        """The networks that devices' advertised addresses must lie in."""
        if self.advertised_networks is not None:
            return AllowedNetworks(self.advertised_networks)
        at_home = self.mqtt is not None and is_loopback(urlsplit(self.mqtt).hostname or "")
        return AllowedNetworks((*PRIVATE, *LOOPBACK) if at_home else PRIVATE)

    @field_validator("tenants")
    @classmethod
    def _tenants_have_valid_names(cls, tenants: dict[str, TenantConfig]) -> dict[str, TenantConfig]:
        for name in tenants:
            if not is_tenant(name):
                raise ValueError(f"{name!r} is no tenant's name: {RULE}")
        return tenants

    @field_validator("targets")
    @classmethod
    def _can_be_used(cls, targets: tuple[TargetConfig, ...], info: ValidationInfo) -> tuple[TargetConfig, ...]:
        for target in targets:
            if why := target.why_not(has_tls=info.data.get("tls") is not None):
                raise ValueError(f"target {target.name!r} {why}")
        targets = tuple(one for target in targets for one in target.each())  # of a pool with several servers
        ids = [target.spec.id for target in targets]
        twice = sorted({one for one in ids if ids.count(one) > 1})
        if twice:
            raise ValueError(f"two targets are called {', '.join(twice)}")
        return targets

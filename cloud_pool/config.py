"""What a pool can be told, with units, defaults and what more of it buys and costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tidegate.config import ProcessConfig
from tidegate.telemetry import Level

Port = Annotated[int, Field(ge=0, le=65535)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class PoolConfig(ProcessConfig):
    """Configuration of `tidegate pool`. Every key can also come from the environment, as TIDEGATE_POOL_KEY."""

    model_config = SettingsConfigDict(env_prefix="TIDEGATE_POOL_")

    name: Name = Field("pool", description="This pool's name; answers say served-by pool/NAME.")
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 lets a gateway on another machine in.")
    grpc_port: Port = Field(
        8101, description="Port of OIP gRPC and of the gateway's link stream; 0 takes any free one."
    )
    model_repository: Path = Field(Path("models"), description="Folder with a folder per model and version.")
    models: tuple[str, ...] | None = Field(
        None,
        description="Names of the models to serve, each in its highest version. Default: all with a pool variant.",
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="Where to compute: cpu, cuda, cuda:1, or auto, which is cuda where there is one. "
        "A machine with several GPUs runs one pool for each.",
    )
    threads: int = Field(
        0, ge=0, le=1024, description="Threads of one computation on the CPU; 0 takes all cores, less leaves some."
    )
    precision: Literal["fp32", "bf16", "fp16", "int8"] = Field(
        "fp32",
        description="Which variants of a model to serve; a model that has none of it is served in what it has. "
        "Less precision is faster and less exact.",
    )
    max_message_bytes: int = Field(
        64 * 1024 * 1024, ge=1024, le=1 << 30, description="Largest request or answer, in bytes, on every protocol."
    )
    warmup_budget_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="Seconds to measure what all models cost here; larger sizes are left out after it.",
    )
    hang_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="Seconds after which a batch counts as hung and its worker is replaced."
    )
    drain_s: float = Field(
        2.0, ge=0, le=60, description="Seconds that requests under way get at shutdown before they are refused."
    )
    log_level: Level = Field("info", description="Least severity of logs on stderr.")

"""The section `openai` of a target: another maker's server that speaks OpenAI's interface."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from tidegate.config import Section

MAX_MODELS = 256


class UpstreamConfig(Section):
    """What the gateway needs to know of such a server beside its address; what it can do is probed."""

    models: dict[str, str] = Field(
        min_length=1,
        max_length=MAX_MODELS,
        description="The models to use there: the name here, and the name by which the server knows it.",
    )
    api_key_file: Path | None = Field(
        None, description="File with the key for the server, read again when it changes. None: no key, or the next."
    )
    api_key_env: str | None = Field(
        None, min_length=1, description="Environment variable with the key, read once at the start. None: no key."
    )
    plain_text_key: bool = Field(
        False, description="Send the key over http:// to another machine, where whoever listens on the way can read it."
    )
    ca_file: Path | None = Field(
        None, description="CAs that the server's certificate must come from, PEM. None: those that the system trusts."
    )
    grade: Literal["ids", "prefill", "text"] | None = Field(
        None,
        description="The most that is used of the server: token ids, text that it can go on with, or text. `prefill` "
        "also says that a server can which no probe can tell of. None: as probed.",
    )
    variant: str = Field(
        "default", min_length=1, description="The variant of the models' manifests that it serves, for demands."
    )
    slots: int | None = Field(
        None,
        gt=0,
        le=4096,
        description="Answers that it writes at a time; more is expected to wait there. None: as it says, else 64.",
    )
    context: int | None = Field(
        None, gt=0, le=2**24, description="Tokens of a context. None: as it says; else it refuses what is too long."
    )
    default_max_tokens: int = Field(
        1024,
        gt=0,
        le=2**20,
        description="Tokens of an answer whose caller sets no limit, of models without a manifest; more costs more.",
    )
    default_budget_s: float = Field(
        60.0, gt=0, le=3600, description="Seconds for such a model's answer whose caller names no budget."
    )
    input_price: float = Field(0.0, ge=0, description="Money for a million tokens of prompts, in any currency.")
    output_price: float = Field(
        0.0,
        ge=0,
        description="Money for a million tokens of answers. Both raise the price of its answers in placement, and are "
        "charged to `cloud_budget` as seconds of a pool that costs `pool_price` an hour. 0: not paid by tokens.",
    )
    pool_price: float = Field(
        2.0, gt=0, description="Money for an hour of a pool, in the same currency; higher makes tokens look cheaper."
    )
    silence_s: float = Field(
        60.0, gt=0, le=3600, description="Seconds without a byte of an answer after which it is given up."
    )
    probe_interval_s: float = Field(
        5.0, ge=0.1, le=3600, description="Seconds between two looks whether it is there; each lists its models."
    )

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.api_key_file is not None and self.api_key_env is not None:
            raise ValueError("api_key_file and api_key_env are both set: the key comes from one of them")
        return self

    @property
    def has_key(self) -> bool:
        return self.api_key_file is not None or self.api_key_env is not None

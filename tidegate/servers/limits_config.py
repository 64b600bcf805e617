"""The section `limits` of a configuration: how much a stranger can make a process spend, with safe defaults.

One section for gateway, edge and pool, because requests reach all three, by the same protocols. What each number
protects is said where it is kept (`tidegate/oip/content_limits.py`, `tidegate/oip/http/body.py`, `limits.py`); here are
its bounds and what more of it buys and costs.
"""

from __future__ import annotations

from pydantic import Field

from tidegate.config import Section
from tidegate.oip.body_budget import BodyLimits
from tidegate.oip.content_limits import ContentLimits
from tidegate.servers.limits import ServerLimits


class LimitsConfig(Section):
    """The largest body is `max_body_bytes` (gateway) or `max_message_bytes` (edge, pool), beside this section."""

    max_tensors: int = Field(1024, ge=1, le=2**16, description="Inputs, or outputs asked for, of one request.")
    max_rank: int = Field(16, ge=1, le=64, description="Dimensions of a tensor.")
    max_elements: int = Field(2**26, ge=1, le=2**40, description="Elements of a tensor, as its shape says.")
    max_strings: int = Field(
        2**16, ge=1, le=2**24, description="Elements of BYTES tensors of a request; each takes some 0.3 µs to check."
    )
    max_string_bytes: int = Field(
        8 * 2**20, ge=1, le=2**31, description="Largest element of a BYTES tensor, and largest text in a parameter."
    )
    max_parameters: int = Field(256, ge=1, le=2**16, description="Parameters of a request, or of one of its tensors.")
    max_json_bytes: int = Field(
        32 * 2**20,
        ge=1024,
        le=2**31,
        description="JSON in a body, or all of a gRPC message but raw contents. Binary tensors are not counted.",
    )
    max_json_elements: int = Field(
        2**21,
        ge=1,
        le=2**30,
        description="Values in JSON, or in typed contents; each takes up to 64 bytes meanwhile.",
    )
    max_json_depth: int = Field(32, ge=4, le=500, description="Levels of JSON; a tensor of rank 16 needs 19.")
    max_prompt_tokens: int = Field(
        2**17, ge=1, le=2**24, description="Tokens of a prompt, where the model's context has room for more."
    )
    max_output_tokens: int = Field(
        2**16, ge=1, le=2**20, description="Tokens that one generation may ask for; each is a step of its engine."
    )
    max_decompression_ratio: float = Field(
        100.0, ge=1, le=2000, description="Times its compressed size that a body of more than 1 MiB may grow to."
    )
    max_held_bytes: int = Field(
        2**29,
        ge=2**16,
        description="Bytes of all bodies above 64 KiB that are inside at once; more callers get 429.",
    )
    body_idle_timeout_s: float = Field(10.0, gt=0, le=3600, description="Seconds without anything of a body.")
    body_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="Seconds for a body, and one more for every min_body_bytes_per_s of it."
    )
    answer_stall_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="Seconds that the caller of a streamed answer may read nothing of it."
    )
    min_body_bytes_per_s: float = Field(
        16_384.0, gt=0, description="Slowest that a body may come in the long run; less lets in thinner lines."
    )
    max_header_bytes: int = Field(
        8190, ge=256, le=2**20, description="One header or the request line; gRPC metadata: twice this in all."
    )
    max_headers: int = Field(128, ge=8, le=4096, description="Headers of one request over HTTP.")
    header_timeout_s: float = Field(
        10.0, gt=0, le=600, description="Seconds from a request's first byte to its last header, and for a handshake."
    )
    idle_timeout_s: float = Field(
        75.0, gt=0, le=86_400, description="Seconds that a connection without requests is kept."
    )
    max_connections: int = Field(
        0,
        ge=0,
        le=2**20,
        description="Connections of all ports together: half are for inference over HTTP, an eighth for operators and "
        "model files, the rest for gRPC and devices that dial in. 0: the open files that the system allows the "
        "process, less 512.",
    )
    max_connections_per_client: int = Field(
        1024,
        ge=1,
        le=2**20,
        description="HTTP connections of one IPv4 address or IPv6 /64; idle ones make room for new ones. Raise it "
        "behind a proxy that hides its callers' addresses.",
    )
    max_streams: int = Field(1024, ge=1, le=2**20, description="Calls at once on one gRPC connection; others wait.")

    @property
    def content(self) -> ContentLimits:
        return ContentLimits(
            max_tensors=self.max_tensors,
            max_rank=self.max_rank,
            max_elements=self.max_elements,
            max_strings=self.max_strings,
            max_string_bytes=self.max_string_bytes,
            max_parameters=self.max_parameters,
            max_json_bytes=self.max_json_bytes,
            max_json_elements=self.max_json_elements,
            max_json_depth=self.max_json_depth,
            max_prompt_tokens=self.max_prompt_tokens,
            max_output_tokens=self.max_output_tokens,
        )

    @property
    def body(self) -> BodyLimits:
        return BodyLimits(
            max_ratio=self.max_decompression_ratio,
            idle_s=self.body_idle_timeout_s,
            grace_s=self.body_timeout_s,
            min_bytes_per_s=self.min_body_bytes_per_s,
            max_held_bytes=self.max_held_bytes,
            stall_s=self.answer_stall_timeout_s,
        )

    @property
    def door(self) -> ServerLimits:
        return ServerLimits(
            max_connections=self.max_connections,
            max_connections_per_client=self.max_connections_per_client,
            max_header_bytes=self.max_header_bytes,
            max_headers=self.max_headers,
            header_timeout_s=self.header_timeout_s,
            idle_timeout_s=self.idle_timeout_s,
            max_streams=self.max_streams,
        )


def default_limits() -> LimitsConfig:
    return LimitsConfig.model_validate({})

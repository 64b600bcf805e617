"""Reports between gateways side by side: what one needs to know of another to share quotas, the cloud and the pool.

They go to `peer/GATEWAY`, which devices can neither read nor write: names of tenants are in them. Not retained, and QoS
0: the next one comes within a second. What comes from the network is hostile: sizes, names and ranges are bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, field

from gateway.core.peers.demand_terms import DemandTerms
from gateway.core.peers.fair_share import QuotaUse
from gateway.core.peers.peers import CloudSpend, PeerReport
from tidegate.fleet.messages import Epoch, Name, decode_bounded

MAX_BYTES: Final = 262_144  # of some 1,024 quotas with all their kinds
_Rate = Annotated[float, Meta(ge=0.0, le=1e15)]
_Factor = Annotated[float, Meta(ge=1.0, le=1e5)]
_Key = Annotated[str, Meta(min_length=1, max_length=256)]
_Kinds = Annotated[dict[Annotated[str, Meta(max_length=16)], tuple[_Rate, _Rate]], Meta(max_length=8)]
_Asked = Annotated[dict[_Key, _Kinds], Meta(max_length=1024)]


class GatewayReport(msgspec.Struct, frozen=True, omit_defaults=True):
    gateway: Name = field(name="gw")
    epoch: Epoch = field(name="gepoch")
    asked: _Asked = field(name="ask", default_factory=dict)
    need: tuple[_Rate, _Rate, _Rate] | None = None  # forecast, variance, backlog
    cloud: tuple[_Rate, _Factor] | None = None  # spend, price
    v: Literal[1] = field(default_factory=lambda: 1)

    @property
    def content(self) -> PeerReport:
        need = None if self.need is None else DemandTerms(*self.need)
        cloud = None if self.cloud is None else CloudSpend(*self.cloud)
        asked = {name: {kind: QuotaUse(*one) for kind, one in kinds.items()} for name, kinds in self.asked.items()}
        return PeerReport(asked, need, cloud)


def encode_report(gateway: str, epoch: int, report: PeerReport) -> bytes:
    asked = {name: _rounded(kinds) for name, kinds in report.asked.items()}
    return msgspec.json.encode(GatewayReport(gateway, epoch, asked, report.need, report.cloud))


def decode_report(payload: bytes) -> GatewayReport:
    """Raises BadMessage."""
    return decode_bounded(_decoder, payload, MAX_BYTES)


def _rounded(kinds: Mapping[str, QuotaUse]) -> dict[str, tuple[float, float]]:
    return {kind: (float(f"{one.asked:.4g}"), float(f"{one.used:.4g}")) for kind, one in kinds.items()}


_decoder: Final = msgspec.json.Decoder(GatewayReport)

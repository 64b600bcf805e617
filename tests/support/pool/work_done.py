"""How much the targets of a fleet have computed, by their own statistics (OIP `ModelStatistics`)."""

from __future__ import annotations

import grpc

from tests.support.faults.fleet_stack import FleetStack
from tidegate.rpc import oip_pb2

_METHOD = "/inference.GRPCInferenceService/ModelStatistics"


def computed(fleet: FleetStack) -> int:
    """Rows that engines have computed so far, those of their warm-up left out, at all parts that are alive."""
    parts = [part for name, part in fleet.parts.items() if name != "gateway" and part.alive]
    return sum(_rows(part.addresses["grpc"]) for part in parts)


def _rows(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary(
            _METHOD,
            request_serializer=oip_pb2.ModelStatisticsRequest.SerializeToString,
            response_deserializer=oip_pb2.ModelStatisticsResponse.FromString,
        )
        found = ask(oip_pb2.ModelStatisticsRequest(), timeout=30.0)
    return sum(one.inference_count for one in found.model_stats)

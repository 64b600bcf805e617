"""The description of a model as OIP and Triton's extensions print it: metadata, configuration, statistics, index.

Each is one plain dict with Triton's field names. The HTTP server encodes it as it is and the gRPC server fills the
message of the same fields from it, so the two protocols cannot differ.

perf_analyzer reads `/config` and `/stats` before it sends anything. With `max_batch_size` above zero a client adds a
batch axis of its own, so the configuration then leaves the first axis out; at zero shapes are taken as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tidegate import __version__
from tidegate.models.manifest import Manifest, TensorSpec
from tidegate.oip.host import ModelHost, ModelStatistics, TimedCount
from tidegate.oip.repository.model_control import ModelStatus, Statuses
from tidegate.types import Datatype

Json = dict[str, Any]

NONE_KNOWN: Final[Statuses] = {}

# Names of Triton's extensions that are really served here.
EXTENSIONS: Final = (
    "classification",
    "model_repository",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "generate",
)


def server_metadata(host: ModelHost) -> Json:
    return {"name": host.server_name, "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(manifest: Manifest, versions: Sequence[str]) -> Json:
    """Shapes in full, with -1 for an axis of any length."""
    return {
        "name": manifest.name,
        "versions": list(versions),
        "platform": manifest.platform,
        "inputs": [_tensor_metadata(spec) for spec in manifest.inputs],
        "outputs": [_tensor_metadata(spec) for spec in manifest.outputs],
    }


def model_config(manifest: Manifest) -> Json:
    first = 1 if manifest.max_batch_size else 0
    delay_us = int(manifest.batching.max_queue_delay_s * 1e6)
    return {
        "name": manifest.name,
        "platform": manifest.platform,
        "backend": "tidegate",
        "version_policy": {"specific": {"versions": [int(manifest.version)]}} if manifest.version.isdigit() else {},
        "max_batch_size": manifest.max_batch_size,
        "input": [_config_input(spec, first) for spec in manifest.inputs],
        "output": [_config_output(spec, first) for spec in manifest.outputs],
        "instance_group": [],
        "default_model_filename": "",
        "parameters": {},
        "model_transaction_policy": {"decoupled": manifest.generative is not None},
        # Present only if clients may batch: it promises that rows of several requests are joined.
        **({"dynamic_batching": {"max_queue_delay_microseconds": delay_us}} if manifest.max_batch_size else {}),
    }


def model_statistics(statistics: Sequence[ModelStatistics]) -> Json:
    return {"model_stats": [_statistics(model) for model in statistics]}


def repository_index(host: ModelHost, statuses: Statuses = NONE_KNOWN, *, only_ready: bool = False) -> list[Json]:
    """Of every version that the host knows, and of those that only `statuses` does."""
    served = {(one.name, one.version): _status(host, one) for one in host.manifests()}
    entries = [
        {"name": name, "version": version, "state": status.state, "reason": status.reason}
        for (name, version), status in {**served, **statuses}.items()
    ]
    return [entry for entry in entries if entry["state"] == "READY" or not only_ready]


def versions_of(host: ModelHost, name: str) -> list[str]:
    return sorted((manifest.version for manifest in host.manifests() if manifest.name == name), key=_version_order)


def _version_order(version: str) -> tuple[int, str]:
    return (int(version), "") if version.isdecimal() else (0, version)


def _tensor_metadata(spec: TensorSpec) -> Json:
    return {"name": spec.name, "datatype": spec.datatype.value, "shape": _dims(spec)}


def _config_input(spec: TensorSpec, first: int) -> Json:
    return {
        "name": spec.name,
        "data_type": _config_type(spec.datatype),
        "format": "FORMAT_NONE",
        "dims": _dims(spec)[first:],
        "is_shape_tensor": False,
        "allow_ragged_batch": False,
        "optional": spec.optional,
    }


def _config_output(spec: TensorSpec, first: int) -> Json:
    return {
        "name": spec.name,
        "data_type": _config_type(spec.datatype),
        "dims": _dims(spec)[first:],
        "label_filename": "",
        "is_shape_tensor": False,
    }


def _config_type(datatype: Datatype) -> str:
    return "TYPE_STRING" if datatype is Datatype.BYTES else f"TYPE_{datatype.value}"


def _dims(spec: TensorSpec) -> list[int]:
    return [entry if isinstance(entry, int) else -1 for entry in spec.shape]


def _statistics(model: ModelStatistics) -> Json:
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": model.last_inference_ms,
        "inference_count": model.inference_count,
        "execution_count": model.execution_count,
        "inference_stats": {
            "success": _tally(model.success),
            "fail": _tally(model.fail),
            "queue": _tally(model.queue),
            "compute_input": _tally(_no_time(model.compute_infer)),
            "compute_infer": _tally(model.compute_infer),
            "compute_output": _tally(_no_time(model.compute_infer)),
            "cache_hit": _tally(TimedCount()),
            "cache_miss": _tally(TimedCount()),
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": _tally(_no_time(tally)),
                "compute_infer": _tally(tally),
                "compute_output": _tally(_no_time(tally)),
            }
            for rows, tally in sorted(model.batches.items())
        ],
        "memory_usage": [],
        "response_stats": {},
    }


def _no_time(computed: TimedCount) -> TimedCount:
    """As often as `computed`, in no time: perf_analyzer aborts unless the three compute counts are the same."""
    return TimedCount(computed.count, 0)


def _tally(tally: TimedCount) -> Json:
    return {"count": tally.count, "ns": tally.ns}


def _status(host: ModelHost, manifest: Manifest) -> ModelStatus:
    if host.model_ready(manifest.name, manifest.version):
        return ModelStatus("READY")
    return ModelStatus("UNAVAILABLE", "no target can serve it now")

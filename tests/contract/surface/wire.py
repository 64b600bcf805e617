"""What crosses a wire or lies on a disk: protos, messages and files by field, databases, topics, lists of words.

Structures are written with the names that they have when they are encoded, nested ones in their place. Words are taken
from every module of the product: enumerations and `Literal`s, each as a set without the name that the code has for it.
`literals` has every word that stands between quotes in the source: keys of JSON answers, headers, reasons, events.
"""

from __future__ import annotations

import ast
import enum
import importlib
import json
import pkgutil
import re
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal, get_args, get_origin

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from msgspec import inspect as kinds

import edge_agent.core.rollout_machine
import edge_agent.delivery.documents
import edge_agent.delivery.journal
import edge_agent.delivery.model_store
import edge_agent.offline.queue_db
import gateway.core.history.trace_format
import gateway.core.versions.canary
import gateway.core.versions.traffic_split
import gateway.delivery.rollouts.order
import gateway.identity.key_file
import gateway.ingest.journal
import gateway.operate.log_levels
import gateway.operate.trial_routes
import simulator.scenarios.scenario
import tidegate.engines.encoder.bert
import tidegate.engines.encoder.torch_packed
import tidegate.engines.paced
import tidegate.fleet.messages
import tidegate.fleet.offers
import tidegate.fleet.pool_messages
import tidegate.fleet.reported
import tidegate.fleet.stored
import tidegate.metrics.sharing
import tidegate.models.manifest
import tidegate.netsim.proxy.control
import tidegate.netsim.proxy.scenario
import tidegate.oip.http.codec
import tidegate.oip.http.json_data
import tidegate.openai.embeddings
import tidegate.rollout.desired
import tidegate.rollout.golden
import tidegate.rollout.golden_prompts
import tidegate.rollout.plan
import tidegate.rollout.signing
import tidegate.security.attestation.measurement
import tidegate.security.attestation.proof
import tidegate.security.attestation.software
import tidegate.tools.delivery.order
import tidegate.workers.channel
from simulator.scenarios.scenario_file import SCENARIOS
from tidegate.fleet.messages import MAX_BYTES, MAX_COMMAND_BYTES
from tidegate.fleet.pool_messages import MAX_POOL_BYTES
from tidegate.fleet.topics import QOS, RETAINED, DeviceTopic, PoolTopic, StoredTopic, Topics
from tidegate.link import streams
from tidegate.netsim.links.profile import LinkProfile
from tidegate.netsim.proxy.scenario import PROFILES
from tidegate.oip.status import error_headers, error_metadata, grpc_status, http_status
from tidegate.outcome import ERRORS, Deferred, ServeError
from tidegate.rpc import link_pb2, oip_pb2
from tidegate.storage.database import connect

STRUCTURES: Final[Mapping[str, Any]] = {
    "MQTT birth": tidegate.fleet.messages.Birth,
    "MQTT inv": tidegate.fleet.messages.Inventory,
    "MQTT hb": tidegate.fleet.messages.Heartbeat,
    "MQTT death": tidegate.fleet.messages.Death,
    "MQTT gw state": tidegate.fleet.messages.GatewayState,
    "MQTT pool state": tidegate.fleet.pool_messages.PoolState,
    "MQTT pool death": tidegate.fleet.pool_messages.PoolDeath,
    "MQTT cmd": tidegate.fleet.messages.Command,
    "MQTT reported": tidegate.fleet.reported.Reported,
    "MQTT evt and res": tidegate.fleet.stored.Forwarded | tidegate.fleet.stored.Inquiry,
    "MQTT rcpt": tidegate.fleet.stored.Receipt,
    "MQTT desired": tidegate.rollout.desired.DesiredDocument,
    "link offers": tuple[tidegate.fleet.offers.ModelOffer, ...],
    "attestation proof": tidegate.security.attestation.proof.Proof,
    "attestation evidence": tidegate.security.attestation.software.Evidence,
    "attestation statement": tidegate.security.attestation.software.Statement,
    "attestation measurement": tidegate.security.attestation.measurement.Measurement,
    "rollout signed document": tidegate.rollout.signing.SignedDocument,
    "rollout plan": tidegate.rollout.plan.ModelPlan,
    "rollout order": gateway.delivery.rollouts.order.RolloutOrder,
    "rollout state": gateway.core.versions.canary.CanaryState,
    "rollout golden cases": tidegate.rollout.golden.Golden,
    "rollout golden prompts": tidegate.rollout.golden_prompts.GoldenPrompts,
    "rollout device that is listed": tidegate.tools.delivery.order.ListedDevice,
    "device rollout journal": edge_agent.delivery.journal.JournalContent,
    "device rollout": edge_agent.core.rollout_machine.Rollout,
    "device generation": edge_agent.delivery.model_store.Generation,
    "device trust": edge_agent.delivery.documents.TrustRecord,
    "device store usage": edge_agent.offline.queue_db.StoreUsage,
    "recording": gateway.core.history.trace_format.RecordedHeader
    | gateway.core.history.trace_format.RecordedTarget
    | gateway.core.history.trace_format.RecordedRequest
    | gateway.core.history.trace_format.RecordedLink
    | gateway.core.history.trace_format.RecordedEnd,
    "keys file": gateway.identity.key_file.KeyFile,
    "trials file": gateway.core.versions.traffic_split.TrafficSplits,
    "admin trial": gateway.operate.trial_routes.SplitRequest,
    "admin log level": gateway.operate.log_levels.LogLevelChange,
    "manifest": tidegate.models.manifest.Manifest,
    "paced artefact": tidegate.engines.paced.PacedModel,
    "packed artefact": tidegate.engines.encoder.torch_packed.PackedMetadata,
    "bert architecture": tidegate.engines.encoder.bert.Architecture,
    "metrics file of one gateway": tidegate.metrics.sharing.MetricsSnapshot,
    "OIP request": tidegate.oip.http.codec.RequestJson,
    "OIP request's input": tidegate.oip.http.json_data.InputJson,
    "OpenAI embeddings": tidegate.openai.embeddings.EmbeddingsBody,
    "worker channel": tidegate.workers.channel.LoadEngine
    | tidegate.workers.channel.RunEngine
    | tidegate.workers.channel.CancelRun
    | tidegate.workers.channel.WorkerHello
    | tidegate.workers.channel.EngineLoaded
    | tidegate.workers.channel.RunCompleted
    | tidegate.workers.channel.RunSkipped
    | tidegate.workers.channel.RunFailed,
    "simulated scenario": simulator.scenarios.scenario.Scenario,
    "link profile": LinkProfile,
    "link scenario": tidegate.netsim.proxy.scenario.LinkScenario,
    "link toxic": tidegate.netsim.proxy.scenario.Toxic,
    "link partition": tidegate.netsim.proxy.control.PartitionOrder,
}
SCHEMAS: Final[Mapping[str, Iterable[str]]] = {
    "device's store": edge_agent.offline.queue_db.SCHEMA,
    "gateway's ingest": gateway.ingest.journal.SCHEMA,
}
_PYPROJECT: Final = Path(__file__).parents[3] / "pyproject.toml"
_WORD: Final = re.compile(r"^[A-Za-z0-9][\w./:{}~*;=+@-]*\Z", re.ASCII)
_NOT_FOR_OTHERS: Final = frozenset(
    {"getattr", "setattr", "hasattr", "TypeVar", "ParamSpec", "NewType", "cast", "find_spec"}
)


# Messages and files


def messages() -> dict[str, str]:
    """Each structure's fields, by their encoded names: type, bounds, and default or "required"."""
    found: dict[str, str] = {}
    for name, kind in STRUCTURES.items():
        _describe(name, kinds.type_info(kind), "", found, ())
    return found


def _describe(at: str, info: kinds.Type, more: str, found: dict[str, str], inside: tuple[type, ...]) -> None:
    nested: list[tuple[str, kinds.StructType]] = []
    found[at] = _type(info, "", nested) + more
    for suffix, struct in nested:
        if struct.cls in inside:
            continue
        under = f"{at}{suffix}" + (f" <{struct.tag}>" if struct.tag is not None else "")
        for place, field in enumerate(struct.fields):
            name = str(place) if struct.array_like else field.encode_name
            _describe(f"{under} / {name}", field.type, _default(field), found, (*inside, struct.cls))


def _type(info: kinds.Type, suffix: str, nested: list[tuple[str, kinds.StructType]]) -> str:
    match info:
        case kinds.StructType():
            nested.append((suffix, info))
            config = info.cls.__struct_config__
            facts = {
                "array": info.array_like,
                f"tag {info.tag_field}={info.tag}": info.tag is not None,
                "refuses unknown keys": info.forbid_unknown_fields,
                "omits defaults": config.omit_defaults,
            }
            return ", ".join(["object", *(word for word, holds in facts.items() if holds)])
        case kinds.UnionType():
            return " | ".join(sorted(_type(one, suffix, nested) for one in info.types))
        case kinds.EnumType():
            return f"one of {sorted(one.value for one in info.cls)}"
        case kinds.LiteralType():
            return f"one of {sorted(info.values, key=str)}"
        case kinds.DictType():
            key, value = (
                _type(info.key_type, f"{suffix}{{key}}", nested),
                _type(info.value_type, f"{suffix}{{}}", nested),
            )
            return f"{{{key}: {value}}}{_bounds(info)}"
        case kinds.TupleType():
            parts = [_type(one, f"{suffix}[{place}]", nested) for place, one in enumerate(info.item_types)]
            return f"[{', '.join(parts)}]"
        case kinds.CollectionType():
            return f"[{_type(info.item_type, f'{suffix}[]', nested)}, …]{_bounds(info)}"
        case kinds.Metadata():
            return _type(info.type, suffix, nested)
        case kinds.CustomType():
            return "custom"
    return type(info).__name__.removesuffix("Type").lower() + _bounds(info)


def _bounds(info: kinds.Type) -> str:
    named = {name: getattr(info, name) for name in info.__struct_fields__ if not name.endswith("type")}  # type: ignore[attr-defined]
    shown = [f"{name} {value}" for name, value in named.items() if value is not None and not isinstance(value, bool)]
    return f" ({', '.join(shown)})" if shown else ""


def _default(field: kinds.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    elif field.default is not msgspec.NODEFAULT:
        value = "" if isinstance(field.default, msgspec.Raw) else field.default
    else:
        return ", required"
    return f" = {json.dumps(msgspec.to_builtins(value, enc_hook=str), ensure_ascii=False, sort_keys=True)}"


# Protos and databases


def protos() -> dict[str, Any]:
    """Services, methods, messages and fields of both protos, and where the link is."""
    found = {one.package: _proto(one) for one in (link_pb2.DESCRIPTOR, oip_pb2.DESCRIPTOR)}
    return {**found, "link's method": streams.PATH}


def _proto(file: FileDescriptor) -> dict[str, Any]:
    services = {
        f"service {service.name}": {
            one.name: f"{one.input_type.full_name} to {one.output_type.full_name}" for one in service.methods
        }
        for service in file.services_by_name.values()
    }
    tree: dict[str, Any] = dict(services)
    for message in file.message_types_by_name.values():
        tree |= _message(message)
    for one in file.enum_types_by_name.values():
        tree[f"enum {one.name}"] = {value.name: str(value.number) for value in one.values}
    return tree


def _message(message: Descriptor, under: str = "") -> dict[str, Any]:
    name = f"{under}{message.name}"
    found: dict[str, Any] = {f"message {name}": {field.name: _field(field) for field in message.fields} or "empty"}
    for one in message.nested_types:
        found |= _message(one, f"{name}.")
    for one in message.enum_types:
        found[f"enum {name}.{one.name}"] = {value.name: str(value.number) for value in one.values}
    return found


def _field(field: FieldDescriptor) -> str:
    types = {number: name for name, number in vars(FieldDescriptor).items() if name.startswith("TYPE_")}
    kind = types[field.type].removeprefix("TYPE_").lower()
    named = field.message_type or field.enum_type
    parts = [str(field.number), named.full_name if named is not None else kind]
    if field.is_repeated:
        parts.append("repeated")
    if field.containing_oneof is not None:
        parts.append(f"of {field.containing_oneof.name}")
    return " ".join(parts)


def databases() -> dict[str, Any]:
    """Tables and indices as SQLite has them once the product has made them."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, schema in SCHEMAS.items():
            with closing(connect(Path(folder) / f"{name}.db", tuple(schema))) as db:
                rows = db.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL")
                found[name] = {f"{row['type']} {row['name']}": " ".join(row["sql"].split()) for row in rows}
                found[name]["user_version"] = db.execute("PRAGMA user_version").fetchone()[0]
    return found


# Topics, headers, words


def headers() -> dict[str, Any]:
    """Topics, and what travels with each refusal; other headers are among the literals."""
    topics = Topics("FLEET")
    up = {str(kind): f"{topics.up('DEVICE', kind)} qos {QOS[kind]} retained {kind in RETAINED}" for kind in DeviceTopic}
    limits = {str(kind): f"at most {limit} bytes" for kind, limit in MAX_BYTES.items()}
    return {
        "topic": {
            **up,
            **{str(kind): topics.stored("DEVICE", kind, "GATEWAY") for kind in StoredTopic},
            "probe": topics.probe("DEVICE"),
            "command": topics.command("DEVICE"),
            "desired": topics.desired("DEVICE"),
            "desired of a group": topics.group_desired("GROUP"),
            "receipt": topics.receipt("DEVICE"),
            "gateway's state": topics.gateway_state("GATEWAY"),
            "gateway's heartbeat": topics.gateway_heartbeat("GATEWAY"),
            **{f"pool's {kind}": topics.pool("POOL", kind) for kind in PoolTopic},
            "subscribed by gateways, pools": [f"{name} qos {qos}" for name, qos in topics.of_pools],
            "subscribed by gateways": [f"{name} qos {qos}" for name, qos in topics.for_gateways],
            "subscribed by gateways, stored": [f"{name} qos {qos}" for name, qos in topics.stored_for("GATEWAY")],
            "subscribed by devices": [f"{name} qos {qos}" for name, qos in topics.for_device("DEVICE")],
            "subscribed for rollouts": [f"{name} qos {qos}" for name, qos in topics.for_rollout("DEVICE", ("GROUP",))],
        },
        "message": {**limits, "cmd": f"at most {MAX_COMMAND_BYTES} bytes", "pool": f"at most {MAX_POOL_BYTES} bytes"},
        "refusal": {error.code: _refusal(error) for error in ERRORS},
    }


def _refusal(kind: type[ServeError]) -> dict[str, Any]:
    error = kind("words", retry_after_s=1.5)
    error.request_id = "ID"
    if isinstance(error, Deferred):
        error.ticket = "TICKET"
    return {
        "HTTP": {"status": http_status(error), **error_headers(error)},
        "gRPC": {"status": grpc_status(error), **dict(error_metadata(error))},
        "retry_elsewhere": kind.retry_elsewhere,
    }


def words() -> dict[str, Any]:
    """Closed lists of the product, as sets of words, and the names of what it ships."""
    enums, literals_ = set(), set()
    for module in _modules():
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, enum.Enum) and value.__module__ == module.__name__:
                enums.add(_list(one.value for one in value))
            elif get_origin(value) is Literal:
                literals_.add(_list(get_args(value)))
    return {
        "enumeration": dict.fromkeys(enums, ...),
        "literal": dict.fromkeys(literals_, ...),
        "link profile": dict.fromkeys((path.stem for path in PROFILES.glob("*.yaml")), ...),
        "scenario": dict.fromkeys((path.stem for path in SCENARIOS.glob("*.yaml")), ...),
    }


def _list(values: Iterable[Any]) -> str:
    return ", ".join(sorted(str(one) for one in values))


def literals() -> dict[str, Any]:
    """Words between quotes in the source: keys of dictionaries, events to a parent, and all others."""
    keys, events, others = set(), set(), set()
    for node in (one for tree in _sources() for one in _spoken(tree)):
        match node:
            case ast.Dict():
                keys.update(_constants(node.keys))
            case ast.Subscript():
                keys.update(_constants([node.slice]))
            case ast.Call() if _called(node) == "emit":
                fields = sorted(one.arg for one in node.keywords if one.arg)
                events.update(f"{event}({', '.join(fields)})" for event in _constants(node.args[:1]))
            case ast.Constant():
                others.update(_constants([node]))
    return {name: dict.fromkeys(found, ...) for name, found in (("key", keys), ("event", events), ("word", others))}


def _spoken(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that nobody outside reads: docstrings, types, slots, names of attributes."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        left.extend(_parts(node))


def _parts(node: ast.AST) -> Iterable[ast.AST]:
    match node:
        case ast.AnnAssign(value=value):
            return [] if value is None else [value]
        case ast.arguments():
            return [one for one in (*node.defaults, *node.kw_defaults) if one is not None]
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.args, *node.decorator_list, *node.body]
        case ast.Call() if _called(node) in _NOT_FOR_OTHERS:
            return []
        case ast.Assign(targets=[ast.Name(id="__slots__" | "__all__" | "__match_args__")]):
            return []
        case ast.Expr(value=ast.Constant()) | ast.JoinedStr():
            return []
    return ast.iter_child_nodes(node)


def _constants(nodes: Iterable[ast.AST | None]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_word(node.value):
            yield node.value


def _is_word(text: str) -> bool:
    """Not prose, and not the path of a module of ours."""
    return _WORD.match(text) is not None and _ours().match(text) is None


def _called(node: ast.Call) -> str:
    called = node.func
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


@cache
def _ours() -> re.Pattern[str]:
    return re.compile(rf"^({'|'.join(_packages())})(\.\w+)+\Z")


@cache
def _packages() -> tuple[str, ...]:
    """The product's, from the build's own list."""
    project = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))
    return tuple(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


def _sources() -> Iterator[ast.Module]:
    for package in _packages():
        for path in sorted((_PYPROJECT.parent / package).rglob("*.py")):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                yield ast.parse(path.read_text(encoding="utf-8"))


def _modules() -> Iterator[ModuleType]:
    for package in _packages():
        for one in pkgutil.walk_packages([str(_PYPROJECT.parent / package)], f"{package}."):
            if not one.name.endswith(("__main__", "_pb2", "_pb2_grpc")):
                try:
                    yield importlib.import_module(one.name)
                except ModuleNotFoundError as error:  # an engine that is not installed
                    if (error.name or "").partition(".")[0] in _packages():
                        raise

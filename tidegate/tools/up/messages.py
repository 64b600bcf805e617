"""The texts of `tidegate up`: request lines, the table's rows, the commands to copy.

Pure: values in, words out. Everything shown about a request comes from the gateway's `served` event, and everything
about targets from the gateway's own `/v1/state`, so the screen never shows more than the system knows.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tidegate.tools.up.plan import LOOPBACK, Plan, ProcessPlan

Json = Mapping[str, Any]
REASON_MAX_CHARACTERS: Final = 160

EXAMPLE_TEXT = "Time and tide wait for no one."
EXAMPLE_CHAT: Final = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 40,
    "stream": True,
}
# "hello world" between the markers that BERT-style models want; the tokenizer of `minilm` makes these of it.
EXAMPLE_TOKENS = [101, 7592, 2088, 102]


def request_line(served: Json) -> str:
    """One line for one request: model, cost, budget, where it went, why, latency, budget left."""
    words = (
        f"{served.get('model', '?'):<8}",
        f"{_cost(served):<20}",
        f"budget {_milliseconds(served.get('budget_ms')):>8}",
        f"→ {_where(served):<20}",
        f"{_why(served):<12}",
        f"{_milliseconds(served.get('latency_ms')):>8}",
        f"{_milliseconds(served.get('budget_left_ms'))} left",
        _pace(served),
        "" if served.get("served_by") else shortened(str(served.get("reason") or "")),
    )
    return "  ".join(word for word in words if word)


def shortened(words: str) -> str:
    return words if len(words) <= REASON_MAX_CHARACTERS else words[: REASON_MAX_CHARACTERS - 1] + "…"


def _cost(served: Json) -> str:
    if (prompt := served.get("prompt_tokens")) is not None:
        return f"{prompt}+{served.get('completion_tokens')} tokens"
    units, feature = served.get("units"), served.get("feature") or ""
    if units is None:
        return ""
    cost_class = served.get("cost_class")
    return f"{units:g} {feature}".rstrip() + (f" ({cost_class})" if cost_class else "")


def _pace(served: Json) -> str:
    """How soon the first token of a streamed answer came, and how fast the others."""
    first_ms, rate = served.get("first_token_ms"), served.get("tokens_per_s")
    if first_ms is None:
        return ""
    return f"ttft {_milliseconds(first_ms)}" + ("" if rate is None else f"  {rate:.0f} tok/s")


def _where(served: Json) -> str:
    where = " ".join(part for part in (served.get("served_by"), served.get("variant")) if part)
    return where or "nowhere"


def _why(served: Json) -> str:
    """The reason of the placement; for a request that was not answered as it should be, its outcome."""
    outcome, reason = served.get("outcome") or "ok", served.get("reason") or ""
    if not served.get("served_by"):
        return outcome
    return reason if outcome == "ok" else f"{outcome}, {reason}"


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} ms" if abs(value) < 100 else f"{value:.0f} ms"


def process_rows(plan: Plan, pids: Mapping[str, int | None], state: Json) -> list[tuple[str, str, str, str]]:
    """(part, address, process id, models and variants) of each process, in the order in which a request meets them."""
    models = {target.get("address"): _models(target) for target in state.get("targets", ())}
    order = {"gateway": 0, "edge": 1, "pool": 2, "broker": 3, "link": 4}
    processes = sorted(plan.processes, key=lambda process: order[process.role])
    return [
        (one.name, _addresses(plan, one), str(pids.get(one.name) or "-"), _models_of(plan, one, models))
        for one in processes
    ]


def _models_of(plan: Plan, process: ProcessPlan, models: Mapping[Any, str]) -> str:
    """A part's models are listed under the address where it is reached; a link has none of its own."""
    return "" if process.role == "link" else models.get(plan.reached_at(process), "")


def _addresses(plan: Plan, process: ProcessPlan) -> str:
    if process.role == "gateway" and process.name != "gateway":  # beside the first
        scheme, host = process.address.partition("://")[0], process.address.rpartition(":")[0]
        http, grpc, metrics, admin = (one.number for one in process.ports[:4])
        return "\n".join(
            (
                f"HTTP {host}:{http}",
                f"gRPC {host.removeprefix(scheme + '://')}:{grpc}",
                f"metrics {host}:{metrics}",
                f"console {scheme}://{LOOPBACK}:{admin}",
            )
        )
    if process.role == "gateway":
        return f"HTTP {plan.http}\ngRPC {plan.grpc}\nmetrics {plan.metrics}\nconsole {plan.admin}"
    if process.role == "link":
        return f"{process.address} → {process.leads_to}\ncontrol {process.control}"
    return process.address


def _models(target: Json) -> str:
    return "\n".join(
        f"{model.get('name')} {_variants(model.get('variants', ()))}{' (paced)' if model.get('paced') else ''}"
        for model in target.get("models", ())
    )


def _variants(variants: Iterable[Any]) -> str:
    """Names of variants, which a gateway may list as names or as objects that have one."""
    return ", ".join(str(one.get("name") if isinstance(one, Mapping) else one) for one in variants)


def commands(plan: Plan, python: str, state: Json) -> list[tuple[str, str]]:
    """(what it shows, the command) of the commands to copy: three for the demo's text model, where it is served."""
    served = {model.get("name") for model in state.get("models", ())}
    chat = [("a chat, token by token", _curl(plan, "/v1/chat/completions", EXAMPLE_CHAT, "curl -iN"))]
    if "minilm" not in served:
        status = [("what is served, and by whom", f"{_trust(plan)}tidegate status --admin {plan.admin}")]
        return (chat if "smollm2" in served else []) + status
    return [
        ("text in, vector out", _curl(plan, "/v1/embeddings", {"model": "minilm", "input": EXAMPLE_TEXT})),
        ("tensors in, tensors out", _curl(plan, "/v2/models/minilm/infer", _infer_body())),
        ("the OpenAI SDK", f"{_trust(plan)}{_key(plan)}{shlex.quote(python)} -c {shlex.quote(_sdk_program(plan))}"),
        *(chat if "smollm2" in served else ()),
    ]


def console(plan: Plan) -> str:
    """Where to look on."""
    return f"console, in a browser: {plan.admin}/"


def admission(plan: Plan) -> str:
    """Which callers are let in, and with which credentials."""
    if plan.secure is None:
        return "no API keys are configured: any key, or none, is accepted"
    return (
        f"an API key for the commands below: {plan.secure.api_key_file}; more: `tidegate keys create --file "
        f"{plan.secure.keys_file} --tenant NAME`\nwhat clients must trust: {plan.secure.ca}"
    )


def _curl(plan: Plan, path: str, body: Json, command: str = "curl -i") -> str:
    # -i: the headers show where the answer was made, and why there
    secure = plan.secure
    words = [command]
    if secure is not None:
        header = f'-H "Authorization: Bearer $(cat {shlex.quote(str(secure.api_key_file))})"'
        words += ["--cacert", shlex.quote(str(secure.ca)), header]
    words += [plan.http + path, "-H 'content-type: application/json'", "-d", shlex.quote(json.dumps(body))]
    return " ".join(words)


def _trust(plan: Plan) -> str:
    """OpenSSL's own variable, which Python and httpx follow."""
    return f"SSL_CERT_FILE={shlex.quote(str(plan.secure.ca))} " if plan.secure else ""


def _key(plan: Plan) -> str:
    """OpenAI's own variable."""
    return f'OPENAI_API_KEY="$(cat {shlex.quote(str(plan.secure.api_key_file))})" ' if plan.secure else ""


def _infer_body() -> Json:
    shape = [1, len(EXAMPLE_TOKENS)]
    return {
        "inputs": [
            {"name": "input_ids", "datatype": "INT64", "shape": shape, "data": EXAMPLE_TOKENS},
            {"name": "attention_mask", "datatype": "INT64", "shape": shape, "data": [1] * len(EXAMPLE_TOKENS)},
        ]
    }


def _sdk_program(plan: Plan) -> str:
    key = "" if plan.secure else ', api_key="any"'
    return (
        "from openai import OpenAI; "
        f'client = OpenAI(base_url="{plan.http}/v1"{key}); '
        f'print(client.embeddings.create(model="minilm", input="{EXAMPLE_TEXT}").data[0].embedding[:4])'
    )


def ready_line(plan: Plan, pids: Mapping[str, int | None]) -> str:
    """The one line of `tidegate up --json`."""
    processes = [
        {"role": one.role, "name": one.name, "pid": pids.get(one.name), "address": one.address}
        for one in plan.processes
    ]
    secure = {"ca": str(plan.secure.ca), "api_key_file": str(plan.secure.api_key_file)} if plan.secure else {}
    return json.dumps(
        {
            **secure,
            "event": "ready",
            "http": plan.http,
            "grpc": plan.grpc,
            "metrics": plan.metrics,
            "admin": plan.admin,
            "processes": processes,
            "links": {one.name.removeprefix("link-"): one.control for one in plan.processes if one.role == "link"},
        }
    )

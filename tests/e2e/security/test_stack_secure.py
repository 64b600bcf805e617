"""`tidegate up --secure`: it does what the plain system does, and refuses peers without credentials.

The tests of the first part are the plain system's own, collected here again with another `stack`.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import openai
import paho.mqtt.client as mqtt
import pytest
import tritonclient.grpc as triton_grpc
from paho.mqtt.enums import CallbackAPIVersion

from tests.e2e.conftest import MENDED_WITHIN_S
from tests.e2e.stack import Stack, eventually
from tests.e2e.test_stack_failures import (  # noqa: F401  # collected here again
    test_a_killed_edge_gets_no_request_and_is_used_again_when_it_is_back,
    test_the_broker_may_die_without_a_request_noticing,
)
from tests.e2e.test_stack_serving import (  # noqa: F401  # collected here again
    SHORT,
    check_embedding,
    embed,
    embed_at,
    test_a_demanded_precision_is_served_where_it_is_to_be_had,
    test_a_short_text_is_answered_by_an_edge_and_the_headers_say_why,
    test_a_text_beyond_the_edges_limit_is_answered_by_the_pool_and_the_headers_say_why,
    test_metrics_are_where_the_ready_line_says,
    test_the_ready_line_names_every_process_and_stdout_holds_nothing_else,
    tokens,
    triton_inputs,
)
from tests.support.mqtt.brokers import MOSQUITTO
from tidegate.fleet.topics import DEFAULT_FLEET
from tidegate.mqtt.broker_url import BrokerUrl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.needs_mosquitto,
    pytest.mark.timeout(240),
    pytest.mark.skipif(MOSQUITTO is None, reason="the Mosquitto broker is not installed"),
]


@pytest.fixture(scope="module")
def shared_stack(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The system with all of it on, and its CA as the one that this process trusts meanwhile."""
    running = Stack(tmp_path_factory.mktemp("secure"), "--models", str(models), "--secure")
    try:
        ready = running.wait_ready()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSL_CERT_FILE", ready.ready["ca"])
            yield ready
    finally:
        running.stop()


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    eventually(shared_stack.whole, MENDED_WITHIN_S, f"every target ready\n{shared_stack.words}\n{shared_stack.logs}")
    return shared_stack


def ca_of(stack: Stack) -> Path:
    return Path(stack.ready["ca"])


def context(stack: Stack, who: str | None = None) -> ssl.SSLContext:
    """A client that trusts the system's CA, and shows the certificate of one of its parts."""
    trusting = ssl.create_default_context(cafile=str(ca_of(stack)))
    if who is not None:
        trusting.load_cert_chain(ca_of(stack).parent / f"{who}.crt", ca_of(stack).parent / f"{who}.key")
    return trusting


def at(stack: Stack, name: str) -> str:
    return next(str(one["address"]) for one in stack.ready["processes"] if one["name"] == name)


def test_unmodified_clients_get_in_with_a_key_and_the_ca(stack: Stack) -> None:
    key = stack.headers["authorization"].removeprefix("Bearer ")
    with openai.OpenAI(base_url=f"{stack.http}/v1", api_key=key) as client:
        assert len(client.embeddings.create(model="minilm", input=SHORT).data[0].embedding) == 384
    with triton_grpc.InferenceServerClient(stack.grpc, ssl=True, root_certificates=str(ca_of(stack))) as triton:
        answer = triton.infer("minilm", triton_inputs(triton_grpc, tokens(12)), headers=stack.headers)
        check_embedding(answer)


def test_callers_without_a_key_or_with_a_wrong_one_are_refused(stack: Stack) -> None:
    assert embed_at(stack.http, SHORT)[0] == 401
    assert embed_at(stack.http, SHORT, authorization="Bearer tg_0_0")[0] == 401
    with pytest.raises(openai.AuthenticationError), openai.OpenAI(base_url=f"{stack.http}/v1", api_key="any") as client:
        client.embeddings.create(model="minilm", input=SHORT, extra_headers={"x-stainless-retry-count": "0"})


def test_plain_text_gets_nothing_from_any_port(stack: Stack) -> None:
    for address in (stack.http, stack.ready["metrics"], stack.ready["admin"]):
        with pytest.raises((urllib.error.URLError, OSError)):
            urllib.request.urlopen(address.replace("https://", "http://"), timeout=30)
    for address in (stack.grpc, at(stack, "pool"), at(stack, "edge-1")):
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=3)


def test_an_edge_and_the_pool_are_for_the_gateway_only(stack: Stack) -> None:
    pki = ca_of(stack).parent
    for name, role in (("edge-1", "edge"), ("pool", "pool")):
        answers = {}
        for who in ("gateway/gateway", "edge/edge-2"):
            pair = (pki / f"{who}.key").read_bytes(), (pki / f"{who}.crt").read_bytes()
            credentials = grpc.ssl_channel_credentials(ca_of(stack).read_bytes(), *pair)
            override = (("grpc.ssl_target_name_override", f"{name}.{role}.tidegate.internal"),)
            with grpc.secure_channel(at(stack, name), credentials, options=override) as channel:
                try:
                    channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=30)
                    answers[who] = "OK"
                except grpc.RpcError as error:
                    answers[who] = error.code().name  # type: ignore[attr-defined]
        assert answers == {"gateway/gateway": "OK", "edge/edge-2": "PERMISSION_DENIED"}


def test_a_device_cannot_speak_as_another_at_the_systems_broker(stack: Stack) -> None:
    url = BrokerUrl.parse(at(stack, "broker"))
    reasons: dict[str, bool] = {}
    client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
    client.tls_set_context(context(stack, "edge/edge-2"))
    mids: dict[int, str] = {}
    client.on_publish = lambda *args: reasons.update({mids[args[2]]: not args[3].is_failure})
    connected: list[bool] = []
    client.on_connect = lambda *args: connected.append(not args[3].is_failure)
    client.connect(url.host, url.port)
    client.loop_start()
    try:
        eventually(lambda: bool(connected), 30, "a session")
        for device in ("edge-1", "edge-2"):
            mids[client.publish(f"tidegate/v1/{DEFAULT_FLEET}/up/{device}/probe", b"{}", qos=1).mid] = device
        eventually(lambda: len(reasons) == 2, 30, "both answers")
    finally:
        client.disconnect()
        client.loop_stop()
    # edge-2's own agent is thrown out by this session of its name, and comes back
    assert reasons == {"edge-1": False, "edge-2": True}


def test_a_renewed_certificate_is_shown_without_a_restart(stack: Stack) -> None:
    def shown() -> str:
        with (
            socket.create_connection(("127.0.0.1", int(stack.http.rpartition(":")[2])), timeout=30) as plain,
            context(stack).wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            cert = secure.getpeercert()
            assert cert is not None
            return str(cert["serialNumber"])

    before, process = shown(), stack.process("gateway").pid
    renewed = subprocess.run(
        [sys.executable, "-P", "-m", "tidegate.cli", "pki", "renew", "--force", "--dir", str(ca_of(stack).parent)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    ).stdout
    assert renewed.count("renewed") == 5  # gateway, pool, two edges, broker
    assert shown() != before
    assert embed(stack, SHORT)[0] == 200
    assert stack.process("gateway").pid == process


def test_no_secret_is_readable_for_others_or_stands_in_a_log_or_a_process_list(stack: Stack) -> None:
    key = stack.headers["authorization"].removeprefix("Bearer ")
    secrets = [
        path for path in stack.data_dir.rglob("*") if path.suffix == ".key" or path.name in ("api-key", "keys.json")
    ]
    assert len(secrets) == 9  # CA, five parts, the broker's copy, the key and the hashes
    assert [path for path in secrets if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
    lines = [" ".join(one.cmdline()) for one in stack.everyone()]
    assert not any(key in line for line in (*lines, stack.words, stack.logs, json.dumps(stack.ready)))


def test_no_secret_comes_out_of_operators_routes_the_configuration_or_a_refusal(stack: Stack) -> None:
    key = stack.headers["authorization"].removeprefix("Bearer ")
    wrong = f"tg_{'c0ffee' * 2}_{'deadbeef' * 8}"
    marked = "marked.token-of.nobody"
    for shown in (wrong, marked):
        status, _, body = embed_at(stack.http, SHORT, authorization=f"Bearer {shown}")
        assert status == 401
        assert shown not in json.dumps(body)
    assert embed(stack, SHORT)[0] == 200
    hashes = [one["digest"] for record in json.loads(_keys_file(stack))["keys"] for one in record["secrets"]]
    told = [stack.words, stack.logs, *(" ".join(one.cmdline()) for one in stack.everyone())]
    for url in (
        _metrics(stack),
        f"{stack.ready['admin']}/v1/state",
        f"{stack.ready['admin']}/debug/decisions",
    ):
        with urllib.request.urlopen(url, timeout=30, context=context(stack)) as response:
            told.append(response.read().decode())
    for file, role in (("gateway", "gateway"), ("edge-1", "edge"), ("pool", "pool")):
        command = [
            sys.executable,
            "-P",
            "-m",
            "tidegate.cli",
            "config",
            "check",
            str(stack.data_dir / "run" / f"{file}.yaml"),
        ]
        done = subprocess.run([*command, "--for", role], check=False, capture_output=True, text=True, env=os.environ)
        assert done.returncode == 0, done.stderr
        told.extend((done.stdout, done.stderr))
    pems = [path.read_text().split("\n")[1] for path in ca_of(stack).parent.rglob("*.key")]
    assert hashes and pems
    for secret in (key, key.split("_")[2], wrong.split("_")[2], marked, *hashes, *pems):
        assert not any(secret in text for text in told)


def _metrics(stack: Stack) -> str:
    return str(stack.ready["metrics"]).removesuffix("/metrics") + "/metrics"


def _keys_file(stack: Stack) -> str:
    return next(stack.data_dir.rglob("keys.json")).read_text()


def test_the_agents_found_the_brokers_acl_in_force(stack: Stack) -> None:
    for name in ("edge-1", "edge-2"):
        log = (stack.data_dir / "logs" / f"{name}.log").read_text()
        assert "speak as nobody else" in log and "as any other" not in log

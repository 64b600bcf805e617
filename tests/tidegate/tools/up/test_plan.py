"""The plan of `tidegate up`, made before anything starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.config import EdgeConfig
from tidegate.config import load
from tidegate.tools.up.children import write_config
from tidegate.tools.up.plan import Options, Plan, PlanError, PlannedPort, plan
from tidegate.tools.up.ports import PortsTaken, check_free

DATA = Path("/data")


def options(
    edges: int = 2, ports_from: int = 8000, host: str = "127.0.0.1", broker: str | None = None, requests: bool = True
) -> Options:
    return Options(
        DATA, DATA / "models", edges=edges, ports_from=ports_from, host=host, broker=broker, requests=requests
    )


def process_config(planned: Plan, name: str) -> dict[str, object]:
    return dict(next(one.config or {} for one in planned.processes if one.name == name))


def test_the_default_ports_are_those_that_triton_clients_expect() -> None:
    planned = plan(options())
    assert planned.http == "http://127.0.0.1:8000"
    assert planned.grpc == "127.0.0.1:8001"
    assert planned.metrics == "http://127.0.0.1:8002"
    assert planned.admin == "http://127.0.0.1:8003"


def test_one_number_moves_every_port() -> None:
    planned = plan(options(edges=2, ports_from=9000))
    assert [port.number for port in planned.ports] == [9004, 9005, 9006, 9007, 9008, 9009, 9000, 9001, 9002, 9003]


@pytest.mark.slow
@given(edges=st.integers(0, 50), ports_from=st.integers(1, 60000))
def test_no_two_parts_share_a_port(edges: int, ports_from: int) -> None:
    numbers = [port.number for port in plan(options(edges=edges, ports_from=ports_from)).ports]
    assert len(set(numbers)) == len(numbers) == 6 + 2 * edges
    assert min(numbers) == ports_from


def test_what_measures_itself_starts_one_after_the_other_and_the_gateway_last() -> None:
    assert [one.name for one in plan(options()).processes] == ["broker", "pool", "edge-1", "edge-2", "gateway"]


def test_gateways_beside_the_first_have_ports_of_their_own_and_keep_nothing_that_there_is_once() -> None:
    wanted = replace(options(ports_from=9000), gateways=3, ship=Path("a.pub"), links=("pool=lte_driving",))
    planned = plan(wanted)
    numbers = [port.number for port in planned.ports]
    assert len(set(numbers)) == len(numbers)
    assert [one.name for one in planned.processes][-3:] == ["gateway-3", "gateway-2", "gateway"]
    first, second = (process_config(planned, name) for name in ("gateway", "gateway-2"))
    assert second["http_port"] == 9013 and first["http_port"] == 9000  # behind the pool's link, and the files' port
    assert "ingest" in first and "artifacts" in first
    assert not {"ingest", "artifacts"} & second.keys()
    assert second["mqtt"] == first["mqtt"] and second["targets"] == first["targets"]
    with pytest.raises(PlanError, match="--gateways 17: from 1 to 16"):
        plan(replace(options(), gateways=17))
    with pytest.raises(PlanError, match="do not all exist"):
        plan(replace(options(ports_from=65525), gateways=2))


def test_a_broker_that_runs_already_is_used_by_everyone_and_none_is_started() -> None:
    planned = plan(options(broker="mqtt://broker.example:1883"))
    assert "broker" not in {one.role for one in planned.processes}
    assert process_config(planned, "gateway")["mqtt"] == "mqtt://broker.example:1883"
    assert process_config(planned, "edge-1")["mqtt"] == "mqtt://broker.example:1883"


def test_only_the_gateway_listens_where_the_host_option_says() -> None:
    planned = plan(options(host="0.0.0.0"))
    assert {one.role for one in planned.processes if any(port.host != "127.0.0.1" for port in one.ports)} == {"gateway"}
    assert planned.http == "http://127.0.0.1:8000"  # 0.0.0.0 is no address to call


def test_the_pool_is_given_to_the_gateway_and_the_edges_are_left_to_be_discovered() -> None:
    targets = process_config(plan(options()), "gateway")["targets"]
    assert targets == [{"name": "pool", "tier": "pool", "address": "127.0.0.1:8005", "transport": "link"}]


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (16, 15)])
def test_the_pool_leaves_a_core_to_the_others(cores: int, threads: int) -> None:
    planned = plan(Options(DATA, DATA / "models", cores=cores))
    assert process_config(planned, "pool")["threads"] == threads


def test_without_request_lines_the_gateway_is_not_asked_to_tell_of_requests() -> None:
    assert process_config(plan(options(requests=True)), "gateway")["access_log"] == "json"
    assert process_config(plan(options(requests=False)), "gateway")["access_log"] == "none"


@pytest.mark.parametrize(
    ("edges", "ports_from", "said"),
    [(-1, 8000, "--edges -1"), (2, 0, "--ports-from 0"), (2, 65530, "65530 to 65539"), (30000, 8000, "--ports-from")],
)
def test_options_that_cannot_work_are_refused_by_name(edges: int, ports_from: int, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan(options(edges=edges, ports_from=ports_from))


def test_the_last_port_there_is_can_be_used() -> None:
    assert max(port.number for port in plan(options(edges=1, ports_from=65535 - 7)).ports) == 65535


def test_a_childs_environment_cannot_override_what_the_plan_decided() -> None:
    edge = next(one for one in plan(options()).processes if one.name == "edge-1")
    inherited = {"PATH": "/bin", "TIDEGATE_EDGE_GRPC_PORT": "1", "TIDEGATE_EDGE_MAX_QUEUE_SIZE": "7"}
    assert edge.environment(inherited) == {"PATH": "/bin", "TIDEGATE_EDGE_MAX_QUEUE_SIZE": "7"}


@pytest.mark.parametrize(
    ("variable", "value", "left"),
    [
        ("ROLLOUT", '{"groups": ["shops"], "keys": ["other.pub"]}', '{"groups": ["shops"]}'),
        ("ROLLOUT__GROUPS", '["shops"]', '["shops"]'),
        ("rollout__groups", '["shops"]', '["shops"]'),
        ("ROLLOUT", '{"keys": ["other.pub"]}', None),
        ("ROLLOUT__KEYS", '["other.pub"]', None),
        ("ROLLOUT__KEYS__0", "other.pub", None),
        ("ROLLOUT", "null", None),
        ("ROLLOUT", "{groups", "{groups"),  # for the device to refuse by name
        ("NAME", "another", None),
    ],
)
def test_of_a_section_the_plan_decides_its_own_keys_and_the_environment_the_others(
    variable: str, value: str, left: str | None
) -> None:
    edge = next(one for one in plan(replace(options(), ship=Path("a.pub"))).processes if one.name == "edge-1")
    name = f"TIDEGATE_EDGE_{variable}" if variable.isupper() else f"tidegate_edge_{variable}"
    assert edge.environment({name: value}).get(name) == left


def test_a_device_that_follows_rollouts_is_in_the_groups_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(replace(options(), data_dir=tmp_path, ship=Path("a.pub")))
    edge = next(one for one in planned.processes if one.name == "edge-1")
    write_config(edge)
    theirs = edge.environment({"TIDEGATE_EDGE_ROLLOUT": '{"groups": ["shops"], "keys": ["other.pub"]}'})
    monkeypatch.setenv("TIDEGATE_EDGE_ROLLOUT", theirs["TIDEGATE_EDGE_ROLLOUT"])

    rollout = load(EdgeConfig, edge.config_path).rollout

    assert rollout is not None and (rollout.groups, rollout.keys) == (("shops",), (Path("a.pub"),))


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_taken_port_is_named_with_what_it_was_for_and_the_flag_that_moves_it(taken: int) -> None:
    with pytest.raises(PortsTaken) as refused:
        check_free([PlannedPort("127.0.0.1", taken, "gateway metrics")])
    assert f"port {taken}" in str(refused.value)
    assert "gateway metrics" in str(refused.value)
    assert "--ports-from" in str(refused.value)


def test_every_taken_port_is_named_at_once(taken: int) -> None:
    with pytest.raises(PortsTaken, match=r"(?s)one thing.*another thing"):
        check_free([PlannedPort("127.0.0.1", taken, "one thing"), PlannedPort("127.0.0.1", taken, "another thing")])


def test_a_port_that_a_grpc_server_shares_is_taken_nevertheless() -> None:
    with socket.socket() as sharing:
        sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sharing.bind(("127.0.0.1", 0))
        sharing.listen()
        with pytest.raises(PortsTaken, match="already in use"):
            check_free([PlannedPort("127.0.0.1", sharing.getsockname()[1], "gateway gRPC")])


def test_a_port_whose_server_has_just_closed_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", number)) as client:
            connection, _ = server.accept()
            connection.close()  # the server's side closes first and lingers in TIME_WAIT
            client.recv(1)
    check_free([PlannedPort("127.0.0.1", number, "gateway HTTP")])


def test_an_address_that_is_not_this_machines_says_why_it_cannot_be_used() -> None:
    with pytest.raises(PortsTaken, match="Cannot assign requested address"):
        check_free([PlannedPort("192.0.2.1", 8000, "gateway HTTP")])


def linked(*links: str, edges: int = 2, broker: str | None = None) -> Plan:
    return plan(Options(DATA, DATA / "models", edges=edges, broker=broker, links=links))


def test_a_part_behind_a_link_is_reached_at_the_link_and_listens_where_it_did() -> None:
    planned = linked("pool=lte_driving", "edge-2=flap_fast", "broker=broker_restart")
    assert process_config(planned, "gateway")["targets"] == [
        {"name": "pool", "tier": "pool", "address": "127.0.0.1:8010", "transport": "link"}
    ]
    assert process_config(planned, "pool")["grpc_port"] == 8005
    assert process_config(planned, "edge-2")["advertise"] == "127.0.0.1:8012"
    assert "advertise" not in process_config(planned, "edge-1")
    assert process_config(planned, "edge-1")["mqtt"] == process_config(planned, "gateway")["mqtt"]
    assert process_config(planned, "gateway")["mqtt"] == "mqtt://127.0.0.1:8014"
    reached = {one.name: planned.reached_at(one) for one in planned.processes}
    assert (reached["pool"], reached["edge-1"], reached["edge-2"]) == (
        "127.0.0.1:8010", "127.0.0.1:8006", "127.0.0.1:8012",
    )  # fmt: skip


def test_links_start_when_their_timelines_should_begin_and_each_has_a_control_and_ports_of_its_own() -> None:
    planned = linked("pool=lte_driving", "broker=broker_restart")
    names = [one.name for one in planned.processes]
    assert names == ["broker", "link-broker", "pool", "edge-1", "edge-2", "link-pool", "gateway"]
    link = planned.processes[names.index("link-pool")]
    assert link.module == "tidegate.netsim.proxy"
    assert " ".join(link.arguments) == (
        "--name link-pool --listen 127.0.0.1:8010 --upstream 127.0.0.1:8005 --control 127.0.0.1:8011 "
        "--scenario lte_driving --seed 1 --json"
    )
    assert link.control == "http://127.0.0.1:8011"
    numbers = [port.number for port in planned.ports]
    assert len(set(numbers)) == len(numbers) == 6 + 2 * 2 + 2 * 2


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("pool", "must be PART=SCENARIO"),
        ("pool=", "must be PART=SCENARIO"),
        ("edge-3=lte_driving", r"no part 'edge-3' \(there are: pool, edge-1, edge-2, broker\)"),
        ("pool=lte_driving", "pool has a link already"),
        ("pool=lte_drivin", "no link scenario 'lte_drivin', and no file; .* Did you mean 'lte_driving'"),
    ],
)
def test_a_link_option_that_cannot_be_is_refused_in_words(word: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        linked("pool=good_wifi", word) if word == "pool=lte_driving" else linked(word)


def test_a_link_may_be_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("summary: mine.")
    planned = linked(f"pool={tmp_path / 'own.yaml'}")
    assert "link-pool" in [one.name for one in planned.processes]


def test_a_broker_that_runs_elsewhere_has_no_link_of_ours() -> None:
    with pytest.raises(PlanError, match="no part 'broker'"):
        linked("broker=flap_fast", broker="mqtt://elsewhere:1883")


def test_with_a_key_to_ship_by_the_gateway_has_a_port_of_files_and_every_edge_the_key() -> None:
    # given a link too, whose ports come before
    planned = plan(Options(DATA, DATA / "models", links=("pool=good_wifi",), ship=Path("/keys/operator.pub")))
    numbers = [port.number for port in planned.ports]
    artifacts = process_config(planned, "gateway")["artifacts"]
    assert artifacts == {"folder": "/data/artifacts", "host": "127.0.0.1", "port": max(numbers)}
    assert len(set(numbers)) == len(numbers)
    for edge in ("edge-1", "edge-2"):
        assert process_config(planned, edge)["rollout"] == {"keys": ["/keys/operator.pub"]}


def test_the_port_of_files_is_among_those_that_must_exist() -> None:
    assert plan(options(ports_from=65526))
    with pytest.raises(PlanError, match="65526 to 65536"):
        plan(Options(DATA, DATA / "models", ports_from=65526, ship=Path("operator.pub")))

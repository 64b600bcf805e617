"""Fixtures for every test; each lives in a file of its own under `tests/support`."""

import gc
import os
import signal
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

from tidegate.runtime.settled_imports import absent

# Imports and collected tests stay until the end: nothing of them is garbage, and looking for some took an eighth of the
# collection. On again when all is collected, or where pytest ends without that.
gc.disable()

# Before anything imports gRPC, as `tidegate` does: its lines about goodbyes are noise between ours.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# Some tests import ONNX Runtime themselves: see tidegate/engines/__init__.py.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Edge agents of tests have no battery: what they do must not depend on whether the machine that tests is plugged in.
os.environ.setdefault("TIDEGATE_EDGE_SENSORS", "/nonexistent")

# What a shell without job control runs in the background ignores Ctrl-C, and so would every process of these tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test asks a server of the internet. aiohttp reads the system's authorities, a hundred and more, twice as it is
# imported, a tenth of the CPU time in which a part starts; this file holds one, whose key nobody has.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "data" / "unknown_authority.pem")

# Else structlog draws the traceback of every error that a test provokes, with all local variables, by rich: a second of
# CPU time each. Processes of the product do without it as well where no terminal is there to see it.
with absent("rich"):
    import structlog  # noqa: F401

# How fast a machine draws examples is no property of ours; benches measure, tests do not.
# Where a run decides about a change it looks at the same examples as the run before; at a desk the search goes on.
settings.register_profile(
    "tidegate",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.register_profile("quick", settings.get_profile("tidegate"), max_examples=20)  # `make test-fast`
settings.load_profile("tidegate")


# Files of twenty seconds and more go first, the longest ahead, so that no process is left alone with one at the end.
_LONG = (
    "test_ray_serve.py",
    "test_pages_of_parts.py",
    "test_pages_on_a_laptop.py",
    "test_fleet_pages.py",
    "test_models_page.py",
    "test_smollm2.py",
    "test_rollout_crashes.py",
    "test_fault_twin.py",
    "test_stack_failures.py",
    "test_up_lifecycle.py",
    "test_fault_matrix_parts.py",
    "test_stack_quality.py",
    "test_fault_matrix.py",
    "test_processes.py",
    "test_demo_models.py",
    "test_rollout.py",
    "test_small_installs.py",
    "test_stack_secure.py",
    "test_foreign_server.py",
    "test_user_project.py",
    "test_resumption.py",
    "test_takeover_of_items.py",
    "test_leases_over_gateways.py",
    "test_dispatcher_interleavings.py",
    "test_killed_streams.py",
    "test_what_if.py",
    "test_overload.py",
    "test_stack_clients.py",
    "test_simulation.py",
    "test_figures.py",
    "test_memory_limits.py",
    "test_fleet_over_mqtt.py",
    "test_schemathesis.py",
    "test_onnx_genai.py",
    "test_generative_build.py",
    "test_continuous_batching.py",
    "test_optimum.py",
    "test_other_clients.py",
    "test_health.py",
    "test_draining.py",
    "test_cli.py",
    "test_array_transport.py",
    "test_rollout_soak.py",
    "test_alerts.py",
    "test_sbom.py",
    "test_crowd.py",
    "test_interleavings.py",
    "test_doctor.py",
)


# What `make test` collects for its second run, with whole systems (WHOLE in the Makefile).
_WHOLE: Final = ("tests/e2e/", "tests/tidegate/testing/")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    whole = {item.nodeid.partition("::")[0] for item in items if item.get_closest_marker("e2e")}
    astray = {path for path in whole if not path.startswith(_WHOLE)}
    if astray:
        raise pytest.UsageError(f"marked e2e, so they would never run: {sorted(astray)}; move them below {_WHOLE}")
    places = {name: place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Set the half million objects of the collected tests aside: each full collection would walk through them."""
    gc.collect()
    gc.freeze()
    gc.enable()


pytest_plugins = [
    "tests.support.cuda",
    "tests.support.models.demo_models",
    "tests.support.models.tiny_llama",
    "tests.support.models.sorting_llama",
    "tidegate.testing.pytest_plugin",
]

"""Fixtures for every test; each lives in a file of its own under `tests/support`."""

import os

# Before anything imports gRPC, as `tidegate` does: its lines about goodbyes are noise between ours.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

pytest_plugins = ["tests.support.models"]

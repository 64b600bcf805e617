"""Fixtures for every test; each lives in a file of its own under `tests/support`."""

pytest_plugins = ["tests.support.models"]

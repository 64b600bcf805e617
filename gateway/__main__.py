"""`python -m gateway --config FILE`."""

from tidegate.runtime.settled_imports import import_structlog, settled_imports

with settled_imports():
    import_structlog()
    from gateway.cli import gateway

if __name__ == "__main__":
    gateway(prog_name="tidegate gateway")

"""`python -m gateway --config FILE`."""

from gateway.cli import gateway

if __name__ == "__main__":
    gateway(prog_name="tidegate gateway")

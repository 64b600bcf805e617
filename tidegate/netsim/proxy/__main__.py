"""`python -m tidegate.netsim.proxy` is `tidegate link`."""

from __future__ import annotations

from tidegate.netsim.proxy.cli import link

if __name__ == "__main__":
    link(prog_name="tidegate link")

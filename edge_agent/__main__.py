"""`python -m edge_agent --config FILE`"""

from __future__ import annotations

from tidegate.runtime.settled_imports import import_structlog, settled_imports

with settled_imports():
    import_structlog()
    from edge_agent.cli import edge

if __name__ == "__main__":
    edge(prog_name="python -m edge_agent")

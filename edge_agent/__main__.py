"""`python -m edge_agent --config FILE`"""

from __future__ import annotations

from edge_agent.cli import edge

if __name__ == "__main__":
    edge(prog_name="python -m edge_agent")

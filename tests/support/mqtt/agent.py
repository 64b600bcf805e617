"""An agent as far as MQTT can tell, in a process of its own that a test may kill or stop.

python -m tests.support.mqtt.agent URL FLEET DEVICE STATE_FILE
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from pathlib import Path

from edge_agent.core.reporting import AgentState
from edge_agent.fleet.epoch import EpochStore
from edge_agent.fleet.sync import EdgeSync
from tests.support.mqtt.device_messages import offer
from tidegate.types import LoadReport


async def main(url: str, fleet: str, device: str, state_file: str) -> None:
    state = AgentState((offer(),), ("127.0.0.1:9001",), LoadReport(1, 1, queued=0, in_flight=0, queue_delay_s=0.0))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    sync = EdgeSync(
        url,
        fleet=fleet,
        device=device,
        state=lambda: state,
        epochs=EpochStore(Path(state_file)),
        draw=random.random,
        interval_s=0.2,
    )
    async with sync:
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))

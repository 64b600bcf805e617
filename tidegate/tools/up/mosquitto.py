"""This process runs Mosquitto as a child of `tidegate up`: it reports when Mosquitto is ready, and ends it.

    python -m tidegate.tools.up.mosquitto --program /usr/sbin/mosquitto --conf FILE --host 127.0.0.1 --port 8004

Mosquitto writes no events to stdout and does not end with its parent; this process does both for it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import click

from tidegate import clock
from tidegate.runtime import events
from tidegate.runtime.lifeline import die_with_parent

_POLL_S = 0.02
_READY_WITHIN_S = 10.0


@click.command()
@click.option("--program", required=True)
@click.option("--conf", type=click.Path(path_type=Path), required=True)
@click.option("--host", required=True)
@click.option("--port", type=int, required=True)
@click.option("--die-with-parent", "parent_pid", type=int)
def main(program: str, conf: Path, host: str, port: int, parent_pid: int | None) -> None:
    """Run Mosquitto until SIGTERM, or until it ends."""
    if parent_pid is not None:
        die_with_parent(parent_pid)
    sys.exit(asyncio.run(_run(program, conf, host, port)))


async def _run(program: str, conf: Path, host: str, port: int) -> int:
    process = await asyncio.create_subprocess_exec(program, "-c", str(conf), stdout=sys.stderr)
    ended = asyncio.create_task(process.wait(), name="mosquitto")

    def end() -> None:
        if process.returncode is None:
            process.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    try:
        if await _answers(host, port, ended):
            address = f"mqtts://{host}:{port}"
            events.emit("ready", role="broker", name="mosquitto", addresses={"mqtt": address}, models=[])
        else:
            events.emit("failed", role="broker", name="mosquitto", reason=f"nothing answers on port {port}")
            end()
        return await ended
    finally:
        end()
        await process.wait()


async def _answers(host: str, port: int, ended: asyncio.Task[int]) -> bool:
    """Wait until something listens there; False when the program ended first, or takes too long."""
    give_up_at = clock.now() + _READY_WITHIN_S
    while not ended.done() and clock.now() < give_up_at:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await clock.sleep(_POLL_S)
        else:
            writer.close()
            return True
    return False


if __name__ == "__main__":
    main()

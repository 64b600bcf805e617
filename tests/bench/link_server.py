"""A link under measurement, alone in its process: JSON commands on stdin, one line of answer each.

    {"hold": true}                        nothing passes until the next `be`
    {"be": {profile}, "traces": [to, from]}   be like this from now on; the answer's `at` is that instant

`traces` are lists of seconds. Instants are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tidegate import clock
from tidegate.netsim.links.stream import StreamProfile
from tidegate.netsim.links.trace import CapacityTrace
from tidegate.netsim.proxy.link import LinkProxy
from tidegate.netsim.proxy.scenario import convert


async def main(upstream_port: int) -> None:
    loop = asyncio.get_running_loop()
    async with LinkProxy(("127.0.0.1", upstream_port)) as link:
        _say(port=link.port)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            _obey(link, json.loads(line))


def _obey(link: LinkProxy, command: dict[str, Any]) -> None:
    if command.get("hold"):
        link.partition("blackhole")
    else:
        traces = command.get("traces")
        profile = convert(command["be"], StreamProfile, "profile")
        link.apply(profile, traces=(CapacityTrace(traces[0]), CapacityTrace(traces[1])) if traces else None)
        link.heal()
    link.verify()
    _say(at=clock.now(), violations=link.violations)


def _say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))

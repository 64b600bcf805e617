"""The options of dnsmasq that `docs/discovery.md` shows, for machines without it, on the DNS server of our tests.

python -m tests.support.discovery.as_dnsmasq --port=5353 --srv-host=NAME,HOST,PORT --host-record=HOST,ADDRESS
"""

from __future__ import annotations

import argparse
import asyncio

from tests.support.discovery.dns_server import DnsServer


async def serve(port: int, services: list[str], hosts: list[str]) -> None:
    server = DnsServer(port=port)
    for name, target, at in (one.split(",") for one in services):
        server.records[(f"{name}.", "SRV")] = [f"0 0 {at} {target}."]
    for host, address in (one.split(",") for one in hosts):
        server.records[(f"{host}.", "A")] = [address]
    async with server:
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--no-daemon", action="store_true", required=True)
    parser.add_argument("--no-resolv", action="store_true", required=True)
    parser.add_argument("--local", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--srv-host", action="append", default=[])
    parser.add_argument("--host-record", action="append", default=[])
    options = parser.parse_args()
    asyncio.run(serve(options.port, options.srv_host, options.host_record))


if __name__ == "__main__":
    main()

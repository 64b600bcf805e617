"""A DNS server on loopback, over UDP and TCP, whose records and faults a test sets: made with dnspython's messages."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from typing import Literal, Self, cast

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset

from tidegate.testing.ports import free_port

DnsFault = Literal["", "silent", "servfail", "refused", "garbage"]
UDP_BYTES = 512


class DnsServer:
    """`async with` answers on one port, over UDP and TCP. Change `records` and `fault` at any time.

    `records` has texts by (name, type): {("pools.test.", "A"): ["127.0.0.1"]}. A name without any is NXDOMAIN.
    """

    def __init__(self, *, ttl_s: int = 0, port: int = 0) -> None:
        self.port = port or free_port()
        self.ttl_s = ttl_s
        self.records: dict[tuple[str, str], list[str]] = {}
        self.fault: DnsFault = ""
        self.faulty: set[str] = set()  # names with the fault, or "NAME TYPE"; empty: all
        self.asked: Counter[tuple[str, str]] = Counter()  # by (name, "udp" or "tcp")
        self._udp: asyncio.DatagramTransport | None = None
        self._tcp: asyncio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._tcp = await asyncio.start_server(self._serve_tcp, "127.0.0.1", self.port)
        self._udp, _ = await loop.create_datagram_endpoint(
            lambda: _Datagrams(self), local_addr=("127.0.0.1", self.port)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._udp is not None and self._tcp is not None
        self._udp.close()
        self._tcp.close()

    def answer(self, wire: bytes, over: str) -> bytes | None:
        """None: nothing is said."""
        query = dns.message.from_wire(wire)
        question = query.question[0]
        name, kind = question.name.to_text().lower(), dns.rdatatype.to_text(question.rdtype)
        self.asked[name, over] += 1
        fault = self.fault if not self.faulty or name in self.faulty or f"{name} {kind}" in self.faulty else ""
        if fault == "silent":
            return None
        if fault == "garbage":
            return b"\x00\x01"
        reply = dns.message.make_response(query)
        reply.flags |= dns.flags.AA
        if fault:
            reply.set_rcode(dns.rcode.SERVFAIL if fault == "servfail" else dns.rcode.REFUSED)
        elif texts := self.records.get((name, kind)):
            reply.answer.append(dns.rrset.from_text_list(question.name, self.ttl_s, "IN", kind, texts))
        elif not any(known == name for known, _ in self.records):
            reply.set_rcode(dns.rcode.NXDOMAIN)
        made = reply.to_wire(max_size=65535)
        if over == "udp" and len(made) > UDP_BYTES:
            short = dns.message.make_response(query)
            short.flags |= dns.flags.TC
            return short.to_wire()
        return made

    async def _serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            (length,) = struct.unpack("!H", await reader.readexactly(2))
            made = self.answer(await reader.readexactly(length), "tcp")
            if made is not None:
                writer.write(struct.pack("!H", len(made)) + made)
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        made = self._server.answer(data, "udp")
        if made is not None and self._transport is not None:
            self._transport.sendto(made, addr)

"""One lookup of the targets behind a DNS name: SRV records with the addresses of their hosts, or addresses alone.

dnspython asks, since the standard library tells neither SRV records nor how long an answer holds. It goes on over TCP
where an answer was truncated. `server` answers for a name and its hosts alike, so that one view of the world is used.

What an answer means:

    records                  they are the targets, in full
    no such name, no records nobody can tell an empty service from a wrong name or a zone that is gone: no answer
    SERVFAIL, a timeout      no answer
    A refused, AAAA answered what was answered, and the other way round
    a host without address   left out, unless its last address is known and nobody says that it is gone

An id comes from what stays: the first label of an SRV record's host (`pool-0` of pool-0.pools.prod.svc.cluster.local,
which a StatefulSet keeps over restarts), else the address with dashes (`10-7-0-5`), as Kubernetes names such pods.

Source: RFC 2782 (SRV: the lowest priority first, the others in reserve), RFC 2308 (negative answers).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final

import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.rdatatype
import dns.resolver

from tidegate.servers.address import format_address

MOST_HOSTS: Final = 512  # of one name; an answer over TCP holds some 2,000
AT_ONCE: Final = 16  # lookups of hosts


class NoAnswer(Exception):
    """The name server has no answer that could be used; the message says why."""


@dataclass(frozen=True, slots=True)
class DnsTarget:
    """One target: the name for its id, its address as HOST:PORT, and whether it is in reserve."""

    name: str
    address: str
    reserve: bool = False


@dataclass(frozen=True, slots=True)
class DnsAnswer:
    targets: tuple[DnsTarget, ...]
    ttl_s: float  # the least of its records
    warning: str = ""  # what of it could not be used


class DnsLookup:
    """Asks one name server, or the system's, again and again for one name.

    Args:
        name: one that begins with `_` has SRV records.
        port: of targets that have addresses only.
        server: ADDRESS[:PORT]; None: the system's.
        timeout_s: for each name that is asked for.
    """

    def __init__(self, name: str, port: int | None, server: str | None, timeout_s: float) -> None:
        self._name = name
        self._port = port
        self._server = server
        self._timeout_s = timeout_s
        self._addresses: dict[str, str] = {}  # by host: the one in use
        self._resolver: dns.asyncresolver.Resolver | None = None

    async def look(self) -> DnsAnswer:
        """Raises NoAnswer."""
        if self._port is not None:
            addresses, ttl_s = await self._addresses_of(self._name)
            found = [DnsTarget(_dashed(one), format_address(one, self._port)) for one in addresses[:MOST_HOSTS]]
            return DnsAnswer(tuple(found), ttl_s, _too_many(len(addresses)))
        return await self._services()

    async def _services(self) -> DnsAnswer:
        answer = await self._ask(self._name, "SRV")
        records = sorted(answer, key=lambda one: (one.priority, str(one.target), one.port))
        first = records[0].priority
        gate = asyncio.Semaphore(AT_ONCE)
        hosts = sorted({_host_of(one) for one in records[:MOST_HOSTS]} - {""})
        if not hosts:  # the one record with "." for its host
            raise NoAnswer(f"{self._name} is said not to be served (its SRV record names no host)")
        found = dict(zip(hosts, await asyncio.gather(*(self._host(one, gate) for one in hosts)), strict=True))
        self._addresses = {host: found[host][0] for host in hosts if found[host][0]}
        targets = []
        for one in records[:MOST_HOSTS]:
            host = _host_of(one)
            if address := self._addresses.get(host):
                name = host.partition(".")[0]
                targets.append(DnsTarget(name, format_address(address, one.port), one.priority > first))
        why = [f"{host}: {found[host][2]}" for host in hosts if found[host][2]]
        if not targets:
            raise NoAnswer("; ".join(why))
        least_s = min([float(answer.rrset.ttl if answer.rrset else 0), *(found[host][1] for host in hosts)])
        return DnsAnswer(tuple(targets), least_s, "; ".join([*why[:4], *filter(None, [_too_many(len(records))])]))

    async def _host(self, host: str, gate: asyncio.Semaphore) -> tuple[str, float, str]:
        """(address or "", TTL, why there is none)."""
        known = self._addresses.get(host, "")
        async with gate:
            try:
                addresses, ttl_s = await self._addresses_of(host)
            except NoAnswer as error:
                gone = isinstance(error.__cause__, dns.resolver.NXDOMAIN)
                return ("" if gone else known), 0.0, str(error)
        return (known if known in addresses else addresses[0]), ttl_s, ""

    async def _addresses_of(self, host: str) -> tuple[list[str], float]:
        """Addresses in a fixed order, IPv4 before IPv6, with the least TTL. Raises NoAnswer."""
        both = await asyncio.gather(*(self._ask(host, one) for one in ("A", "AAAA")), return_exceptions=True)
        odd = next((one for one in both if isinstance(one, BaseException) and not isinstance(one, NoAnswer)), None)
        if odd is not None:
            raise odd
        answers = [one for one in both if isinstance(one, dns.resolver.Answer)]
        failed = next((one for one in both if isinstance(one, NoAnswer) and not _is_empty(one)), None)
        if failed is not None and not (
            answers and _is_refused(failed)
        ):  # half of the addresses would look like the other half had gone
            raise failed
        if not answers:
            raise next(one for one in both if isinstance(one, NoAnswer))
        addresses = {record.address for answer in answers for record in answer}
        ordered = sorted(addresses, key=lambda one: (ip_address(one).version, ip_address(one).packed))
        return ordered, min(float(answer.rrset.ttl if answer.rrset else 0) for answer in answers)

    async def _ask(self, name: str, kind: str) -> dns.resolver.Answer:
        try:
            resolver = self._resolver = self._resolver or self._new_resolver()
            return await resolver.resolve(name, kind, lifetime=self._timeout_s)
        except dns.resolver.NXDOMAIN as error:
            raise NoAnswer(f"there is no name {name}") from error
        except dns.resolver.NoAnswer as error:
            raise NoAnswer(f"{name} has no {kind} records") from error
        except dns.exception.Timeout as error:
            self._resolver = None  # the system may have other name servers by now
            raise NoAnswer(f"no name server answered for {name} within {self._timeout_s:g} s") from error
        except dns.resolver.NoNameservers as error:
            self._resolver = None
            said = sorted({str(one[-2]) for one in error.kwargs.get("errors", ()) if len(one) > 1})
            raise NoAnswer(f"no name server has an answer for {name} ({', '.join(said) or 'none is left'})") from error
        except (dns.exception.DNSException, OSError) as error:
            raise NoAnswer(f"{name}: {type(error).__name__}: {error}"[:300]) from error

    def _new_resolver(self) -> dns.asyncresolver.Resolver:
        resolver = dns.asyncresolver.Resolver(configure=self._server is None)
        if self._server is not None:
            host, _, port = self._server.rpartition(":") if not self._server.endswith("]") else (self._server, "", "53")
            if not host:
                host, port = self._server, "53"
            resolver.nameservers = [dns.nameserver.Do53Nameserver(host.strip("[]"), int(port))]
        return resolver

    def __repr__(self) -> str:
        return f"<DnsLookup {self._name} at {self._server or 'the system'}>"


def _is_refused(error: NoAnswer) -> bool:
    """Whether every name server refuses the question: it is no accident, as a timeout or SERVFAIL may be.

    So do forwarders that know a host's one address (dnsmasq's `host-record`) and have nobody to ask for the other.
    """
    cause = error.__cause__
    if not isinstance(cause, dns.resolver.NoNameservers):
        return False
    said = {str(one[-2]) for one in cause.kwargs.get("errors", ()) if len(one) > 1}
    return bool(said) and said <= {"REFUSED", "NOTIMP"}


def _is_empty(error: NoAnswer) -> bool:
    return isinstance(error.__cause__, dns.resolver.NoAnswer)


def _host_of(record: Any) -> str:
    """The host that an SRV record names; "" of one that says that there is none."""
    return str(record.target).rstrip(".").lower()


def _dashed(address: str) -> str:
    return address.replace(".", "-").replace(":", "-").strip("-")


def _too_many(count: int) -> str:
    return f"{count} records are more than {MOST_HOSTS}: the rest is not used" if count > MOST_HOSTS else ""

"""The quota leaser leases quotas from the store beside requests, and lets shares take over while the store is away.

    every lease   what this gateway's buckets are short of ──▶ one script: a token bucket for each limit
                  what is lent, and who else leases        ◀── and what each gateway spends in the cloud

The pauses between leases vary by a fifth: of gateways that ask in step, the last one would find nothing, each time.
Between them a bucket that runs short is filled early, where the store had enough for it the last time.
Each limit is one hash (`quota:NAME:KIND`: balance and instant, by the store's clock), which expires when its bucket has
been full for a while. What is decided here and there is in `gateway/core/admission/leased_quotas.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Self

import structlog

from gateway.core.admission.leased_quotas import LeaseClaim, LeasedQuotas, QuotaLoan
from gateway.core.peers.peers import MOST_PEERS, CloudSpend, PeerReport, Peers
from gateway.core.placement.cloud_budget import CloudBudget
from gateway.store.shared_store import SharedStore, StoreScript, StoreUnavailable
from tidegate import clock
from tidegate.runtime.owned_task import OwnedTask

FRESH_MS: Final = 2000  # a gateway that has not leased for so long does not lease
_LOOKS: Final = 8  # in the time of a lease: whether a bucket runs short

AskStore = Callable[[float, int, Sequence[PeerReport | None]], list[LeaseClaim]]
log = structlog.get_logger(__name__)

# KEYS: leasers, spending, then a bucket for each claim.
# ARGV: this gateway, its spend "SPEND FACTOR" or "", how long a leaser is fresh in ms, how many gateways at most, then
# for each claim: rate, burst, want, back, start, ceiling.
# Returns the names of fresh gateways, their spends, and for each claim what is lent and what is left.
LEASE: Final = StoreScript(
    "lease",
    """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local fresh_s = ARGV[3] / 1000
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - fresh_s)
redis.call('ZREMRANGEBYSCORE', KEYS[1], now + fresh_s, '+inf')
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - tonumber(ARGV[4]))
redis.call('PEXPIRE', KEYS[1], 60000)
local names = redis.call('ZRANGE', KEYS[1], 0, -1)
local spends = {}
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2] .. ' ' .. string.format('%.6f', now))
  redis.call('PEXPIRE', KEYS[2], 60000)
  for i, name in ipairs(names) do
    spends[i] = redis.call('HGET', KEYS[2], name) or ''
  end
  if redis.call('HLEN', KEYS[2]) > 2 * tonumber(ARGV[4]) then redis.call('DEL', KEYS[2]) end
end
local lent = {}
for i = 3, #KEYS do
  local at = 4 + (i - 3) * 6
  local rate, burst, want = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local back, start, ceiling = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6])
  local known = redis.call('HMGET', KEYS[i], 'balance', 'at')
  local balance, since = tonumber(known[1]), tonumber(known[2])
  if balance == nil or since == nil then
    balance = start
  else
    balance = math.min(burst, balance + rate * math.max(0, now - since))
    if ceiling >= 0 then balance = math.min(balance, ceiling) end
  end
  balance = math.min(burst, balance + back)
  local granted = math.max(0, math.min(want, balance))
  balance = balance - granted
  redis.call('HSET', KEYS[i], 'balance', string.format('%.9g', balance), 'at', string.format('%.6f', now))
  redis.call('PEXPIRE', KEYS[i], 60000 + math.min(3600000, math.floor(2000 * burst / math.max(rate, 1e-6))))
  lent[#lent + 1] = string.format('%.9g %.9g', granted, balance)
end
return {names, spends, lent}
""",
)


class QuotaLeaser:
    """`async with` runs it.

    Args:
        quotas: decides what is asked for, and takes what is lent.
        lease_s: the time between two leases.
        draw: chance, uniform in [0, 1).
    """

    def __init__(
        self,
        store: SharedStore,
        gateway: str,
        peers: Peers,
        quotas: LeasedQuotas,
        cloud: CloudBudget | None,
        *,
        lease_s: float,
        draw: Callable[[], float],
    ) -> None:
        self._store = store
        self._gateway = gateway
        self._peers = peers
        self._quotas = quotas
        self._cloud = cloud
        self._lease_s = lease_s
        self._draw = draw
        self._leasers: frozenset[str] = frozenset()
        self.spends: list[CloudSpend] | None = None  # of the other gateways; None while the store does not say
        self._leases = False
        self._task = OwnedTask(self._run, name="quota leases", crash_means="quotas are shared without the store")

    async def __aenter__(self) -> Self:
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()
        self._lost()

    @property
    def leases(self) -> bool:
        """Whether the store lends now."""
        return self._leases

    async def _run(self) -> None:
        next_at = clock.now()
        while True:
            is_due = clock.now() >= next_at
            try:
                if is_due:
                    await self._turn(self._quotas.ask)
                elif self._quotas.runs_short:
                    await self._turn(self._quotas.ask_early)
            except StoreUnavailable:  # it has said so
                self._lost()
            except Exception:
                log.exception("quotas cannot be leased; they are shared without the store")
                self._lost()
            now = clock.now()
            if is_due:
                next_at = now + self._lease_s * (0.8 + 0.4 * self._draw())
            await clock.sleep(max(0.0, min(next_at - now, self._lease_s / _LOOKS)))

    async def _turn(self, ask: AskStore) -> None:
        now = clock.now()
        elsewhere = self._elsewhere(now)
        # Those that lease are gateways too, also where no broker shows them.
        gateways = max(self._peers.count(now), len(self._leasers | {self._gateway}) + len(elsewhere))
        claims = ask(now, gateways, elsewhere)
        cloud = "" if self._cloud is None else "{:.6g} {:.6g}".format(*self._cloud.told(now))
        keys = [self._store.key("leasers"), self._store.key("spending")]
        keys += [self._store.key("quota", claim.quota, claim.kind) for claim in claims]
        figures: list[str | int] = [self._gateway, cloud, FRESH_MS, MOST_PEERS]
        for claim in claims:
            figures += _figures(claim)
        names, spends, lent = await self._store.run(LEASE, keys, figures)
        loans = [QuotaLoan(*map(float, one.split())) for one in lent]
        self._quotas.lent(claims, loans, clock.now())
        self._leasers = frozenset(name.decode(errors="replace") for name in names)
        if self._cloud is not None:
            self.spends = _spends_of_others(names, spends, self._gateway.encode())
        self._leases = True

    def _elsewhere(self, now: float) -> Sequence[PeerReport | None]:
        """Of each other gateway that lives and does not lease: what it last said."""
        if not self._leases:
            return []  # who leases is not known yet
        gateways = {
            name.partition("/")[0] for name in self._leasers
        }  # GATEWAY/worker-1: each process leases for itself
        return [self._peers.report_of(name, now) for name in self._peers.names(now) if name not in gateways]

    def _lost(self) -> None:
        if self._leases:
            self._leases, self.spends = False, None
            self._quotas.lost(clock.now())

    def __repr__(self) -> str:
        return f"<QuotaLeaser {'leases' if self._leases else 'does not lease'} with {len(self._leasers)} others>"


def _figures(claim: LeaseClaim) -> tuple[str, ...]:
    figures = claim.rate, claim.burst, claim.want, claim.back, claim.start, claim.ceiling
    return tuple(f"{one:.9g}" for one in figures)


def _spends_of_others(names: Sequence[bytes], spends: Sequence[bytes], own: bytes) -> list[CloudSpend]:
    others = []
    for name, told in zip(names, spends, strict=False):
        figures = told.split()
        if name != own and len(figures) == 3:
            others.append(CloudSpend(max(0.0, float(figures[0])), max(1.0, float(figures[1]))))
    return others

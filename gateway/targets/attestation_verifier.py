"""Targets are asked for evidence and the evidence is verified: once a connection is there, and again before it expires.

    AttestationVerifier   one a gateway: the policy (its file is followed), the CA, and the verification
    TargetAttestation     one a connection: asks, has the evidence verified, reports to the fleet, waits

Half of its age before evidence ends the target is asked anew, at an instant that chance spreads: a gateway that was
restarted met its whole fleet at once. A target that does not answer, or cannot, is asked again with growing distance,
and what it had shown counts to its end; evidence that is refused ends what was shown before. When the policy changes,
evidence that is held is verified again at once: a revoked key is out within seconds, without a question to any target.

The age counts from the question, so that an answer which was held up is none the younger for it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import structlog
from cryptography import x509

from gateway.core.fleet.attestation import Attestation
from tidegate import clock
from tidegate.link.client import LinkClient
from tidegate.outcome import ServeError
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.followed_file import FollowedFile
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.security.attestation.keys import read_allowed
from tidegate.security.attestation.proof import key_hash, verify_proof
from tidegate.security.attestation.verdict import NONCE_BYTES, AttestationPolicy, RefusedEvidence
from tidegate.security.tls import Tls

ANSWERS_WITHIN_S: Final = 5.0
FIRST_RETRY_S: Final = 1.0
_LAST_RETRY_S: Final = 60.0
_EARLIEST, _SPREAD = 0.4, 0.2  # of its age: when evidence is asked for anew

log = structlog.get_logger(__name__)


class ReceivedEvidence(NamedTuple):
    """Evidence as it came, with all that its verification needs, so that it can be verified again."""

    raw: bytes
    nonce: bytes
    asker_key: bytes
    asked_at: float  # by our own clock
    asked_at_utc: float


class AttestationVerifier:
    """`async with` reads the list of keys, and follows it. Raises ConfigError at the start only."""

    def __init__(
        self, allowed: Path, tls: Tls, *, measurements: frozenset[str], max_age_s: float, draw: Callable[[], float]
    ) -> None:
        self.draw = draw
        self.max_age_s = max_age_s
        self._tls = tls
        self._measurements = measurements
        self._policy = AttestationPolicy(max_age_s=max_age_s)
        self._changed = asyncio.Event()  # another one after each change
        self._file = FollowedFile(allowed, read_allowed, self._take, what="the attestation keys")

    async def __aenter__(self) -> AttestationVerifier:
        self._take(await self._file.__aenter__())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._file.__aexit__()

    @property
    def changed(self) -> asyncio.Event:
        """Set when the policy is another one than now."""
        return self._changed

    def judge(self, target_id: str, held: ReceivedEvidence) -> Attestation:
        verdict = verify_proof(
            held.raw,
            target=target_id,
            nonce=held.nonce,
            asker_key=held.asker_key,
            ca=self._tls.fresh().ca,
            now=held.asked_at_utc,
            policy=self._policy,
        )
        if isinstance(verdict, RefusedEvidence):
            return Attestation(verdict.words)
        until = held.asked_at + (verdict.expires_at - held.asked_at_utc)
        return Attestation("", until, verdict.kind, verdict.key_id, verdict.expires_at)

    def _take(self, allowed: dict[str, bytes]) -> None:
        before, self._policy = self._policy, AttestationPolicy(allowed, self._measurements, self.max_age_s)
        if before.keys != allowed:
            log.info("attestation keys", allowed=sorted(allowed), removed=sorted(set(before.keys) - set(allowed)))
            self._changed.set()
            self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<AttestationVerifier {len(self._policy.keys)} keys from {self._file.path}>"


class TargetAttestation:
    """The attestation of one connection; `keep` runs as long as the connection does."""

    def __init__(self, verifier: AttestationVerifier, target_id: str, report: Callable[[Attestation], None]) -> None:
        self._verifier = verifier
        self._target_id = target_id
        self._report = report
        self._told: Attestation | None = None
        self._again = asyncio.Event()  # what the target offers has changed: so may its measurement have

    def ask_again(self) -> None:
        """Soon: what it showed may be out of date."""
        self._again.set()

    async def keep(self, client: LinkClient, shown: bytes | None) -> None:
        """Ask and judge until cancelled.

        Args:
            shown: the certificate, PEM, by which this connection was made.
        """
        if shown is None:
            self._say(Attestation("it is called without TLS, and evidence is bound to certificates"))
            return
        self._say(Attestation("its evidence is being asked for"))
        asker_key = key_hash(x509.load_pem_x509_certificate(shown))
        backoff = Backoff(self._verifier.draw, FIRST_RETRY_S, _LAST_RETRY_S)
        held: ReceivedEvidence | None = None
        while True:
            self._again.clear()
            asked_at = clock.now()
            fresh = await self._asked(client, asker_key, held)
            if fresh is None:
                next_at = clock.now() + FIRST_RETRY_S + backoff.next_delay_s()
            else:
                held = fresh
                backoff.reset()
                share = _EARLIEST + _SPREAD * self._verifier.draw()
                next_at = clock.now() + share * self._verifier.max_age_s
            await self._wait_judging(held, next_at)
            await clock.sleep_until(asked_at + FIRST_RETRY_S)  # a target whose offers flap costs a question a second

    async def _asked(
        self, client: LinkClient, asker_key: bytes, before: ReceivedEvidence | None
    ) -> ReceivedEvidence | None:
        """Fetch, verify and report new evidence; None where there is none."""
        nonce, asked_at, asked_at_utc = secrets.token_bytes(NONCE_BYTES), clock.now(), clock.utc_s()
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                raw = await client.evidence(nonce)
        except TimeoutError:
            self._missed(before, f"it answered no challenge within {ANSWERS_WITHIN_S:g} s")
        except ServeError as error:
            self._missed(before, error.message)
        else:
            held = ReceivedEvidence(raw, nonce, asker_key, asked_at, asked_at_utc)
            self._judge(held)
            return held
        return None

    async def _wait_judging(self, held: ReceivedEvidence | None, next_at: float) -> None:
        """Until `next_at`, or until the offers change; a changed policy is applied meanwhile."""
        while (left_s := next_at - clock.now()) > 0:
            changed = self._verifier.changed
            waits = [asyncio.ensure_future(event.wait()) for event in (changed, self._again)]
            try:
                await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_and_wait(*waits)
            if changed.is_set() and held is not None:
                self._judge(held)
            if self._again.is_set():
                return

    def _judge(self, held: ReceivedEvidence) -> None:
        self._say(self._verifier.judge(self._target_id, held))

    def _missed(self, before: ReceivedEvidence | None, words: str) -> None:
        """It gave none now. What it showed before counts to its end."""
        if before is None:
            self._say(Attestation(words))
        else:
            log.warning("a target gave no new evidence", target=self._target_id, reason=words)

    def _say(self, attestation: Attestation) -> None:
        if attestation.why_not and attestation != self._told:
            log.info("target is not attested", target=self._target_id, reason=attestation.why_not)
        elif not attestation.why_not and (self._told is None or self._told.why_not):
            log.info("target is attested", target=self._target_id, evidence=str(attestation))
        self._told = attestation
        self._report(attestation)

    def __repr__(self) -> str:
        return f"<TargetAttestation of {self._target_id}: {self._told}>"

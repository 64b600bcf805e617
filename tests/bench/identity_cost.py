"""What it costs a request to be let in: the guard alone, in this process, by kind of credential.

    python -m tests.bench.identity_cost [--quick]

Aim: 15 µs of CPU time with an API key, all of it: parse, hash, look-up, purse, the view of the host, and the layer's
part (rights, priority, pin). A token or a certificate that was seen before is remembered and costs about the same; a
new token costs its signature, which is printed beside.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from gateway.config.auth import AuthConfig, JwtConfig
from gateway.core.access.api_key import ID_BYTES, SALT_BYTES, SECRET_BYTES, new_key
from gateway.core.admission.admission import Admission
from gateway.core.admission.concurrency import AdaptiveLimit
from gateway.core.admission.tenants import TenantQuotas, TenantSpec
from gateway.identity.audit import Audit
from gateway.identity.guard import GatewayGuard
from gateway.identity.key_file import edit_keys
from gateway.layers.authenticate import authenticate
from tests.bench.harness import Goal, Report, Spread, parser, table
from tests.support.serving.hosts import EchoHost, echo_request
from tidegate import clock
from tidegate.caller import Grant, UsageLimits
from tidegate.oip.guard import PresentedCredentials
from tidegate.types import Call, InferResponse, Reply

AIM_US: Final = 15.0
_KEYS: Final = 1000  # in the file


def presented(text: str) -> PresentedCredentials:
    return PresentedCredentials(f"Bearer {text}" if text else "", "", lambda: None, "bench", "127.0.0.1")


def _keys(path: Path) -> dict[str, str]:
    grants = {
        "key": Grant("acme", ("a*", "echo")),
        "key with limits": Grant("acme", limits=UsageLimits(requests_per_s=1e9)),
    }
    texts: dict[str, str] = {}
    with edit_keys(path) as records:
        for number in range(_KEYS):
            name = list(grants)[number % 2]
            chance = secrets.token_bytes(ID_BYTES + SALT_BYTES + SECRET_BYTES)
            record, texts[name] = new_key(grants[name], chance, utc_s=clock.utc_s())
            records[record.id] = record
    return texts


async def per_call_us(call: Callable[[], Awaitable[object]], count: int) -> float:
    begun = time.process_time()
    for _ in range(count):
        await call()
    return (time.process_time() - begun) / count * 1e6


async def measured(folder: Path, count: int, repeats: int) -> dict[str, Spread]:
    texts = _keys(folder / "keys.json")
    signer = ec.generate_private_key(ec.SECP256R1())
    jwks = folder / "jwks.json"
    jwks.write_text(json.dumps({"keys": [{**json.loads(ECAlgorithm.to_jwk(signer.public_key())), "kid": "k"}]}))
    now = clock.utc_s()
    claims = {"iss": "i", "aud": "a", "sub": "s", "tenant": "acme", "iat": now, "exp": now + 3600}
    texts["token, known"] = texts["token, new"] = jwt.encode(claims, signer, "ES256", {"kid": "k"})
    host = EchoHost()
    tenants = TenantQuotas({"acme": TenantSpec(requests_per_s=1e9, bytes_per_s=1e12)})
    admission = Admission(AdaptiveLimit(1024, targets=lambda: 1), tenants, draw=lambda: 0.5)
    auth = AuthConfig(
        keys_file=folder / "keys.json", jwt=JwtConfig(issuer="i", audience="a", jwks_file=jwks), anonymous="guests"
    )
    reply = Reply(InferResponse("echo", "3", ()))

    async def innermost(_: Call) -> Reply:
        return reply

    layer, call = authenticate(admission, clock.now)(innermost), Call(echo_request(), "bench", clock.now())
    found: dict[str, list[float]] = {}
    async with GatewayGuard(auth, host, admission, Audit()) as guard:
        tokens = guard.tokens
        assert tokens is not None
        identities = {name: await guard.identify(presented(text)) for name, text in texts.items()}

        async def let_in(name: str) -> None:
            if name == "token, new":
                tokens.forget()
            await guard.admit(presented(texts[name]))
            await layer(call.by(identities[name]))

        for _ in range(repeats):
            for name in texts:
                found.setdefault(name, []).append(await per_call_us(lambda name=name: let_in(name), count))  # type: ignore[misc]
            found.setdefault("no auth", []).append(await per_call_us(lambda: layer(call), count))
    return {name: Spread.of(samples) for name, samples in found.items()}


def main() -> None:
    chosen = parser(__doc__ or "").parse_args()
    count, repeats = (500, 2) if chosen.quick else (10_000, chosen.repeats or 7)
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        found = asyncio.run(measured(Path(folder), count, repeats))
    table(["credential", "µs a request"], [[name, f"{spread:.2f}"] for name, spread in found.items()])
    report = Report("identity_cost", {"calls": count, "repeats": repeats, "keys": _KEYS}, {"us": found})
    report.goal(Goal("identity_key_us", found["key"].median, AIM_US, "<="))
    report.write()


if __name__ == "__main__":
    main()

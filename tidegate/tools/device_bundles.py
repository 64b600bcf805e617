"""`tidegate pki issue --from` issues certificates for a list of devices, and writes a bundle for each.

All names are checked before anything is written. A run may be repeated: a device that has its bundle keeps it, so
names can be added to the list and nothing else happens; `renew` issues all anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from tidegate.security.authority import IssuedCertificate, PkiError
from tidegate.security.certificate_identity import CertificateIdentity
from tidegate.security.certificate_store import PkiStore
from tidegate.security.device_bundle import BundleError, DeviceBundle, device_config
from tidegate.storage.atomic_file import write_atomically

_MOST_BYTES: Final = 2**22
SUFFIX: Final = ".tar"


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """What all devices of a list have in common."""

    fleet: str
    broker: str
    common: Mapping[str, Any]


def read_names(file: Path) -> list[str]:
    """The devices that a list names, a line each; `#` begins a comment.

    Raises:
        PkiError: a name cannot be a device's, or stands there twice; each is named with its line.
    """
    try:
        with file.open("rb") as opened:
            text = opened.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise PkiError(f"{file} has more than {_MOST_BYTES} bytes: a line holds one name")
        lines = text.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PkiError(f"cannot read the list of names {file}: {error}") from error
    first: dict[str, int] = {}
    problems: list[str] = []
    for number, name in ((at, line.partition("#")[0].strip()) for at, line in enumerate(lines, 1)):
        if not name:
            continue
        if name in first:
            problems.append(f"{file}:{number}: {name!r} is on line {first[name]} already; each device needs its own")
        try:
            CertificateIdentity("edge", name)
        except ValueError as error:
            problems.append(f"{file}:{number}: {error}")
        first.setdefault(name, number)
    if problems:
        raise PkiError("\n".join(problems))
    if not first:
        raise PkiError(f"{file} names no device: write one name a line")
    return list(first)


def issue_bundles(
    store: PkiStore,
    names: Sequence[str],
    folder: Path,
    settings: FleetSettings,
    *,
    days: float,
    now: datetime,
    renew: bool = False,
) -> Iterator[tuple[str, IssuedCertificate | None]]:
    """Yield each name once its bundle is there, with its certificate when the bundle is new.

    Raises:
        PkiError: a certificate cannot be issued, or a bundle not be written; those before it are there.
    """
    known = {one.issued.identity: one.issued for one in store.held() if one.issued is not None}
    ca = store.authority().pair.cert
    for name in names:
        identity, file = CertificateIdentity("edge", name), folder / f"{name}{SUFFIX}"
        config = device_config(name, fleet=settings.fleet, broker=settings.broker, common=settings.common)
        issued = known.get(identity)
        if renew or issued is None or issued.state(now) != "valid":
            issued = store.issue(identity, issued.hosts if issued else (), days=days, now=now)
        try:
            cert, key = store.cert(identity).read_bytes(), store.key(identity).read_bytes()
            bundle = DeviceBundle(config, cert, key, ca)
            is_new = _held(file) != bundle
            if is_new:
                write_atomically(file, bundle.pack(), mode=0o600, parents=True)
        except OSError as error:
            raise PkiError(f"cannot write the bundle of {name}: {error.filename}: {error.strerror}") from error
        yield name, issued if is_new else None


def _held(file: Path) -> DeviceBundle | None:
    """The bundle that is there; None where there is none, or none that can be used."""
    try:
        with file.open("rb") as opened:
            return DeviceBundle.unpack(opened.read(_MOST_BYTES))
    except (OSError, BundleError):
        return None

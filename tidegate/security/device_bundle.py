"""A device bundle is everything by which one device joins a fleet, in one file: a plain tar with four members.

    device.yaml   its configuration: name, fleet, broker, and what all devices of this fleet have in common
    tls.crt, tls.key, ca.crt   its certificate and key, and the CA that it trusts

`tidegate pki issue --from` writes one for each device, and `tidegate edge join` installs one. It holds a private key,
so its file is its owner's alone, and is removed once the device has joined.

Bytes in, bytes out. What comes from a file is hostile: sizes and members are bounded, nothing is unpacked to a path
that the file names, and `checked` says of a whole bundle whether the parts fit together.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import yaml
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from tidegate.security.authority import Authority, CertificatePair, IssuedCertificate, read_issued

CONFIG, CERT, KEY, CA = MEMBERS = ("device.yaml", "tls.crt", "tls.key", "ca.crt")
MODES: Final = {
    CONFIG: 0o640,  # the address of a broker may hold a password
    CERT: 0o644,
    KEY: 0o600,
    CA: 0o644,
}
HOME: Final = Path("/etc/tidegate")  # of a device's configuration, as the systemd unit names it
DATA: Final = Path("/var/lib/tidegate")  # of its models and state, as the unit gives it
IDENTITY: Final = "identity"  # the folder under HOME that holds the certificate
_MOST_BYTES: Final = 2**20
_OURS: Final = ("name", "fleet", "mqtt", "tls")
DEFAULTS: Final[Mapping[str, Any]] = {
    "host": "0.0.0.0",
    "dial_out": "always",  # no address need be known per device, nor be reachable
    "model_repository": str(DATA / "models"),
    "state_dir": str(DATA / "state"),
}


class BundleError(Exception):
    """A bundle that cannot be made or used; the message names what is wrong with it and the way out."""


@dataclass(frozen=True, slots=True)
class DeviceBundle:
    """The members, as bytes."""

    config: bytes
    cert: bytes
    key: bytes
    ca: bytes

    def pack(self) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            for name, content in self.members().items():
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(content), MODES[name]
                archive.addfile(member, io.BytesIO(content))
        return out.getvalue()

    @classmethod
    def unpack(cls, raw: bytes) -> DeviceBundle:
        """Raises BundleError for what is no such tar."""
        if len(raw) > _MOST_BYTES:
            raise BundleError(f"it has more than {_MOST_BYTES} bytes: no bundle of `tidegate pki issue --from`")
        found: dict[str, bytes] = {}
        try:
            with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
                while (member := archive.next()) is not None:
                    file = archive.extractfile(member) if member.isreg() else None
                    if file is None or member.name not in MEMBERS or member.name in found:
                        raise BundleError(f"it holds {member.name!r}, which no bundle does")
                    found[member.name] = file.read()
        except (tarfile.TarError, ValueError, OSError, EOFError) as error:
            raise BundleError(f"it is no bundle of `tidegate pki issue --from`, or was cut short: {error}") from error
        if missing := [name for name in MEMBERS if name not in found]:
            raise BundleError(f"it lacks {', '.join(missing)}: copy it again")
        return cls(*(found[name] for name in MEMBERS))

    def members(self) -> dict[str, bytes]:
        return dict(zip(MEMBERS, (self.config, self.cert, self.key, self.ca), strict=True))

    def settings(self) -> dict[str, Any]:
        """The configuration's keys. Raises BundleError when it is no mapping."""
        return settings_in(self.config)

    def __repr__(self) -> str:
        return f"<DeviceBundle {len(self.config)} bytes of configuration>"  # and no key


def settings_in(config: bytes) -> dict[str, Any]:
    """The keys of a configuration. Raises BundleError when it is no mapping."""
    try:
        found = yaml.safe_load(config)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BundleError(f"{CONFIG} is not valid YAML: {error}") from error
    if not isinstance(found, dict):
        raise BundleError(f"{CONFIG} must be a mapping of keys")
    return {str(key): value for key, value in found.items()}


def checked(bundle: DeviceBundle, now: datetime) -> IssuedCertificate:
    """The certificate's contents, once the parts have been found to fit. Raises BundleError."""
    try:
        ca = x509.load_pem_x509_certificate(bundle.ca)
        Authority.load(CertificatePair(bundle.cert, bundle.key))  # that the key is the certificate's
        cert, issued = x509.load_pem_x509_certificate(bundle.cert), read_issued(bundle.cert)
    except ValueError as error:
        raise BundleError(f"{CERT}, {KEY} and {CA} do not fit: {error}; issue the bundle again (--renew)") from error
    try:
        cert.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise BundleError(f"{CERT} is not signed by {CA}: parts of two bundles, or of two CAs, were mixed") from error
    name = bundle.settings().get("name")
    if (issued.identity.role, issued.identity.name) != ("edge", name):
        raise BundleError(f"{CERT} is {issued.identity}'s, and `name` in {CONFIG} is {name!r}: they must be one")
    _check_times(cert.not_valid_before_utc, min(issued.ends, ca.not_valid_after_utc), now)
    return issued


def _check_times(begins: datetime, ends: datetime, now: datetime) -> None:
    if now < begins:
        raise BundleError(
            f"this machine's clock says {now:%Y-%m-%d %H:%M} UTC, and the certificate begins on "
            f"{begins:%Y-%m-%d %H:%M}: set the clock (`timedatectl set-ntp true`), then join again"
        )
    if now >= ends:
        raise BundleError(
            f"the certificate ended on {ends:%Y-%m-%d} (this machine's clock says {now:%Y-%m-%d}): issue the bundle "
            "again with `tidegate pki issue --from … --renew`, or set the clock if it is ahead"
        )


def device_config(name: str, *, fleet: str, broker: str, common: Mapping[str, Any] = DEFAULTS) -> bytes:
    """The configuration of one device, for `HOME`. Args: common: keys that all devices of the fleet share."""
    values = {"name": name, "fleet": fleet, "mqtt": broker, "tls": tls_section(HOME)}
    values |= {key: value for key, value in common.items() if key not in _OURS}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    head = f"# The edge agent {name}. Every key and its default: tidegate config example edge\n"
    return (head + text).encode()


def tls_section(home: Path) -> dict[str, str]:
    folder = home / IDENTITY
    return {"cert": str(folder / CERT), "key": str(folder / KEY), "ca": str(folder / CA)}


def moved_to(config: bytes, home: Path) -> bytes:
    """The configuration with its files under `home`, where that is not `HOME`."""
    if home == HOME:
        return config
    values = settings_in(config) | {"tls": tls_section(home)}
    for key in ("model_repository", "state_dir"):
        path = Path(str(values.get(key, DEFAULTS[key])))
        values[key] = str(home / path.relative_to(DATA)) if path.is_relative_to(DATA) else str(path)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode()

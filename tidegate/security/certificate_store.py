"""The certificate store is a folder with a CA and the certificates that it has issued.

    ca.crt                 every machine needs it, to trust the others
    ca.key                 needed only to issue; mode 0600
    ROLE/NAME.crt, .key    copied to the machine that it names

Each file is replaced atomically, the key first: a process that reads between the two finds a key and a certificate that
do not fit, keeps what it has, and reads again (`tls.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from tidegate.security.authority import Authority, CertificatePair, IssuedCertificate, PkiError, read_issued
from tidegate.security.certificate_identity import ROLES, CertificateIdentity
from tidegate.storage.atomic_file import write_atomically
from tidegate.storage.file_owner import FileOwner, kept

CA_DAYS: Final = 3650
CERT_DAYS: Final = 90


@dataclass(frozen=True, slots=True)
class StoredCertificate:
    """A certificate in the folder, with its contents or the reason why it cannot be read."""

    path: Path
    issued: IssuedCertificate | None
    problem: str = ""


class PkiStore:
    """The folder; it is read and written by the methods only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def ca_cert(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def ca_key(self) -> Path:
        return self.folder / "ca.key"

    def cert(self, identity: CertificateIdentity) -> Path:
        return self.folder / identity.role / f"{identity.name}.crt"

    def key(self, identity: CertificateIdentity) -> Path:
        return self.folder / identity.role / f"{identity.name}.key"

    def exists(self) -> bool:
        """Whether there is a CA, or what is left of one that issued certificates.

        A key alone is none: `init` was cut short before it wrote the certificate, so nothing was issued with it.
        """
        return self.ca_cert.exists() or (self.ca_key.exists() and bool(self.held()))

    def init(self, name: str, *, days: int, now: datetime, permit: Sequence[str] = ()) -> Authority:
        """Make the CA. Raises PkiError when there is one, which its certificates would not survive."""
        if self.ca_cert.exists():
            raise PkiError(f"{self.folder} holds a CA already: use it, or choose another --dir")
        if self.exists():
            raise PkiError(
                f"{self.folder} holds a CA's key and certificates, but {self.ca_cert} is missing: "
                "copy it from a machine that has it, or choose another --dir"
            )
        authority = Authority.make(name, valid=timedelta(days=days), now=now, permit=permit)
        _write(authority.pair, self.ca_cert, self.ca_key)
        return authority

    def authority(self) -> Authority:
        """Raises PkiError when there is no CA, or its files cannot be used."""
        try:
            return Authority.load(CertificatePair(self.ca_cert.read_bytes(), self.ca_key.read_bytes()))
        except FileNotFoundError as error:
            raise PkiError(f"there is no CA: {error.filename} is missing; make one with `tidegate pki init`") from error
        except OSError as error:
            raise PkiError(f"cannot read {error.filename}: {error.strerror}") from error
        except ValueError as error:
            raise PkiError(f"{self.folder} holds no usable CA: {error}") from error

    def issue(
        self,
        identity: CertificateIdentity,
        hosts: Sequence[str],
        *,
        days: float,
        now: datetime,
        owner: FileOwner | None = None,
    ) -> IssuedCertificate:
        """Issue a certificate and put it in its place, over an older one.

        Args:
            owner: whose files they are; None: whose the older ones were.

        Raises:
            PkiError: it cannot be issued, or not be written.
        """
        pair = self.authority().issue(identity, tuple(dict.fromkeys(hosts)), valid=timedelta(days=days), now=now)
        _write(pair, self.cert(identity), self.key(identity), owner)
        return read_issued(pair.cert)

    def renew(self, one: IssuedCertificate, *, now: datetime) -> IssuedCertificate:
        """Issue the same certificate anew: identity, hosts and length of validity. Raises PkiError."""
        return self.issue(one.identity, one.hosts, days=(one.ends - one.begins) / timedelta(days=1), now=now)

    def held(self) -> list[StoredCertificate]:
        """Every certificate here, by role and name."""
        return [_read_certificate(path) for role in ROLES for path in sorted((self.folder / role).glob("*.crt"))]

    def __repr__(self) -> str:
        return f"<PkiStore {self.folder}>"


def _read_certificate(path: Path) -> StoredCertificate:
    try:
        issued = read_issued(path.read_bytes())
    except OSError as error:
        return StoredCertificate(path, None, str(error.strerror))
    except ValueError as error:
        return StoredCertificate(path, None, f"no certificate of this CA: {error}")
    where = (path.parent.name, path.stem)
    if where != (issued.identity.role, issued.identity.name):
        return StoredCertificate(path, None, f"it is {issued.identity}'s, in a place that is not")
    return StoredCertificate(path, issued)


def _write(pair: CertificatePair, cert: Path, key: Path, owner: FileOwner | None = None) -> None:
    try:
        cert.parent.mkdir(parents=True, exist_ok=True)
        for path, content, mode in ((key, pair.key, 0o600), (cert, pair.cert, 0o644)):
            write_atomically(path, content, mode=mode, owner=owner.ids if owner else kept(path))
    except OSError as error:
        raise PkiError(f"cannot write {error.filename}: {error.strerror}") from error

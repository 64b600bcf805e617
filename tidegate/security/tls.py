"""`Tls` turns one `tls` section into the credentials and contexts that gRPC, HTTP and MQTT need.

    TlsConfig ── Tls ──┬─ server_credentials, dialler     gRPC: link stream and unary, both ends
                       ├─ server_context                  HTTP
                       └─ client_context                  MQTT

Between our own parts TLS is mutual, and a certificate carries an identity (`certificate_identity.py`): the dialling
side demands one role and name, the dialled side demands a role (`tidegate/servers/role_guard.py`). Callers of a gateway
need a certificate only where `require_client_cert` says so.

**Renewal needs no restart.** Files are looked at in each handshake: a `stat` of three files, and only what has changed
is read. That is how gRPC's dynamic credentials work, and TLS's own callback (SNI) does the same for HTTP, so
there is no task that polls and no moment in which the old certificate is still shown. Open connections are left
alone: a certificate matters when they begin. Files that don't fit together (a renewal is under way), or can't be
read, leave the old ones in use, are logged once, and are read again after a change, and else once a second: what kept
them from being read (no descriptor was left, a file was root's for a moment) may end without a trace on them. So do
files with another part's certificate, and those with one that is not good now in place of one that is.

Versions: 1.3 between our own parts, 1.2 at least for others. gRPC has no switch for it in Python, so there the server
looks at what was agreed and refuses an older one by name; nothing below 1.2 gets through a handshake anywhere.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import grpc
import structlog
from pydantic import Field

from tidegate import clock
from tidegate.config import Section
from tidegate.runtime.process import StartError
from tidegate.security.authority import IssuedCertificate, read_issued, validity
from tidegate.security.certificate_identity import CertificateIdentity

Version = Literal["1.2", "1.3"]
_MEANINGS: Final = (
    ("Hostname Verification Check failed", "whoever answers there shows the certificate of another part"),
    ("certificate has expired", "its certificate has ended: `tidegate pki renew`, and copy it there"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not of the CA that `tls.ca` names"),
    ("WRONG_VERSION_NUMBER", "it speaks no TLS there: its configuration has no section `tls`"),
)
Options = Sequence[tuple[str, Any]]
_AGAIN_S: Final = 1.0  # files that could not be used are not read in each handshake
Stamp = tuple[tuple[int, int, int, int], ...]
_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}

log = structlog.get_logger(__name__)


class TlsConfig(Section):
    """Encryption, the same section for every process. `tidegate pki` makes the files."""

    cert: Path = Field(description="This process's certificate, PEM.")
    key: Path = Field(description="Its key, PEM; readable by this process only.")
    ca: Path = Field(description="The CA that the other parts' certificates must come from, PEM.")
    client_ca: Path | None = Field(
        None, description="The CA of callers' certificates, where it is another one (gateways only). Default: `ca`."
    )
    require_client_cert: bool | None = Field(
        None,
        description="Whether who calls must show a certificate. Default: yes for edges and pools, where a gateway or, "
        "over HTTP, a client is demanded; no for gateways, whose callers have other credentials.",
    )
    min_version: Version | None = Field(
        None, description="Oldest TLS version. Default: 1.3 for calls between our own parts, 1.2 for all others."
    )


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """What the files held when they were last whole, and the stamp by which a change is noticed.

    Two are equal that hold the same: files that were only touched are no other certificate.
    """

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes
    client_ca: bytes
    stamp: Stamp = field(compare=False)


class Dialler(Protocol):
    """Opens channels to one peer."""

    def open(self, address: str, options: Options) -> grpc.aio.Channel: ...

    @property
    def shown(self) -> bytes | None:
        """The certificate, PEM, by which the channel that was opened last is known to the other side."""
        ...

    @property
    def version(self) -> object:
        """Another one once a channel that is opened now would differ from those before."""
        ...


class PlainDialler:
    """Channels without encryption."""

    version: object = None
    shown: bytes | None = None

    def open(self, address: str, options: Options) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=list(options))


class Tls:
    """One process's certificate, kept fresh. Stateless but for what it has read.

    Raises:
        StartError: the files cannot be used now; a later change that cannot is only complained of.
    """

    def __init__(self, config: TlsConfig) -> None:
        self.config = config
        self._paths = (config.cert, config.key, config.ca, config.client_ca or config.ca)
        self._identity: CertificateIdentity | None = None  # once it is known whose the certificate has to be
        self._unusable: Stamp | None = None  # of the files that could not be used
        self._again_at = 0.0
        self._complained: tuple[Stamp | None, str] | None = None
        try:
            self._material = _read(self._paths)
        except (OSError, ValueError) as error:
            raise StartError(f"the files of the section 'tls' cannot be used: {_words(error, config)}") from error

    def fresh(self) -> TlsMaterial:
        """The files as they are now; as they were where they do not fit together now."""
        stamp = None
        try:
            stamp = _stamp(self._paths)
            if stamp == self._material.stamp:
                self._complained = self._unusable = None
            elif stamp != self._unusable or clock.now() >= self._again_at:
                material = _read(self._paths)
                self._check_successor(material)
                self._take(material)
        except (OSError, ValueError) as error:
            self._unusable, self._again_at = stamp, clock.now() + _AGAIN_S
            self._complain(stamp, _words(error, self.config))
        return self._material

    def _check_successor(self, material: TlsMaterial) -> None:
        """Raises ValueError for a certificate that peers would refuse, in place of one that they take."""
        if material.cert == self._material.cert:
            return
        if self._identity is not None and (issued := read_issued(material.cert)).identity != self._identity:
            raise ValueError(f"{self.config.cert} is {issued.identity}'s, and this is {self._identity}")
        now = datetime.fromtimestamp(clock.utc_s(), UTC)
        begins, ends = validity(material.cert)
        old_begins, old_ends = validity(self._material.cert)
        if old_begins <= now < old_ends and not begins <= now < ends:
            why = f"ended at {ends.isoformat()}" if now >= ends else f"begins at {begins.isoformat()}"
            raise ValueError(f"the certificate in {self.config.cert} {why}, and the old one is good now")

    def _take(self, material: TlsMaterial) -> None:
        if material != self._material:
            log.info("took a renewed certificate", file=str(self.config.cert))
        self._material = material
        self._complained = self._unusable = None

    def _complain(self, stamp: Stamp | None, words: str) -> None:
        """Once for each reason and each change of the files."""
        if self._complained != (stamp, words):
            log.warning("the certificate's files changed and cannot be used; the old one stays", reason=words)
        self._complained = stamp, words

    def issued(self) -> IssuedCertificate | None:
        """The certificate's contents; None for one that `tidegate pki` did not issue."""
        try:
            return read_issued(self._material.cert)
        except ValueError:
            return None

    def check_own(self, identity: CertificateIdentity) -> None:
        """That this process's certificate is its own, and how long it lasts.

        Raises:
            StartError: the certificate names another part; peers would refuse it.
        """
        issued, path = self.issued(), self.config.cert
        if issued is None or issued.identity != identity:
            whose = f"is {issued.identity}'s" if issued else "has no identity of the form tidegate://ROLE/NAME"
            raise StartError(
                f"key 'tls.cert': {path} {whose}, and this is {identity}: `tidegate pki issue {identity}` makes its own"
            )
        self._identity = identity
        self.warn_of_end(issued)

    def state(self, issued: IssuedCertificate) -> str:
        """Whether a certificate is valid, due for renewal or expired by now."""
        return issued.state(datetime.fromtimestamp(clock.utc_s(), UTC))

    def warn_of_end(self, issued: IssuedCertificate) -> None:
        """Say with the remedy that a certificate is due or has expired, if it is."""
        if (state := self.state(issued)) != "valid":
            log.warning(
                f"this process's certificate is {state}: `tidegate pki renew` renews it, without a restart",
                file=str(self.config.cert),
                until=issued.ends.isoformat(),
            )

    def min_version(self, default: Version) -> Version:
        return self.config.min_version or default

    # gRPC

    def server_credentials(self, *, require_client_cert: bool) -> grpc.ServerCredentials:
        """Credentials of a server whose certificate may be renewed while it serves."""

        def configuration() -> grpc.ServerCertificateConfiguration:
            now = self.fresh()
            return grpc.ssl_server_certificate_configuration([(now.key, now.cert)], root_certificates=now.client_ca)

        return grpc.dynamic_ssl_server_credentials(
            configuration(), configuration, require_client_authentication=require_client_cert
        )

    def dialler(self, peer: CertificateIdentity | None) -> Dialler:
        """Channels that show this process's certificate.

        Args:
            peer: the identity that the other side's certificate must have; None: the host that is dialled.
        """
        return _TlsDialler(self, peer)

    # HTTP and MQTT

    def server_context(self, *, client_cert: ssl.VerifyMode) -> ssl.SSLContext:
        """Of a server; a renewed certificate is shown from the next handshake on."""

        def make(material: TlsMaterial) -> ssl.SSLContext:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._load(context, material, default="1.2")
            context.verify_mode = client_cert
            context.load_verify_locations(cadata=material.client_ca.decode())
            return context

        made: list[tuple[TlsMaterial, ssl.SSLContext]] = []

        def freshen(connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _first: ssl.SSLContext) -> None:
            material = self.fresh()
            if material is not made[0][0]:
                made[0] = material, make(material)
            connection.context = made[0][1]  # certificate and trust: the handshake goes on with these

        material = self.fresh()
        first = make(material)
        made.append((material, first))
        first.sni_callback = freshen  # also called for clients that name no host
        return first

    def client_context(self) -> ssl.SSLContext:
        """A context for one connection that is made now; the other side is checked by its host name."""
        material = self.fresh()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._load(context, material, default="1.2")
        context.load_verify_locations(cadata=material.ca.decode())
        return context

    def _load(self, context: ssl.SSLContext, material: TlsMaterial, *, default: Version) -> None:
        context.minimum_version = _VERSIONS[self.min_version(default)]
        _load_pair(context, material.cert, material.key)

    def __repr__(self) -> str:
        issued = self.issued()
        whose = f"{issued.identity} until {issued.ends:%Y-%m-%d}" if issued else "a foreign certificate"
        return f"<Tls {self.config.cert}: {whose}>"


class _TlsDialler:
    def __init__(self, tls: Tls, peer: CertificateIdentity | None) -> None:
        self._tls = tls
        # gRPC compares the certificate with a host name, and calls what makes it compare another one an override.
        self._check: Options = (("grpc.ssl_target_name_override", peer.host),) if peer else ()
        self._of: TlsMaterial | None = None
        self._credentials: grpc.ChannelCredentials | None = None

    @property
    def version(self) -> object:
        return self._tls.fresh()

    @property
    def shown(self) -> bytes | None:
        return self._of.cert if self._of else None

    def open(self, address: str, options: Options) -> grpc.aio.Channel:
        material = self._tls.fresh()
        if self._credentials is None or material is not self._of:
            self._of = material
            self._credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.cert)
        return grpc.aio.secure_channel(address, self._credentials, options=[*options, *self._check])


def explain_dial_error(details: str) -> str:
    """gRPC's account of a failed dial, with what it means where the certificates are the reason."""
    meaning = next((words for sign, words in _MEANINGS if sign in details), None)
    return f"{meaning} ({details})" if meaning else details


def tls_of(config: TlsConfig | None, identity: Callable[[], CertificateIdentity]) -> Tls | None:
    """A process's TLS, once its certificate has been found to be its own; None without the section.

    Raises:
        StartError: the files cannot be used, the certificate is not this process's, or its name cannot be in one.
    """
    if config is None:
        return None
    tls = Tls(config)
    try:
        tls.check_own(identity())
    except ValueError as error:
        raise StartError(f"key 'name': {error} (as the key 'tls' is set)") from error
    return tls


def check_encrypted(url: str | None, tls: object) -> None:
    """Raises StartError for a broker without encryption beside a `tls` section: the gap would stay unnoticed."""
    if tls is not None and url is not None and not url.startswith("mqtts://"):
        # Without user and password, which a URL may hold.
        raise StartError(
            f"key 'mqtt': the broker at {url.rpartition('@')[2].removeprefix('mqtt://')} would be spoken to without "
            "encryption though 'tls' is set; write mqtts://"
        )


def _stamp(paths: Sequence[Path]) -> Stamp:
    # With the time of rights too: a file that was root's alone becomes this account's without any other change.
    stats = [os.stat(path) for path in paths]
    return tuple((one.st_mtime_ns, one.st_ctime_ns, one.st_ino, one.st_size) for one in stats)


def _read(paths: Sequence[Path]) -> TlsMaterial:
    """Raises OSError for a file that cannot be read, ValueError for content that cannot be used."""
    stamp = _stamp(paths)
    cert, key, ca, client_ca = (path.read_bytes() for path in paths)
    material = TlsMaterial(cert, key, ca, client_ca, stamp)
    try:
        probe = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for authority in (material.ca, material.client_ca):
            probe.load_verify_locations(cadata=authority.decode())
        _load_pair(probe, material.cert, material.key)
    except ssl.SSLError as error:
        raise ValueError(error.reason or "NO_START_LINE") from error
    return material


def _load_pair(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """Python's ssl takes certificates from files only. These are what was read at one moment: a file in memory that
    has no name, so that a key is never copied to a disk."""
    handle = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(handle, key.rstrip() + b"\n" + cert)
        context.load_cert_chain(f"/proc/self/fd/{handle}", password=_no_password)
    finally:
        os.close(handle)


def _no_password() -> str:
    raise ValueError("the key is locked by a password")  # and not a prompt on an unattended terminal


def _words(error: Exception, config: TlsConfig) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    reasons = {
        "KEY_VALUES_MISMATCH": f"{config.key} is not the key of {config.cert}",
        "NO_START_LINE": f"{config.cert}, {config.key} or {config.ca} is not PEM",
    }
    return reasons.get(str(error), str(error))

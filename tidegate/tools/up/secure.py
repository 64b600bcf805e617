"""`tidegate up --secure` makes all certificates, keys and broker files before anything starts.

    DATA_DIR/pki         a CA, and a certificate for each part; those that are due are renewed
    DATA_DIR/mosquitto   the broker's configuration and ACL, and its copy of its certificate
    DATA_DIR/keys.json   hashes of API keys; more are made with `tidegate keys create --file …`
    DATA_DIR/api-key     the one that the shown commands use, for its owner's eyes only

All of it is made once and kept, so that clients which were given the CA's certificate or a key still get in after a
restart. Keys are made by `tidegate keys` itself, as a process, since the gateway's code stays behind its command.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tidegate import clock
from tidegate.security.authority import PkiError
from tidegate.security.certificate_identity import CertificateIdentity
from tidegate.security.certificate_store import CA_DAYS, CERT_DAYS, PkiStore
from tidegate.storage.atomic_file import write_atomically
from tidegate.tools.broker.cli import copy_certificate, write
from tidegate.tools.broker.mosquitto_config import MosquittoPlan
from tidegate.tools.up.plan import FLEET, LOOPBACK, Options, PlanError, Secure

_KEY_WITHIN_S: Final = 30.0
_TENANT: Final = "demo"
_BROKER: Final = CertificateIdentity("broker", "main")
# Debian puts it where only root looks.
_SEARCH: Final = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))


def secure(options: Options) -> Secure:
    """Where everything will be. Nothing is made yet.

    Raises:
        PlanError: Mosquitto is not installed, or the broker that was named would be spoken to in plain text.
    """
    if options.broker is not None and not options.broker.startswith("mqtts://"):
        raise PlanError(f"--secure with --broker {options.broker.rpartition('@')[2]}: it must be an mqtts:// address")
    mosquitto = shutil.which("mosquitto", path=_SEARCH)
    if options.broker is None and mosquitto is None:
        raise PlanError(
            "--secure needs Mosquitto, since the embedded broker lets anybody in: apt-get install mosquitto, "
            "or name a broker with --broker mqtts://…"
        )
    data_dir = options.data_dir
    return Secure(
        pki=data_dir / "pki",
        mosquitto=mosquitto or "",
        broker_dir=data_dir / "mosquitto",
        keys_file=data_dir / "keys.json",
        api_key_file=data_dir / "api-key",
    )


def prepare(options: Options, files: Secure) -> None:
    """Make what is missing and renew what is due.

    Raises:
        PlanError: it cannot be made.
    """
    try:
        options.data_dir.mkdir(parents=True, exist_ok=True)
        store = PkiStore(files.pki)
        _certificates(store, _identities(options), _hosts(options))
        if options.broker is None:
            _broker(options, files, store)
        if not files.api_key_file.exists():
            write_atomically(files.api_key_file, _new_key(files.keys_file), mode=0o600)
    except (PkiError, ValueError) as error:
        raise PlanError(f"--secure: {error}") from error
    except OSError as error:
        raise PlanError(f"--secure: {error.filename}: {error.strerror}") from error


def _identities(options: Options) -> Iterable[CertificateIdentity]:
    yield from (CertificateIdentity("gateway", name) for name in options.gateway_names)
    yield CertificateIdentity("pool", "pool")
    yield from (CertificateIdentity("edge", f"edge-{number}") for number in range(1, options.edges + 1))
    if options.broker is None:
        yield _BROKER


def _hosts(options: Options) -> tuple[str, ...]:
    own = () if options.host in ("0.0.0.0", "::", "") else (options.host,)
    return tuple(dict.fromkeys(("localhost", LOOPBACK, *own)))


def _certificates(store: PkiStore, wanted: Iterable[CertificateIdentity], hosts: tuple[str, ...]) -> None:
    now = datetime.fromtimestamp(clock.utc_s(), UTC)
    if not store.exists():
        store.init("Tidegate demo CA", days=CA_DAYS, now=now)
    held = {one.issued.identity: one.issued for one in store.held() if one.issued is not None}
    for identity in wanted:
        one = held.get(identity)
        if one is None or one.state(now) != "valid" or not set(hosts) <= set(one.hosts):
            store.issue(identity, hosts, days=CERT_DAYS, now=now)


def _broker(options: Options, files: Secure, store: PkiStore) -> None:
    plan = MosquittoPlan(
        FLEET,
        options.gateway_names,
        files.broker_dir,
        port=options.ports_from + 4,
        address=LOOPBACK,
        data_dir=None,
        run_as="root" if os.geteuid() == 0 else None,  # else it could not read a key that is ours
    )
    write(plan, files.broker_dir, ())
    copy_certificate(store, files.broker_dir)


def _new_key(keys_file: Path) -> bytes:
    """A key for the demo's own commands, as `tidegate keys` prints it. Raises ValueError with its words."""
    command = ["keys", "create", "--file", str(keys_file), "--tenant", _TENANT]
    rights = [word for right in ("infer", "metrics", "admin") for word in ("--right", right)]
    made = subprocess.run(
        [sys.executable, "-P", "-m", "tidegate.cli", *command, *rights, "--note", "tidegate up --secure"],
        capture_output=True,
        timeout=_KEY_WITHIN_S,
        check=False,
    )
    if made.returncode != 0:
        raise ValueError(f"`tidegate keys create` failed: {made.stderr.decode(errors='replace').strip()}")
    return made.stdout.strip() + b"\n"

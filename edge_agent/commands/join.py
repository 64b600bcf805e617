"""Joining installs a device's bundle so that, at any moment, a whole identity is in place: the old one or the new one.

    HOME/identities/SERIAL-…/   device.yaml, tls.crt, tls.key, ca.crt of one bundle
    HOME/identity               a link to one of these folders: its replacement is the moment of joining
    HOME/device.yaml            a link to identity/device.yaml

Everything is written, given to its reader and tried before the link changes; what fails leaves what was there. After
a power cut in between the same command completes it. Folders of earlier identities are removed, since they hold keys.

A device that joins again under its own name keeps its configuration, which its owner may have changed. One that joins
for the first time takes the bundle's, and a copy of what was there is put aside. Another name is refused unless it is
to be replaced: two devices under one name would end each other's sessions.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from edge_agent.config import EdgeConfig
from edge_agent.core.diagnosis import OLDEST_SANE_UTC_S
from tidegate.config import load
from tidegate.security.authority import read_issued
from tidegate.security.device_bundle import (
    CERT,
    CONFIG,
    IDENTITY,
    MODES,
    BundleError,
    DeviceBundle,
    checked,
    moved_to,
    settings_in,
    tls_section,
)
from tidegate.storage.atomic_file import link_atomically, sync_folder, write_atomically
from tidegate.storage.file_owner import FileOwner

IDENTITIES: Final = "identities"
_MOST_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class Joined:
    """What was installed. `kept`: the keys in which the configuration that stayed differs from the bundle's."""

    config: EdgeConfig
    ends: datetime
    kept: tuple[str, ...]
    aside: Path | None  # a copy of the configuration that was there before the device joined for the first time


def join_fleet(
    file: Path, home: Path, *, now: datetime, owner: FileOwner | None = None, replace_other: bool = False
) -> Joined:
    """Install the bundle in `file` under `home`.

    Args:
        owner: as whom the agent will run; None: who runs this.
        replace_other: whether another device's identity may be replaced, and the configuration with it.

    Raises:
        BundleError, ConfigError: it cannot be installed; what was installed is still in place.
        OSError: the same, of a file that cannot be written.
    """
    if now.timestamp() < OLDEST_SANE_UTC_S:
        raise BundleError("the clock was never set, so no certificate is valid: `timedatectl set-ntp true`, then again")
    with file.open("rb") as opened:
        bundle = DeviceBundle.unpack(opened.read(_MOST_BYTES + 1))
    issued = checked(bundle, now)
    home = home.absolute()
    home.mkdir(parents=True, exist_ok=True)
    with _alone(home):
        is_joined = (home / IDENTITY).exists()
        if is_joined and _was_cut_off(home):
            link_atomically(home / CONFIG, f"{IDENTITY}/{CONFIG}")
        held = _held_names(home) if is_joined and not replace_other else set()
        if others := held - {issued.identity.name}:
            raise BundleError(
                f"{home} is the device {' and '.join(sorted(others))}, and this bundle is {issued.identity.name}'s: "
                "take that device's own bundle, or --replace to make this one another device"
            )
        kept: tuple[str, ...] = ()
        config = moved_to(bundle.config, home)
        if held and (home / CONFIG).exists():
            config, kept = _kept_config(home, config)
        # Of a device that has not joined it is a package's example, or was written by hand.
        aside = None if is_joined else _put_aside(home / CONFIG)
        settled = _install(home, replace(bundle, config=config), f"{issued.serial:x}", owner)
    return Joined(settled, issued.ends, kept, aside)


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Let no second command install there meanwhile."""
    descriptor = os.open(home, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _held_names(home: Path) -> set[str]:
    """The device's name by its certificate and by its configuration, as far as there are any."""
    names = set()
    if (cert := home / IDENTITY / CERT).exists():
        with suppress(ValueError):  # one that was damaged names nobody, and is replaced
            names.add(read_issued(cert.read_bytes()).identity.name)
    if (config := home / CONFIG).exists():
        names.add(str(_settings_at(config).get("name", "(the host's)")))
    return names


def _settings_at(config: Path) -> dict[str, Any]:
    """The keys of the configuration that is there, whose faults are none of the bundle's. Raises BundleError."""
    try:
        return settings_in(config.read_bytes())
    except BundleError as error:
        raise BundleError(
            f"what cannot be read is {config}, which is there already ({error}): mend it, or take the bundle's "
            "configuration with --replace"
        ) from error


def _was_cut_off(home: Path) -> bool:
    """Whether the first joining ended between its two links: what it had put aside is still in its place as well."""
    config, aside = home / CONFIG, _aside(home / CONFIG)
    is_old = config.exists() and not config.is_symlink() and aside.exists()
    return is_old and (home / IDENTITY / CONFIG).exists() and config.read_bytes() == aside.read_bytes()


def _aside(config: Path) -> Path:
    return config.with_name(config.name + ".before-joining")


def _put_aside(config: Path) -> Path | None:
    if config.is_symlink() or not config.exists():
        return None
    aside = _aside(config)
    write_atomically(aside, config.read_bytes(), mode=config.stat().st_mode & 0o777)
    return aside


def _kept_config(home: Path, offered: bytes) -> tuple[bytes, tuple[str, ...]]:
    """The configuration that is there, and the keys in which it differs."""
    config = (home / CONFIG).read_bytes()
    mine, theirs = _settings_at(home / CONFIG), settings_in(offered)
    if mine.get("tls") != tls_section(home):
        raise BundleError(
            f"key 'tls' of {home / CONFIG} names other files than those under {home / IDENTITY}, where this bundle's "
            "would go: change them there, or take the bundle's configuration with --replace"
        )
    return config, tuple(key for key in theirs if mine.get(key) != theirs[key])


def _install(home: Path, bundle: DeviceBundle, serial: str, owner: FileOwner | None) -> EdgeConfig:
    identities, link, config = home / IDENTITIES, home / IDENTITY, home / CONFIG
    if link.exists() and not link.is_symlink():
        raise BundleError(f"{link} is no link of `tidegate edge join`: move it away")
    identities.mkdir(exist_ok=True)
    folder = identities / f"{serial}-{secrets.token_hex(3)}"
    folder.mkdir(mode=0o755)
    ids = owner.ids if owner else None
    try:
        for name, content in bundle.members().items():
            write_atomically(folder / name, content, mode=MODES[name], owner=ids)
        settled = load(EdgeConfig, folder / CONFIG)
        if owner is not None and (why := owner.why_closed(folder / name for name in MODES)):
            raise BundleError(f"the agent could not read its files: {why}")
        sync_folder(identities)
        if link.exists() and config.exists() and not config.is_symlink():
            # An editor has replaced the link: what it wrote becomes part of the identity that is left now.
            write_atomically(link.resolve() / CONFIG, config.read_bytes(), mode=MODES[CONFIG], owner=ids)
            link_atomically(config, f"{IDENTITY}/{CONFIG}")
        link_atomically(link, f"{IDENTITIES}/{folder.name}")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    link_atomically(config, f"{IDENTITY}/{CONFIG}")
    for other in identities.iterdir():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return settled

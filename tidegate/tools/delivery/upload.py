"""An upload brings files into a gateway's store: only missing ones, each from where its last upload broke off."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from tidegate.admin_client import Admin, AdminError
from tidegate.tools.delivery.files import LocalArtefact

PIECE_BYTES: Final = 4 * 2**20
_TRIES: Final = 3  # in a row, while another upload sends the same


def push(
    admin: Admin, files: Iterable[LocalArtefact], on_bytes: Callable[[str, int], None] = lambda _path, _size: None
) -> int:
    """Bytes that were sent. `on_bytes` hears of each step, also of what was there already. Raises AdminError."""
    return sum(_push(admin, one, on_bytes) for one in files)


def _push(admin: Admin, one: LocalArtefact, on_bytes: Callable[[str, int], None]) -> int:
    name, size = one.artefact.path, one.artefact.size_bytes
    where = f"/v1/artifacts/sha256/{one.artefact.sha256}"
    offset, is_whole = _standing(admin, where)
    on_bytes(name, offset)
    sent = tries = 0
    with one.path.open("rb") as file:
        while not is_whole:
            file.seek(offset)
            piece = file.read(PIECE_BYTES)
            content_range = f"bytes {offset}-{offset + len(piece) - 1}/{size}" if piece else f"bytes */{size}"
            try:
                _, headers = admin.ask(where, method="PUT", body=piece, headers={"Content-Range": content_range})
            except AdminError as error:
                tries += 1
                if error.status != 409 or tries > _TRIES:
                    raise
                offset, is_whole = _standing(admin, where)
                continue
            sent, tries, reached = sent + len(piece), 0, int(headers["Upload-Offset"])
            on_bytes(name, reached - offset)
            offset, is_whole = reached, reached == size
    return sent


def _standing(admin: Admin, where: str) -> tuple[int, bool]:
    """(how much of it is there, whether that is all and was checked)."""
    try:
        _, headers = admin.ask(where, method="HEAD")
        return int(headers["Upload-Offset"]), True
    except AdminError as error:
        if error.status != 404 or "Upload-Offset" not in error.headers:
            raise
        return int(error.headers["Upload-Offset"]), False

"""The operator's token: its file, who may have written it, and to which addresses it is shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidegate.servers.operator_token import FILE_VARIABLE, OperatorToken, file_name, token_for

ADMIN = "http://127.0.0.1:8003"


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RUNTIME_DIRECTORY", "STATE_DIRECTORY", FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "tidegate"


def published(port: int = 8003) -> OperatorToken:
    token = OperatorToken()
    token.publish(port)
    return token


def test_a_published_token_is_found_by_its_port_until_it_is_withdrawn(session: Path) -> None:
    token = published(48_003)

    assert token.path == session / file_name(48_003)
    assert session.stat().st_mode & 0o777 == 0o700 and token.path.stat().st_mode & 0o777 == 0o600
    assert token_for("http://localhost:48003/") == token_for("https://[::1]:48003") == token.value
    assert token_for("http://127.0.0.1:48004") is None
    token.withdraw()
    assert token_for("http://127.0.0.1:48003") is None


@pytest.mark.parametrize("address", ["http://10.0.0.7:48003", "http://gateway:48003", "http://127.0.0.1.example:48003"])
def test_the_token_is_shown_to_this_machine_only(session: Path, address: str) -> None:
    token = published(48_003)

    assert token_for(address) is None
    token.withdraw()


def test_the_successors_file_stays_when_a_gateway_ends(session: Path) -> None:
    old, new = published(48_003), published(48_003)
    old.withdraw()

    assert token_for("http://127.0.0.1:48003") == new.value
    new.withdraw()


@pytest.mark.parametrize("spoil", ["link", "writable", "pipe", "words", "large"])
def test_a_file_that_another_account_may_have_made_is_no_token(session: Path, tmp_path: Path, spoil: str) -> None:
    path = published(48_003).path
    assert path is not None
    if spoil == "writable":
        path.chmod(0o622)
    else:
        moved = path.rename(tmp_path / "moved")
        if spoil == "link":
            path.symlink_to(moved)
        elif spoil == "pipe":
            os.mkfifo(path, 0o600)
        else:
            path.write_text("no token" if spoil == "words" else moved.read_text().strip() + "x" * 10_000)
            path.chmod(0o600)

    assert token_for("http://127.0.0.1:48003") is None


def test_a_folder_that_others_may_write_is_passed_over(session: Path) -> None:
    session.mkdir()
    session.chmod(0o777)
    token = published(48_003)

    assert token.path is not None and token.path.parent != session
    token.withdraw()


@pytest.mark.parametrize(
    ("authorization", "admitted"),
    [("Bearer {}", True), ("bearer {}", True), ("Bearer  {} ", True), ("{}", False), ("Bearer {}x", False),
     ("Basic {}", False), ("", False), ("Bearer", False), ("Bearer \udcff", False)],
)  # fmt: skip
def test_only_the_whole_token_is_admitted(authorization: str, admitted: bool) -> None:
    token = OperatorToken()

    assert token.admits(authorization.format(token.value)) is admitted
    assert not OperatorToken().admits(authorization.format(token.value)), "each gateway has its own"


def test_the_environment_names_another_file(session: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = OperatorToken()
    token.publish(0, tmp_path / "elsewhere.token")
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "elsewhere.token"))
    assert token_for("http://gateway:8003") == token.value
    (tmp_path / "elsewhere.token").write_text("nonsense")
    with pytest.raises(ValueError, match="no operator's token"):
        token_for(ADMIN)

"""Changes over a loopback admin port: the token that they require, the commands that find it, and the audit lines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

from gateway.app import Gateway
from gateway.commands.log_level import log_level
from gateway.config.auth import AuthConfig
from gateway.identity.audit import Audit
from gateway.identity.operator_access import LOOKS, OPERATOR, token_for_changes
from tests.support.gateway.app import configured, gateway_for
from tests.support.gateway.guarded import keys_in
from tidegate.runtime.logs import LEVELS
from tidegate.runtime.process import StartError
from tidegate.servers.operator_token import FILE_VARIABLE, OperatorToken

CHANGES = (
    ("PUT", "/v1/log-level", b'{"level": "info"}'),
    ("POST", "/v1/versions/echo/promote", b""),
    ("POST", "/v1/versions/echo/return", b""),
    ("PUT", "/v1/versions/echo/trial", b"{}"),
)


async def status_of(
    session: aiohttp.ClientSession, gateway: Gateway, change: tuple[str, str, bytes], authorization: str = ""
) -> int:
    method, path, body = change
    shown = {"Authorization": authorization} if authorization else {}
    async with session.request(method, gateway.addresses["admin"] + path, data=body, headers=shown) as response:
        return response.status


@pytest.mark.slow
async def test_no_change_is_made_without_the_token_and_looks_need_none(tmp_path: Path) -> None:
    async with gateway_for(configured(tmp_path)) as (gateway, session):
        token = gateway.operator_token
        with capture_logs() as logs:
            for change in CHANGES:
                assert await status_of(session, gateway, change) == 401
                assert await status_of(session, gateway, change, f"Bearer {token.value[:-1]}") == 401
                assert await status_of(session, gateway, change, f"Basic {token.value}") == 401
                assert await status_of(session, gateway, change, f"Bearer {token.value}") in (200, 409, 422)
            async with session.get(gateway.addresses["admin"] + "/v1/state") as looked:
                assert looked.status == 200
        done = [line for line in logs if line.get("audit") == "admin"]
        assert [(line["who"], line["what"]) for line in done] == [
            (OPERATOR, f"{method} {path}") for method, path, _ in CHANGES
        ]
        assert all(token.value not in str(line) for line in logs)
        path = token.path
        assert path is not None and path.stat().st_mode & 0o777 == 0o600
    assert not path.exists(), "the token goes with its gateway"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "QUERY"])
def test_only_get_and_head_are_looks(method: str) -> None:
    assert method not in LOOKS and {"GET", "HEAD"} == LOOKS


@pytest.mark.slow
async def test_a_command_of_the_same_account_finds_the_token_by_the_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "session"))
    (tmp_path / "session").mkdir(mode=0o700)
    async with gateway_for(configured(tmp_path)) as (gateway, _):
        before = LEVELS.level

        async def run(*words: str) -> tuple[int, str]:
            asked = [*words, "--admin", gateway.addresses["admin"]]
            ran = await asyncio.to_thread(lambda: CliRunner().invoke(log_level, asked))
            return ran.exit_code, ran.output.splitlines()[-1]  # after log lines

        path = gateway.operator_token.path
        assert path is not None and path.parent == tmp_path / "session" / "tidegate"
        assert await run(before) == (0, before)
        # Another account cannot read the file: to it the gateway names the file and the way out.
        path.unlink()
        status, words = await run("debug")
        assert status != 0 and str(path) in words and FILE_VARIABLE in words
        copy = tmp_path / "copy"
        copy.write_text(gateway.operator_token.value)
        monkeypatch.setenv(FILE_VARIABLE, str(copy))
        assert await run(before) == (0, before)
        monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "absent"))
        status, words = await run(before)
        assert status != 0 and str(tmp_path / "absent") in words and "unset it" in words


@pytest.mark.slow
async def test_with_auth_a_change_needs_the_right_admin_also_on_loopback(tmp_path: Path) -> None:
    keys = keys_in(tmp_path)
    async with gateway_for(configured(tmp_path, auth=AuthConfig(keys_file=keys.path))) as (gateway, session):
        assert gateway.operator_token.path is None
        for change in CHANGES:
            assert await status_of(session, gateway, change) == 401
            assert await status_of(session, gateway, change, f"Bearer {gateway.operator_token.value}") == 401
            assert await status_of(session, gateway, change, keys.headers("good")["authorization"]) == 403
            assert await status_of(session, gateway, change, keys.headers("operator")["authorization"]) < 500
        assert await status_of(session, gateway, CHANGES[0], keys.headers("operator")["authorization"]) == 200
        async with session.get(gateway.addresses["admin"] + "/v1/state") as looked:
            assert looked.status == 200


@pytest.mark.slow
async def test_a_token_file_that_cannot_be_written_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = configured(tmp_path, admin_token_file=tmp_path / "file" / "token")
    with pytest.raises(StartError, match="admin_token_file"):
        async with Gateway(config):
            pass


def test_a_token_that_was_published_nowhere_refuses_with_the_way_out() -> None:
    assert "OperatorToken in None" in repr(OperatorToken())
    assert token_for_changes(OperatorToken(), Audit())

"""A real headless Chromium, driven over its DevTools protocol: no driver program and no library, one WebSocket.

    async with chromium(tmp_path) as browser, browser.page(width=390, dark=True) as page:
        await page.goto(url)
        await page.until("document.title !== ''")

Whatever the page says on its console as an error, and whatever it fails to load or violates, is kept in `page.errors`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SHOTS = Path(".tidegate/screenshots")  # kept, to be looked at after a change of the page
MISSING = "needs Chromium on PATH (Debian: apt install chromium)"
_STARTS_WITHIN_S = 60.0
_ANSWERS_WITHIN_S = 60.0
_UNTIL_S = 45.0  # a browser on a crowded machine
_FLAGS = (
    "--headless=new", "--no-sandbox", "--remote-debugging-port=0", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--no-default-browser-check", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--hide-scrollbars", "--mute-audio", "--force-color-profile=srgb",
)  # fmt: skip


class Page:
    """One tab. `errors` holds what went wrong in it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read(), name="devtools")

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._socket.close()

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(_ANSWERS_WITHIN_S):
            said = await answer
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']}")
        result: dict[str, Any] = said["result"]
        return result

    async def seen_on(self, width: int, height: int, *, dark: bool = False) -> None:
        """From now on it is on a screen of this size and taste."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def goto(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """What the expression is in the page; promises are waited for."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def until(self, script: str, within_s: float = _UNTIL_S) -> Any:
        """Wait until the expression is true there; returns it."""
        found: Any = None
        try:
            async with asyncio.timeout(within_s):
                while True:
                    found = await self.value(f"(() => {{ try {{ return {script}; }} catch {{ return false; }} }})()")
                    if found:
                        return found
                    await asyncio.sleep(0.05)  # noqa: TID251  # a real browser cannot be waited for otherwise
        except TimeoutError:
            seen = await self.value("document.body.innerText.slice(0, 2000)")
            raise AssertionError(
                f"not within {within_s:g} s: {script}\nlast: {found!r}\n{self.errors}\n{seen}"
            ) from None

    async def text(self, selector: str) -> str:
        found: str = await self.value(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    async def press(self, key: str, code: int) -> None:
        """One key, as a keyboard sends it."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    async def screenshot(self, path: Path, *, whole: bool = True) -> None:
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(_keep, path, base64.b64decode(shot["data"]))

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                waiting = self._answers.pop(said["id"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(said)
            else:
                self._note(said["method"], said["params"])

    def _note(self, event: str, told: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(str(told["exceptionDetails"].get("exception", told["exceptionDetails"])))
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(one.get("value", one.get("description"))) for one in told["args"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")


class Browser:
    def __init__(self, address: str, session: aiohttp.ClientSession) -> None:
        self._address = address
        self._session = session

    @asynccontextmanager
    async def page(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> AsyncIterator[Page]:
        async with self._session.put(f"{self._address}/json/new?about:blank") as response:
            tab = await response.json(content_type=None)
        page = Page(await self._session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0))
        try:
            for domain in ("Page", "Runtime", "Log"):
                await page.call(f"{domain}.enable")
            await page.seen_on(width, height, dark=dark)
            yield page
        finally:
            await page.close()
            async with self._session.get(f"{self._address}/json/close/{tab['id']}"):
                pass


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser of its own, with a profile that goes with it."""
    assert PROGRAM is not None, MISSING
    with tempfile.TemporaryDirectory(prefix="tidegate-chromium-", ignore_cleanup_errors=True) as profile:
        environment = os.environ | {"HOME": profile, "XDG_CONFIG_HOME": profile, "XDG_CACHE_HOME": profile}
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *_FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                yield Browser(f"http://127.0.0.1:{port}", session)
        finally:
            await _end(process)


async def _port(path: Path, process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(_STARTS_WITHIN_S):
        while True:
            if words := await asyncio.to_thread(_words, path):
                return int(words[0])
            if process.returncode is not None:
                raise RuntimeError(f"Chromium ended with {process.returncode}")
            await asyncio.sleep(0.05)  # noqa: TID251  # it says so in a file


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def _keep(path: Path, image: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image)


async def _end(process: asyncio.subprocess.Process) -> None:
    """With all of its own: it is the leader of a group."""
    with_all = os.getpgid(process.pid) if process.returncode is None else None
    if with_all is not None:
        os.killpg(with_all, 15)
    try:
        async with asyncio.timeout(10.0):
            await process.wait()
    except TimeoutError:
        if with_all is not None:
            os.killpg(with_all, 9)
        await process.wait()

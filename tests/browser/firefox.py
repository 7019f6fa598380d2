"""Debian's Firefox, driven over WebDriver BiDi: Playwright drives its own build of Firefox only.

https://w3c.github.io/webdriver-bidi. Every wait has a deadline.
"""

import asyncio
import contextlib
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse

START_S = 180.0
CALL_S = 120.0
TEXT = "document.querySelector('main').innerText"
PREFERENCES = {
    "app.update.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "browser.startup.homepage_override.mstone": "ignore",
    "browser.startup.page": 0,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "toolkit.telemetry.enabled": False,
}


class BidiError(Exception):
    """A command that Firefox refused, or did not answer in time."""


class Tab:
    """One tab: what a user sees and does in it. `errors` are those of the pages' scripts and of the console."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self._loop, self._socket, self._number = loop, socket, 0
        self._call("session.new", capabilities={})
        self._call("session.subscribe", events=["log.entryAdded"])
        self._context = self._call("browsingContext.getTree")["contexts"][0]["context"]

    def goto(self, url: str) -> None:
        """Open an address; return when the page is whole."""
        self._call("browsingContext.navigate", context=self._context, url=url, wait="complete")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, as JSON has it."""
        target = {"context": self._context}
        found = self._call("script.evaluate", expression=f"(async () => JSON.stringify({expression}))()", target=target,
                           awaitPromise=True)  # fmt: skip
        if found["type"] == "exception":
            raise BidiError(found["exceptionDetails"]["text"])
        return json.loads(found["result"].get("value", "null"))

    def wait_for(self, expression: str) -> None:
        """Return when an expression is true, on this page or on one that replaces it."""
        until = time.monotonic() + CALL_S
        while True:
            with contextlib.suppress(BidiError):  # between two pages
                if self.evaluate(f"Boolean({expression})"):
                    return
            if time.monotonic() > until:
                raise BidiError(f"not true within {CALL_S:g} s: {expression}; the page: {self.evaluate(TEXT)[:500]}")
            time.sleep(0.05)

    def text(self) -> str:
        """Return the text of the page as one reads it, once its style sheets are there."""
        self.wait_for("document.readyState === 'complete'")
        return self.evaluate(TEXT)

    def click(self, selector: str, containing: str = "") -> None:
        """Click the first element that a CSS selector finds and whose text holds `containing`, once it lies still."""
        said = f"e => e.textContent.includes({json.dumps(containing)})"
        found = f"[...document.querySelectorAll({json.dumps(selector)})].find({said})"
        self.wait_for(f"document.readyState === 'complete' && {found}")
        x, y = self._place(found)
        while (place := self._place(found)) != [x, y]:
            x, y = place
        pointer = [
            {"type": "pointerMove", "x": round(x), "y": round(y)},
            {"type": "pointerDown", "button": 0},
            {"type": "pointerUp", "button": 0},
        ]
        self._perform({"type": "pointer", "id": "mouse", "actions": pointer})

    def _place(self, found: str) -> list[float]:
        """Return where the middle of an element is, after the next frame is drawn."""
        middle = "(b => [b.x + b.width / 2, b.y + b.height / 2])(e.getClientRects()[0])"
        scrolled = f"(e => (e.scrollIntoView({{block: 'center'}}), {middle}))({found})"
        return self.evaluate(f"await new Promise(drawn => requestAnimationFrame(() => drawn({scrolled})))")

    def type(self, keys: str) -> None:
        """Press keys one after the other; "\\ue007" is Enter."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._perform({"type": "key", "id": "keyboard", "actions": actions})

    def _perform(self, source: dict[str, Any]) -> None:
        self._call("input.performActions", context=self._context, actions=[source])

    def _call(self, method: str, **parameters: Any) -> Any:
        try:
            return self._loop.run_until_complete(asyncio.wait_for(self._exchange(method, parameters), CALL_S))
        except TimeoutError as error:
            raise BidiError(f"{method} was not answered within {CALL_S:g} s") from error

    async def _exchange(self, method: str, parameters: dict[str, Any]) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            answer = await self._socket.receive_json()
            if answer.get("method") == "log.entryAdded" and answer["params"]["level"] == "error":
                self.errors.append(str(answer["params"]["text"]))
            if answer.get("id") == self._number:
                if answer["type"] == "error":
                    raise BidiError(f"{method}: {answer['error']}: {answer['message']}")
                return answer["result"]


@contextlib.contextmanager
def firefox(executable: str, profile: Path) -> Iterator[Tab]:
    """Run Firefox without a window, with a new profile, and yield its tab. Raises BidiError where it does not start."""
    profile.mkdir(parents=True)
    lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});\n" for name, value in PREFERENCES.items()]
    (profile / "user.js").write_text("".join(lines))
    log = profile / "firefox.log"
    command = [executable, "--headless", "--no-remote", "--profile", str(profile), "--remote-debugging-port", "0"]
    loop = asyncio.new_event_loop()
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            url = _wait_for_address(process, log)
            session = loop.run_until_complete(_make_session())
            try:
                yield Tab(loop, loop.run_until_complete(session.ws_connect(f"{url}/session", max_msg_size=0)))
            finally:
                loop.run_until_complete(session.close())
        finally:
            process.kill()
            loop.close()


async def _make_session() -> ClientSession:
    return ClientSession()


def _wait_for_address(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        if match := re.search(r"WebDriver BiDi listening on (ws://\S+)", log.read_text(errors="replace")):
            return match[1]
        time.sleep(0.1)
    raise BidiError(f"Firefox does not start: {log.read_text(errors='replace')[-500:]}")

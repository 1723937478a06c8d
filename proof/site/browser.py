"""Pages as a browser shows them: Chromium without a window, asked over two pipes in DevTools' own protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
NONE = f"there is no browser to look with: install Chromium (one of {', '.join(NAMES)} on the path)"
TO_BROWSER, FROM_BROWSER = 3, 4
"""The file descriptors that `--remote-debugging-pipe` reads and writes."""
DESKTOP, PHONE = 1280, 390
LIGHT, DARK = "light", "dark"
AT_REST = """document.fonts.ready.then(() => new Promise(done => setTimeout(done, 300))).then(() => Promise.all(
document.getAnimations().filter(x => x.effect.getComputedTiming().endTime < 5000).map(x => x.finished.catch(() => 0)))
).then(() => 0)"""
"""JavaScript that waits for letters, and for everything that moves."""
PATIENCE = 60.0
"""Seconds that an answer may take."""


def chromium() -> str | None:
    """The browser's program, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class BrowserError(Exception):
    """One sentence on what the browser refused or left unanswered."""


class Browser:
    """One tab, which is used for one page after the other."""

    def __init__(self, program: str | None = None) -> None:
        self.program = program or chromium()
        if self.program is None:
            raise BrowserError(NONE)
        self.complaints: list[str] = []
        """What the page's console has said as an error or a warning since the page was opened."""
        self._numbers = itertools.count(1)
        self._waiting: list[dict[str, Any]] = []
        self._rest = b""

    def __enter__(self) -> Browser:
        self._profile = tempfile.mkdtemp(prefix="kvq-browser-")
        (theirs_in, self._to), (self._from, theirs_out) = os.pipe(), os.pipe()
        # a shell gives the pipes the numbers that Chromium expects
        line = f'exec "$0" "$@" {TO_BROWSER}<&{theirs_in} {FROM_BROWSER}>&{theirs_out}'
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
                 "--no-first-run", "--disable-background-networking", "--disable-component-update",
                 f"--user-data-dir={self._profile}", "about:blank"]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", line, str(self.program), *flags],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            target = self._ask("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.ask(f"{domain}.enable")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        os.close(self._to)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    # -- what is asked ------------------------------------------------------------------------------------------------
    def show(self, url: str, width: int = DESKTOP, scheme: str = LIGHT, height: int = 900) -> None:
        """Opens a page, and waits until it is loaded with all that it loads."""
        self.complaints.clear()
        self._waiting.clear()
        phone = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        found = self.ask("Page.navigate", url=url)
        if "errorText" in found:
            raise BrowserError(f"{url} can't be opened: {found['errorText']}")
        self._event("Page.loadEventFired")
        self.value(AT_REST)

    def value(self, expression: str) -> Any:
        """What JavaScript makes of an expression in the page, or of its promise."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise BrowserError(f"{expression}: {found['exceptionDetails'].get('text')}")
        return found["result"].get("value")

    def picture(self, path: Path, whole: bool = False) -> Path:
        """A PNG of what is shown, or of the whole page, however long."""
        self.value(AT_REST)
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The tab's answer."""
        return self._ask(method, self._session, **parameters)

    # -- the protocol -------------------------------------------------------------------------------------------------
    def _ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        text = json.dumps(message | ({"sessionId": session} if session else {}))
        with contextlib.suppress(BrokenPipeError):  # it has exited, as reading its answer will show
            os.write(self._to, text.encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while True:
            found = self._message(end, method)
            if found.get("id") == number:
                if "error" in found:
                    raise BrowserError(f"{method}: {found['error']['message']}")
                return dict(found["result"])
            self._waiting.append(found)

    def _event(self, method: str) -> None:
        end = time.monotonic() + PATIENCE
        while all(found.get("method") != method for found in self._waiting):
            self._waiting.append(self._message(end, method))

    def _message(self, end: float, awaited: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(0.0, end - time.monotonic()))[0]:
                raise BrowserError(f"{self.program} did not answer {awaited} in {PATIENCE:.0f} seconds")
            if not (found := os.read(self._from, 1 << 16)):
                raise BrowserError(f"{self.program} exited before it answered {awaited}")
            self._rest += found
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._listen(message.get("method", ""), message.get("params", {}))
        return message

    def _listen(self, method: str, about: dict[str, Any]) -> None:
        if method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{about['entry']['text']} {about['entry'].get('url', '')}".strip())
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(about["exceptionDetails"].get("text")))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.complaints.append(" ".join(str(x.get("value", x.get("description"))) for x in about["args"]))

"""Drive a headless Chromium over its DevTools protocol (`--remote-debugging-pipe`) with the standard library.

Messages are JSON, ended by a zero byte, on the browser's file descriptors 3 and 4; see
https://chromedevtools.github.io/devtools-protocol. Does NOT support more than one tab.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_MOST_SECONDS = 60.0
_START = (
    "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 3); os.dup2(w, 4); os.execvp(sys.argv[3], sys.argv[3:])"
)


def chromium() -> str | None:
    """Return the program, or None if it is not installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._left = b""
        self._last = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send a command and return its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._writes, content) :]
        while (found := self._next()).get("id") != self._last:
            self.events.append(found)
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']['message']}")
        result: dict[str, Any] = found["result"]
        return result

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _MOST_SECONDS
        while b"\0" not in self._left:
            if not select.select([self._reads], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"the browser said nothing for {_MOST_SECONDS:.0f} s: run it by hand")
            content = os.read(self._reads, 1 << 20)
            if not content:
                raise EOFError("the browser has ended: run it by hand")
            self._left += content
        message, self._left = self._left.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + _MOST_SECONDS
        while not self.value(f"Boolean({expression})"):
            if time.monotonic() > until:
                raise TimeoutError(f"{expression} did not become true in {_MOST_SECONDS:.0f} s")
            time.sleep(0.05)

    def show(self, path: Path, *, width: int = 1280, height: int = 900, scheme: str = "light") -> float:
        """Open a page and return the seconds until it is loaded with its charts drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.events.clear()
        begin = time.perf_counter()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for(
            f"location.href === {json.dumps(path.resolve().as_uri())} && document.readyState === 'complete' && "
            "[...document.querySelectorAll('.chart')].every(chart => chart.querySelector('.main-svg'))"
        )
        return time.perf_counter() - begin

    def errors(self) -> list[str]:
        """Return console output of the page since it was opened, and its exceptions."""
        self.value("1")
        said = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in said]

    def key(self, name: str, code: int) -> None:
        """Press a key."""
        text = {"Enter": "\r", " ": " "}.get(name, "")
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, text=text)

    def point(self, x: float, y: float) -> None:
        """Move the pointer in two steps, as by hand."""
        for by in (2, 0):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x - by, y=y)

    def drag(self, start: float, end: float, y: float) -> None:
        """Press the pointer, move it to the right and release it."""
        moves = (
            ("mousePressed", start),
            ("mouseMoved", (start + end) / 2),
            ("mouseMoved", end),
            ("mouseReleased", end),
        )
        self.point(start, y)
        for kind, x in moves:
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def picture(self, path: Path, height: float | None = None) -> None:
        """Write the whole page as a PNG, or only its upper ``height`` pixels."""
        width = self.value("document.documentElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        some = {"clip": clip} if height is not None else {}
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, **some)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def opened(program: str) -> Iterator[Page]:
    """Start a browser with one tab, and end it."""
    to_read, to_write = os.pipe(), os.pipe()
    with TemporaryDirectory(prefix="plimsoll-browser-", ignore_cleanup_errors=True) as folder:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--disable-background-networking", f"--user-data-dir={folder}", "--remote-debugging-pipe"]
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(to_write[0]), str(to_read[1]), program, *flags, "about:blank"],
            pass_fds=(to_write[0], to_read[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_write[0])
        os.close(to_read[1])
        try:
            yield Page(to_read[0], to_write[1])
        finally:
            os.close(to_write[1])
            os.close(to_read[0])
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

"""Control a headless Chromium by its DevTools protocol over a pipe."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
FLAGS += ("--disable-dev-shm-usage",)
WAIT_S = 60.0


def chromium_path() -> str:
    """Return the path of Chromium.

    Without it the test is skipped; with $NO_SKIPS, which .ci/run sets, it fails.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None and "NO_SKIPS" not in os.environ:
        pytest.skip("no Chromium: no browser looked at the page (Debian: apt-get install chromium)")
    assert path, "no Chromium"
    return path


class Browser:
    """One page of a browser.

    Attributes:
        requests: Addresses that the page requested.
        problems: Its errors, warnings and refused requests.
    """

    def __init__(self, folder: Path, flags: Sequence[str] = ()) -> None:
        """Start the browser with further ``flags``; its own files go to ``folder``."""
        to_browser, from_browser = os.pipe(), os.pipe()
        self._out, self._in = to_browser[1], from_browser[0]
        # The browser reads commands from descriptor 3 and writes to descriptor 4.
        line = f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
        command = [
            chromium_path(),
            *FLAGS,
            *flags,
            "--remote-debugging-pipe",
            f"--user-data-dir={folder / 'profile'}",
            "about:blank",
        ]
        with open(folder / "browser.log", "w") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", line, "bash", *command],
                pass_fds=(to_browser[0], from_browser[1]),
                stdout=log,
                stderr=log,
            )
        os.close(to_browser[0])
        os.close(from_browser[1])
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._ids, self._read, self._session = itertools.count(1), b"", None
        target = next(
            t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"
        )
        session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Run a command of the protocol; events before its response are recorded."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        deadline = time.monotonic() + WAIT_S
        response: dict[str, Any] = {}
        while "result" not in response:
            os.write(self._out, json.dumps(message).encode() + b"\0")
            while (response := self._next()).get("id") != number:
                pass
            # The session has no page for a moment while one replaces another.
            waits = response.get("error", {}).get("message") == "Not attached to an active page"
            assert "result" in response or (waits and time.monotonic() < deadline), response
        return response["result"]

    def _next(self) -> dict[str, Any]:
        """Return the next message of the browser and record its events."""
        deadline = time.monotonic() + WAIT_S
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "no message from the browser"
            block = os.read(self._in, 1 << 16)
            assert block, "the browser has ended"
            self._read += block
        line, _, self._read = self._read.partition(b"\0")
        message = json.loads(line)
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.problems.append(str(params["entry"]))
            case "Runtime.consoleAPICalled":
                self.problems.append(str(params["args"]))
        return message

    def open(
        self, address: str, *, width: int = 1600, height: int = 1000, dark: bool = False
    ) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; promises are awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + WAIT_S
        while not self.evaluate(f"!!({expression})"):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.05)

    def close(self) -> None:
        self.call("Browser.close")
        self._process.wait(timeout=WAIT_S)
        os.close(self._in)
        os.close(self._out)

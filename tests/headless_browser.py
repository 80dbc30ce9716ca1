"""A real browser without a window, spoken to over a pipe by its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
)
WAIT_S = 60.0


def chromium_path() -> str:
    """Where there is none the test is skipped; with $NO_SKIPS, as .ci/run sets it, which installs
    one, it fails.
    """
    found = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if found is None and "NO_SKIPS" not in os.environ:
        pytest.skip("no Chromium: no browser looked at the page (Debian: apt-get install chromium)")
    assert found, "no Chromium"
    return found


class Browser:
    """One page. ``requests``: addresses that it asked for; ``problems``: its errors, warnings and
    refused requests.
    """

    def __init__(self, folder: Path) -> None:
        """``folder`` is for the browser's own files."""
        where = chromium_path()
        ours, theirs = os.pipe(), os.pipe()  # what it reads, what it writes
        self._out, self._in = ours[1], theirs[0]
        line = f'exec "$@" 3<&{ours[0]} 4>&{theirs[1]}'
        command = [
            where,
            *FLAGS,
            "--remote-debugging-pipe",
            f"--user-data-dir={folder / 'profile'}",
            "about:blank",
        ]
        with open(folder / "browser.log", "w") as told:
            self._process = subprocess.Popen(
                ["bash", "-c", line, "bash", *command],
                pass_fds=(ours[0], theirs[1]),
                stdout=told,
                stderr=told,
            )
        os.close(ours[0])
        os.close(theirs[1])
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._ids, self._read, self._session = itertools.count(1), b"", None
        target = next(
            t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"
        )
        told = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = told["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; events that come before its answer are noted."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_S
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser is silent"
            block = os.read(self._in, 1 << 16)
            assert block, "the browser has ended"
            self._read += block
        line, _, self._read = self._read.partition(b"\0")
        message = json.loads(line)
        told = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(str(told["exceptionDetails"]))
            case "Log.entryAdded":
                self.problems.append(str(told["entry"]))
            case "Runtime.consoleAPICalled":
                self.problems.append(str(told["args"]))
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
        """A JavaScript expression's value; promises are awaited."""
        told = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until a JavaScript expression is true."""
        deadline = time.monotonic() + WAIT_S
        while not self.evaluate(f"!!({expression})"):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.05)

    def key(self, name: str) -> None:
        """A key, pressed and let go."""
        code = {"Tab": 9, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}[name]
        text = {"text": name} if name == " " else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code, **text
            )

    def picture(self, file: Path) -> None:
        """The whole page as PNG."""
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(told["data"]))

    def close(self) -> None:
        self.call("Browser.close")
        self._process.wait(timeout=WAIT_S)
        os.close(self._in)
        os.close(self._out)

"""A real browser without a window: Chromium, spoken to over two pipes in its DevTools protocol. Nothing else is needed.

Source of the protocol: https://chromedevtools.github.io/devtools-protocol/ and Chromium's --remote-debugging-pipe.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ANSWER_S = 60.0


class Browser:
    """One page. `complaints` is what it said in its console, uncaught errors and refusals among them."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._data = read, write, b""
        self._number, self._session = 0, ""
        self.complaints: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def open(self, page: Path, *, width: int, dark: bool = False) -> None:
        """Show a page on a screen of that width, in pixels."""
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self._resize(width, 900)
        self._ask("Page.navigate", url=page.as_uri())
        while self.value("document.readyState + location.href") != f"complete{page.as_uri()}":
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, which JSON must be able to hold."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, file: Path, *, width: int, height: int | None = None) -> None:
        """A PNG of the page's top, of all of it where no height is given."""
        self._resize(width, height or self.value("document.documentElement.scrollHeight"))
        file.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot")["data"]))

    def _resize(self, width: int, height: int) -> None:
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(answer["params"]))
        raise AssertionError("not reached")

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            first, mark, rest = self._data.partition(b"\0")
            if mark:
                self._data = rest
                yield json.loads(first)
                continue
            ready, _, _ = select.select([self._read], [], [], ANSWER_S)
            more = os.read(self._read, 1 << 16) if ready else b""
            assert more, "the browser does not answer"
            self._data += more


@contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile lies in `folder`. Skips the test where the machine has none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser on this machine ({', '.join(NAMES)})")
    read, their_write = os.pipe()
    their_read, write = os.pipe()
    command = [
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions",
        "--disable-dev-shm-usage", f"--user-data-dir={folder}", "--remote-debugging-pipe",
    ]
    pipes = f'exec "$@" 3<&{their_read} 4>&{their_write}'  # Chromium reads from 3 and writes to 4
    process = subprocess.Popen(
        ["bash", "-c", pipes, "bash", *command], pass_fds=(their_read, their_write), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )
    try:
        os.close(their_read)
        os.close(their_write)
        yield Browser(read, write)
    finally:
        os.close(write)  # the browser ends with its pipe
        os.close(read)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

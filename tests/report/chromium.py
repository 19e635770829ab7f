"""A real headless Chromium, spoken to through pipes: what a page says on its console, and how it looks."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_chromium() -> str | None:
    """Debian's, Google's, or playwright's."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    cache = Path.home() / ".cache" / "ms-playwright"
    return next((str(path) for path in sorted(cache.glob("chromium*/chrome-*/*")) if path.name in (
        "chrome", "headless_shell", "chrome-headless-shell")), None)  # fmt: skip


class Chromium:
    """One page of a browser. `problems`: what it said on its console, and what it asked the network for."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self._process, self._to = process, to
        self._answers: dict[int, dict[str, Any]] = {}
        self._arrived = threading.Condition()
        self._number = 0
        self._url, self._loaded = "", False
        self._session = ""
        self.problems: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(back,), name="chromium")
        self._reader.start()

    def _read(self, back: int) -> None:
        data = b""
        with os.fdopen(back, "rb", 0) as file:
            while chunk := file.read(1 << 16):
                *messages, data = (data + chunk).split(b"\0")
                for message in messages:
                    self._hear(json.loads(message))
        with self._arrived:
            self._process.poll()
            self._arrived.notify_all()

    def _hear(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        with self._arrived:
            if "id" in message:
                self._answers[message["id"]] = message
            elif method == "Page.frameNavigated":
                self._url, self._loaded = params["frame"]["url"], False
            elif method == "Page.loadEventFired":
                self._loaded = True
            elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(json.dumps(params))
            elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:")):
                self.problems.append(params["request"]["url"])
            self._arrived.notify_all()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Its answer."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        with self._arrived:
            if not self._arrived.wait_for(lambda: number in self._answers or not self._reader.is_alive(), 60):
                raise AssertionError(f"Chromium does not answer {method}")
            answer = self._answers.pop(number)
        assert "error" not in answer, answer
        return answer["result"]

    def attach(self) -> None:
        """To a page of its own."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path | str, *, width: int = 1100, scheme: str = "light", media: str = "screen") -> None:
        """Load a file, or an address, as a window of that width sees it."""
        address = path if isinstance(path, str) else path.as_uri()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self._url = ""
        self.call("Page.navigate", url=address)
        with self._arrived:  # the event alone may be that of the empty page before
            there = self._arrived.wait_for(lambda: self._loaded and self._url == address, 60)
        assert there, "the page does not load"

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page, as PNG."""
        height = self.evaluate("document.documentElement.scrollHeight")
        width = self.evaluate("document.documentElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        return base64.b64decode(
            self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True, format="png")["data"]
        )


@contextmanager
def chromium() -> Iterator[Chromium]:
    """A browser that is gone afterwards, with all that it wrote."""
    program = find_chromium()
    assert program is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        words = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-extensions", "--disable-dev-shm-usage", "--disable-background-networking",
            f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip

        # Chromium reads from descriptor 3 and writes to 4.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "chromium", *words],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        browser = Chromium(process, ours_out, ours_in)
        try:
            browser.attach()
            yield browser
            browser._session = ""
            browser.call("Browser.close")
        finally:
            os.close(ours_out)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            browser._reader.join()

"""A headless browser that reaches no network, driven over WebDriver."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Session", "browser"]


class Session:
    """A page in a headless browser, driven over WebDriver."""

    def __init__(self, base: str) -> None:
        self._base = base

    def call(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._base + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=900) as response:
            return json.load(response)["value"]

    def value(self, expression: str) -> Any:
        """Return what an expression is in the page."""
        return self.call("/execute/sync", {"script": f"return {expression}", "args": []})

    def console(self) -> list[str]:
        """Return what the page has written to the console, errors of loading included."""
        entries = self.call("/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries]

    def ask(self, question: str) -> dict[str, Any]:
        script = "const [question, done] = arguments; window.ask(question).then(done, (error) => "
        script += "done({status: -1, sections: [], wrong: String(error)}));"
        answer: dict[str, Any] = self.call("/execute/async", {"script": script, "args": [question]})
        return answer


@contextmanager
def browser(folder: Path, *arguments: str, **options: Any) -> Iterator[Session]:
    """Yield a browser, started with `arguments` and further options of Chrome.

    Every name is unknown to it. Skips the test where there is no Chromium.
    """
    for tool in ("chromium", "chromedriver"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}, to run the page in a browser")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    chrome = {
        "args": [
            "--headless=new",
            "--no-sandbox",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={folder / 'profile'}",
            *arguments,
        ],
        **options,
    }
    wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
    try:
        base = f"http://127.0.0.1:{port}"
        for _ in range(300):
            with suppress(OSError), urllib.request.urlopen(f"{base}/status", timeout=5):
                break
            time.sleep(0.1)
        made = Session(f"{base}/session").call("", {"capabilities": {"alwaysMatch": wanted}})
        session = Session(f"{base}/session/{made['sessionId']}")
        session.call("/timeouts", {"script": 900_000})
        yield session
        with suppress(OSError):
            urllib.request.urlopen(
                urllib.request.Request(f"{session._base}", method="DELETE"), timeout=30
            )
    finally:
        driver.terminate()
        driver.wait(30)

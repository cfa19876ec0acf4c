"""A headless Chromium that a test drives through two pipes: no driver, no port, no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
WAIT_S = 60.0


def browser() -> str | None:
    """The command of a browser of this machine."""
    named = os.environ.get("FLOWRL_TEST_BROWSER")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """One page of one browser. Everything that it asks the network for, says or throws is written down.

    Raises TimeoutError when the browser does not answer, RuntimeError when it refuses a command.
    """

    def __init__(self, command: str, folder: Path, *, width: int = 1280, height: int = 900) -> None:
        self.requests: list[str] = []
        self.said: list[str] = []
        self._buffer = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []
        out_read, self._out = os.pipe()
        self._in, in_write = os.pipe()
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (out_read, in_write)]

        def ends() -> None:  # the browser reads commands from 3 and writes answers to 4
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        self._process = subprocess.Popen(
            [command, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
             "--hide-scrollbars", f"--window-size={width},{height}", f"--user-data-dir={folder}", "--remote-debugging-pipe"],
            preexec_fn=ends, pass_fds=(3, 4), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (out_read, in_write, *theirs):
            os.close(end)
        self._session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.go_offline()

    def close(self) -> None:
        self._session = ""
        try:
            self.send("Browser.close")
            self._process.wait(WAIT_S)
        except (OSError, EOFError, TimeoutError, subprocess.TimeoutExpired):  # it is gone, or is made to go
            self._process.kill()
            self._process.wait(WAIT_S)
        os.close(self._out)
        os.close(self._in)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------ commands

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        number = self._number
        answer = self._until(lambda one: one.get("id") == number, method)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer.get("result", {})

    def go_offline(self, *, is_offline: bool = True) -> None:
        """Without a network; with one, for what this machine serves itself."""
        self.send(
            "Network.emulateNetworkConditions",
            offline=is_offline,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )

    def open(self, path: Path | str, *, is_dark: bool = False, has_script: bool = True) -> None:
        """Load a file, by file://, or an address, and wait until it is complete."""
        self.requests.clear()
        self.said.clear()
        self._events.clear()
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}],
        )
        self.send("Emulation.setScriptExecutionDisabled", value=not has_script)
        self.send("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        self._until(lambda one: one.get("method") == "Page.loadEventFired", f"loading {path}")

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript; what it throws is an error."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """The value of an expression of JavaScript as soon as it is true; asked again with every frame."""
        asked = f"new Promise(done => {{const ask = () => {{let v; try {{v = {expression};}} catch {{v = null;}} v ? done(v) : "
        return self.run(f"{asked}setTimeout(ask, 20)}}; ask();}})")

    def picture(self, *, y: float, width: float, height: float) -> bytes:
        """A PNG of a part of the page, from its left edge; in pixels of the page."""
        clip = {"x": 0, "y": y, "width": width, "height": height, "scale": 1}
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    # ------------------------------------------------------------------------------------------------------ messages

    def _until(self, is_it: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        for index, event in enumerate(self._events):
            if is_it(event):
                return self._events.pop(index)
        deadline = time.monotonic() + WAIT_S
        while True:
            message = self._message(deadline, what)
            self._note(message)
            if is_it(message):
                return message
            if "method" in message:
                self._events.append(message)

    def _message(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise TimeoutError(f"the browser did not answer within {WAIT_S} s: {what}")
            part = os.read(self._in, 1 << 20)
            if not part:
                raise EOFError(f"the browser ended: {what}")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.said.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.said.append(str(params["args"]))
            case "Log.entryAdded":
                self.said.append(f"{params['entry']['level']}: {params['entry']['text']}")
            case "Page.javascriptDialogOpening":
                self.said.append(f"dialog: {params.get('message')}")

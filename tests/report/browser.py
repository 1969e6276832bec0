"""Headless Chromium for tests, over its DevTools pipe: JSON messages ended by a zero byte, on the browser's descriptors 3 and 4.

No driver and no library. Everything has a deadline; whatever the page logs as an error, throws or fetches is collected.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "needs Chromium: apt-get install chromium (or put chromium, chromium-browser or google-chrome in PATH)"
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
_DEADLINE = 60.0


class Browser:
    """One browser with one page. `profile`: a new folder for it."""

    def __init__(self, profile):
        (child_in, self._out), (self._in, child_out) = os.pipe(), os.pipe()
        command = [FOUND, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{child_in} 4>&{child_out}', "bash", *command],
            pass_fds=(child_in, child_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(child_in)
        os.close(child_out)
        self._buffer, self._serial, self._session = b"", 0, None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._out)  # Chromium ends when its pipe does
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)
        os.close(self._in)

    def call(self, method: str, **parameters) -> dict:
        """A DevTools command and its answer. Raises RuntimeError for a refusal, TimeoutError after a minute."""
        self._serial += 1
        message = {"id": self._serial, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data):]
        deadline = time.monotonic() + _DEADLINE
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._serial:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self, deadline: float) -> dict:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium did not answer within {_DEADLINE:g} s")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("Chromium has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        match message.get("method"), message.get("params", {}):
            case "Runtime.exceptionThrown", {"exceptionDetails": details}:
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled", {"type": "error" | "assert" | "warning", "args": words}:
                self.errors.append(" ".join(str(each.get("value", each.get("description"))) for each in words))
            case "Log.entryAdded", {"entry": {"level": "error" | "warning", "text": text}}:
                self.errors.append(text)
            case "Network.requestWillBeSent", {"request": {"url": url}}:
                self.requests.append(url)
            case "Page.loadEventFired", _:
                self._loaded += 1
        return message

    def open(self, path, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Loads a file, with nothing remembered of earlier ones."""
        self.errors.clear()
        self.requests.clear()
        self.size(width, height)
        self.media(dark=dark)
        before, deadline = self._loaded, time.monotonic() + _DEADLINE
        self.call("Page.navigate", url=path.as_uri())
        while self._loaded == before:
            self._next(deadline)
        self.settle()

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def media(self, *, dark: bool = False, kind: str = "") -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=kind, features=features)

    def settle(self) -> None:
        """Until what was asked for has been drawn: two frames."""
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def js(self, expression: str):
        """The value of an expression in the page; a promise is waited for. Raises RuntimeError if it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **options) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def drag(self, x0: float, x1: float, y: float, *, shift: bool = False) -> None:
        options = {"button": "left", "modifiers": 8 * shift}
        self.mouse("mousePressed", x0, y, clickCount=1, **options)
        self.mouse("mouseMoved", (x0 + x1) / 2, y, buttons=1, **options)
        self.mouse("mouseMoved", x1, y, buttons=1, **options)
        self.mouse("mouseReleased", x1, y, clickCount=1, **options)
        self.settle()

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if len(key) == 1 and kind == "keyDown" else "")
        self.settle()

    def screenshot(self, path, *, whole: bool = True) -> None:
        clip = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **clip)
        path.write_bytes(base64.b64decode(answer["data"]))

"""A headless Chromium over its own pipe: pages as a person would get them, and what the browser complains about."""

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage", "--remote-debugging-pipe")
ON_PIPES = """import fcntl, os, sys
high = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(high[0], 3), os.dup2(high[1], 4)
os.execv(sys.argv[3], sys.argv[3:])"""  # the browser reads commands from 3 and answers on 4


class Browser:
    """Commands of the DevTools protocol, one at a time. `complaints` are the console's errors, `fetched` what was loaded."""

    def __init__(self, profile: Path):
        assert CHROMIUM is not None
        (its_in, our_out), (our_in, its_out) = os.pipe(), os.pipe()
        self.process = subprocess.Popen([sys.executable, "-c", ON_PIPES, str(its_in), str(its_out), CHROMIUM, *FLAGS,
                                         f"--user-data-dir={profile}", "about:blank"], pass_fds=(its_in, its_out),
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(its_in)
        os.close(its_out)
        self._to, self._from = os.fdopen(our_out, "wb"), os.fdopen(our_in, "rb")
        self._rest, self._number, self._session = b"", 0, None
        self.complaints: list[str] = []
        self.fetched: list[str] = []
        self._loaded = 0
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def open(self, page: Path | str, width: int, *, height: int = 900, scheme: str = "light") -> None:
        """A file, or an address."""
        self.complaints, self.fetched = [], []
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        before = self._loaded
        self.ask("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while self._loaded == before:
            self._take(self._message())
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def run(self, script: str) -> Any:
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def picture(self, where: Path, width: int, height: int, *, from_y: int = 0) -> None:
        clip = {"x": 0, "y": from_y, "width": width, "height": height, "scale": 1}
        where.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]))

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | ({"sessionId": self._session} if self._session else {})
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._take(answer)

    def close(self) -> None:
        self.ask("Browser.close")
        self._to.close()
        self._from.close()
        self.process.wait(timeout=60)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._from.fileno(), 1 << 16)
            assert data, f"the browser ended with {self.process.poll()}"
            self._rest += data
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _take(self, event: dict[str, Any]) -> None:
        method, facts = event.get("method"), event.get("params", {})
        self._loaded += method == "Page.loadEventFired"
        called = method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning", "assert")
        if called or method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(facts))
        if method == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.complaints.append(json.dumps(facts["entry"]))
        if method == "Network.requestWillBeSent":
            self.fetched.append(facts["request"]["url"])

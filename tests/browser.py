"""A headless Chromium, driven over the WebDriver protocol: opens a page, runs scripts in it, reads
its log."""

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

FLAGS = [
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    ),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
]


TAB, SHIFT = "\ue004", "\ue008"  # of the WebDriver protocol


class Browser:
    """A browser for the length of a `with` block.

    Args:
        folder: of its profile.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        driver = shutil.which("chromedriver")
        assert driver, "install chromium and chromium-driver (.ci/run does)"
        self.driver = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{port}"
        options = {"args": [*FLAGS, f"--user-data-dir={self.folder}"]}
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        session = self._started({"capabilities": {"alwaysMatch": wanted}})
        self.url += f"/session/{session}"
        return self

    def __exit__(self, *error):
        try:
            self.call("", method="DELETE")
        finally:
            self.driver.terminate()
            self.driver.wait()

    def _started(self, wanted):
        for _ in range(100):
            try:
                return self.call("/session", wanted)["sessionId"]
            except OSError:
                time.sleep(0.1)
        raise TimeoutError("chromedriver does not answer")

    def call(self, path, body=None, method=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, file):
        self.call("/url", {"url": file.resolve().as_uri()})

    def resize(self, width, height=900):
        """Sets the size of the page, emulated: a window has a least width."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": size}
        self.call("/goog/cdp/execute", command)

    def run(self, script, *args):
        """Runs a script in the page and returns its value."""
        return self.call("/execute/sync", {"script": script, "args": list(args)})

    def press(self, *keys):
        """Presses keys together, as a hand does."""
        down = [{"type": "keyDown", "value": key} for key in keys]
        up = [{"type": "keyUp", "value": key} for key in reversed(keys)]
        self.call("/actions", {"actions": [{"type": "key", "id": "keys", "actions": down + up}]})

    def log(self, kind):
        """Returns what the browser logged since it was last asked: `browser` or `performance`."""
        return self.call("/se/log", {"type": kind})

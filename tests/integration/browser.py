"""A headless Chromium through chromedriver's own HTTP interface: no package needed."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.children import free_port

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the name W3C WebDriver gives a reference


class Browser:
    def __init__(self, profile: Path) -> None:
        port = free_port()
        self.server = f"http://127.0.0.1:{port}"
        self.driver = subprocess.Popen(
            ["chromedriver", f"--port={port}", "--silent"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.session = ""
        flags = (
            *("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run"),
            *("disable-background-networking", "disable-component-update", "disable-sync"),
            *(f"user-data-dir={profile}", "window-size=1360,960"),
            "force-device-scale-factor=1",
        )
        wanted = {
            "browserName": "chrome",
            "goog:loggingPrefs": {"browser": "ALL"},
            "goog:chromeOptions": {
                "binary": shutil.which("chromium"),
                "args": [f"--{flag}" for flag in flags],
            },
        }
        self._wait_for_driver()
        started = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{started['sessionId']}"
        self._post(self.session + "/timeouts", {"script": 60_000})

    def close(self) -> None:
        if self.session:
            self._request("DELETE", self.session)
        self.driver.terminate()
        self.driver.wait(timeout=20)

    def open(self, page: Path) -> None:
        self._post(self.session + "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *values: Any) -> Any:
        """JavaScript with `return`; `arguments` are the values."""
        return self._post(self.session + "/execute/sync", {"script": script, "args": list(values)})

    def hover(self, script: str, *values: Any) -> None:
        """Moves the pointer onto the element that the script returns, as a hand would."""
        self._point(script, values, [])

    def click(self, script: str, *values: Any) -> None:
        buttons = [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self._point(script, values, buttons)

    def press(self, *keys: str) -> None:
        actions = []
        for key in keys:
            code = {
                "Tab": "\ue004",
                "Enter": "\ue007",
                "Escape": "\ue00c",
                "Home": "\ue011",
                "ArrowLeft": "\ue012",
                "ArrowRight": "\ue014",
                "End": "\ue010",
            }.get(key, key)
            actions += [{"type": "keyDown", "value": code}, {"type": "keyUp", "value": code}]
        self._act({"type": "key", "id": "keys", "actions": actions})

    def console(self) -> list[str]:
        """What the page complained of since the last call, refused resources included."""
        entries = self._post(self.session + "/se/log", {"type": "browser"})
        return [f"{entry['level']}: {entry['message']}" for entry in entries]

    def _point(self, script: str, values: tuple, more: list[dict]) -> None:
        element = self.run(script, *values)
        assert element, f"no element: {script}"
        reference = {_ELEMENT: element[_ELEMENT]}
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", reference)
        move = {"type": "pointerMove", "duration": 0, "origin": reference, "x": 0, "y": 0}
        self._act({"type": "pointer", "id": "mouse", "actions": [move, *more]})

    def _act(self, source: dict) -> None:
        self._post(self.session + "/actions", {"actions": [source]})

    def _wait_for_driver(self) -> None:
        for _ in range(100):
            try:
                if self._request("GET", "/status")["ready"]:
                    return
            except OSError:
                time.sleep(0.1)
        raise TimeoutError("chromedriver did not start within 10 s")

    def _post(self, path: str, body: dict) -> Any:
        return self._request("POST", path, body)

    def _request(self, method: str, path: str, body: dict | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.server + path, data, method=method)
        # A proxy of the machine has no part in this.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=120) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(json.load(error)["value"]["message"]) from None

"""Controls a browser over the WebDriver protocol. Requires Debian's chromium and chromium-driver."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


def missing():
    """Returns the name of a missing program, or None."""
    if not shutil.which("chromedriver"):
        return "chromedriver"
    return None if shutil.which("chromium") else "chromium"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Browser:
    def __init__(self):
        port = free_port()
        self.root = f"http://127.0.0.1:{port}"
        self.driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wanted = {
            "goog:chromeOptions": {"binary": shutil.which("chromium"), "args": list(OPTIONS)},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        try:
            self.wait_until_it_answers()
            self.session = self.call("/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        except BaseException:
            self.driver.kill()
            raise

    def wait_until_it_answers(self):
        for _ in range(600):
            try:
                return self.call("/status")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise RuntimeError("chromedriver does not answer")

    def call(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.root + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)["value"]

    def command(self, path, body):
        return self.call(f"/session/{self.session}{path}", body)

    def open(self, path):
        self.command("/url", {"url": path.as_uri()})

    def look(self, script):
        """Runs `script` as a function body in the page and returns its result."""
        return self.command("/execute/sync", {"script": script, "args": []})

    def tell(self, command, **parameters):
        """Sends a command of the Chrome DevTools Protocol."""
        return self.command("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def screen(self, width, scheme):
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def console(self):
        return self.command("/se/log", {"type": "browser"})

    def close(self):
        try:
            request = urllib.request.Request(f"{self.root}/session/{self.session}", method="DELETE")
            urllib.request.urlopen(request, timeout=60).close()
        finally:
            self.driver.terminate()
            self.driver.wait()

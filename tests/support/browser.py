"""A headless Chromium that tests look at pages with, over two pipes (DevTools protocol)."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

_PATIENCE_S = 60.0
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


_WITH_PIPES = (
    "import os, sys, fcntl; _, *ends = sys.argv[:3]; command = sys.argv[3:]; "
    "a, b = (fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in ends); "
    "os.dup2(a, 3); os.dup2(b, 4); os.execv(command[0], command)"
)
"""Starts a program whose descriptors 3 and 4 are two others of this process."""


def chromium():
    """Return the path of a Chromium; skip the test where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("there is no Chromium on this machine (Debian's package chromium)")


class Browser:
    """A browser with one page. What its console says of errors is in `errors`."""

    def __init__(self):
        self._profile = tempfile.mkdtemp()
        ours, theirs = os.pipe(), os.pipe()
        self._out, self._in = ours[1], theirs[0]
        self._process = subprocess.Popen(
            [
                sys.executable, "-c", _WITH_PIPES, str(ours[0]), str(theirs[1]),
                chromium(), *_OPTIONS, f"--user-data-dir={self._profile}", "about:blank",
            ],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(ours[0])
        os.close(theirs[1])
        self._data = b""
        self._number = 0
        self._session = None
        self._loaded = False
        self.errors = []
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(each for each in targets if each["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, address, width=1280, height=900, dark=False):
        """Open a page in a window of a size, and wait until it is loaded."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self._call("Page.navigate", url=address)
        deadline = time.monotonic() + _PATIENCE_S
        while not self._loaded:
            self._read(deadline)

    def evaluate(self, script):
        """Return the value of an expression of the page; of a promise, what it gives."""
        found = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script, patience_s=_PATIENCE_S):
        """Wait until an expression of the page is true."""
        looked = f"""new Promise((done, failed) => {{
            const until = Date.now() + {1000 * patience_s};
            const look = () => (({script}) ? done(true)
                : Date.now() > until ? done(false) : setTimeout(look, 50));
            look();
        }})"""
        assert self.evaluate(looked), f"this never became true: {script}"

    def picture(self, path):
        """Write what is seen into a file, as far down as the page goes."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        Path(path).write_bytes(base64.b64decode(found["data"]))

    def printed(self):
        """Return the page as PDF."""
        return base64.b64decode(self._call("Page.printToPDF")["data"])

    def _call(self, method, **params):
        self._number += 1
        number, session = self._number, {"sessionId": self._session} if self._session else {}
        message = {"id": number, "method": method, "params": params, **session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _PATIENCE_S * 2
        while True:
            message = self._read(deadline)
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]

    def _read(self, deadline):
        while b"\0" not in self._data:
            left = deadline - time.monotonic()
            assert left > 0, "the browser does not answer"
            if select.select([self._in], [], [], left)[0]:
                block = os.read(self._in, 1 << 20)
                assert block, "the browser has ended"
                self._data += block
        line, self._data = self._data.split(b"\0", 1)
        message = json.loads(line)
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"])
        return message

    def close(self):
        """End the browser."""
        self._session = None
        try:
            self._call("Browser.close")
        except (AssertionError, OSError):
            self._process.kill()
        finally:
            self._process.wait(_PATIENCE_S)
            os.close(self._out)
            os.close(self._in)
            shutil.rmtree(self._profile, ignore_errors=True)


OVERLAPS = """(() => {
  const found = [];
  const seen = (a) => a.width > 0.5 && a.height > 0.5;
  const apart = (a, b) => a.right <= b.left + 1 || b.right <= a.left + 1
    || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
  const texts = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, parent = node.parentElement;
    if (!node.data.trim() || parent.closest("script, style, title, .acts, .scroll")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) if (seen(box)) texts.push([node.data.trim(), box]);
  }
  for (let i = 0; i < texts.length; i++)
    for (let j = i + 1; j < texts.length; j++)
      if (!apart(texts[i][1], texts[j][1])) found.push([texts[i][0], texts[j][0]]);
  const wide = document.documentElement.scrollWidth > window.innerWidth
    ? ["the page is wider than the window", String(document.documentElement.scrollWidth)] : null;
  if (wide) found.push(wide);
  return found;
})()"""
"""An expression for the pairs of texts that lie over each other, and a page that is too wide."""

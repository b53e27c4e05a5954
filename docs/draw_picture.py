#!/usr/bin/env python3
"""Draws docs/before-after.png, the README's picture: a part of the page that `foremoe report` writes of its bursty load.

    PYTHONPATH=build/python $(scripts/setup python) docs/draw_picture.py

Needs Debian's chromium and chromium-driver (scripts/setup ci), and the package in build/python (scripts/test python).
"""

import base64
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOREMOE = [sys.executable, "-m", "foremoe"]
LOAD = "--sequences-per-rank 1 --tokens-per-rank 4096 --group-size 8 --group-spread 1 --out bursty.load.safetensors".split()
REPORT = "--cluster h100 --model qwen3-30b-a3b --guest-slots 2 --policy vanilla,foremoe --out page.html".split()

sys.path.insert(0, str(ROOT / "tests"))
import web_driver  # noqa: E402

missing = web_driver.missing()
if missing:
    sys.exit(f"docs/draw_picture.py: {missing} is not installed")
with tempfile.TemporaryDirectory() as folder:
    subprocess.run([*FOREMOE, "synth", *LOAD], cwd=folder, check=True)
    subprocess.run([*FOREMOE, "report", "bursty.load.safetensors", *REPORT], cwd=folder, check=True)
    browser = web_driver.Browser()
    try:
        browser.screen(1200, "light")
        browser.open(pathlib.Path(folder) / "page.html")
        box = browser.look("const b = document.querySelector('#load').getBoundingClientRect();"
                           "return {x: b.x, y: b.y + scrollY, width: b.width, height: b.height, scale: 1.5};")
        shot = browser.tell("Page.captureScreenshot", format="png", clip=box, captureBeyondViewport=True)
    finally:
        browser.close()
(ROOT / "docs" / "before-after.png").write_bytes(base64.b64decode(shot["data"]))

#!/usr/bin/env python3
"""Draws docs/before-after.png for README: a section of the page that `foremoe report` writes for gpt-oss-20b's routes
(data/README.md).

    PYTHONPATH=build/python $(scripts/setup python) docs/draw_picture.py

Needs Debian's chromium and chromium-driver (scripts/setup ci), and the package in build/python (scripts/test python).
"""

import base64
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOREMOE = [sys.executable, "-m", "foremoe"]
ROUTES = ROOT / "data" / "rollout-gptoss.safetensors"
REPORT = "--ranks 8 --tokens-per-rank 1024 --cluster h100 --model config.json --guest-slots 1 --policy vanilla,foremoe --out page.html".split()
# gpt-oss-20b's sizes in a config.json of a model type that foremoe supports.
SIZES = {
    "model_type": "mixtral", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
    "num_experts_per_tok": 4, "vocab_size": 201088,
}

sys.path.insert(0, str(ROOT / "tests"))
import web_driver  # noqa: E402

missing = web_driver.missing()
if missing:
    sys.exit(f"docs/draw_picture.py: {missing} is not installed")
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "config.json").write_text(json.dumps(SIZES))
    subprocess.run([*FOREMOE, "report", ROUTES, *REPORT], cwd=folder, check=True)
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

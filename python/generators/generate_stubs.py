#!/usr/bin/env python3
"""Writes python/foremoe/_core.pyi, the types of the extension module, with the package installed beside this Python.

python/generators/generate_stubs.py           writes it
python/generators/generate_stubs.py --check   says whether it differs; exit 1
"""

import argparse
import pathlib
import re
import subprocess
import sys

import nanobind.stubgen

from foremoe import _core

PATH = pathlib.Path(__file__).resolve().parents[1] / "foremoe" / "_core.pyi"


def stubs() -> str:
    generator = nanobind.stubgen.StubGen(module=_core, include_private=True, quiet=True)
    generator.put(_core)
    text = generator.get()
    for bare, full in {
        r"\bNDArray(?!\[)": "NDArray[Any]",
        r"\bPathLike(?!\[)": "PathLike[str]",
        r"\b(\w+): dict\b(?!\[)": r"\1: dict[str, Any]",
        r"-> dict:": "-> dict[str, Any]:",
        r"-> tuple:": "-> tuple[Any, ...]:",
        r"arg: tuple,": "arg: tuple[Any, ...],",
        r"\bCallable \| None": "Callable[[int], object] | None",
    }.items():
        text = re.sub(bare, full, text)
    text = text.replace("import NDArray[Any]", "import NDArray").replace("import PathLike[str]", "import PathLike")
    command = [sys.executable, "-m", "ruff", "format", "--no-cache", "--stdin-filename", PATH, "-"]
    text += "\n__version__: str\n"
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    text = stubs()
    if text == PATH.read_text():
        return
    if check:
        sys.exit(
            "python/generators/generate_stubs.py: _core.pyi is not as the declarations say; run it without --check"
        )
    PATH.write_text(text)


if __name__ == "__main__":
    main()

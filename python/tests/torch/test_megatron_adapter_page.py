"""Follows docs/developers/adapter.md literally: its trainer, its adapter and its test run as they are on the page."""

from __future__ import annotations

import importlib
import pathlib
import re

import pytest

import foremoe

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "developers" / "adapter.md"
FILES = ("tinyrl/training.py", "adapters/tinyrl.py", "test_of_the_page.py")  # in the order of the page


@pytest.mark.parametrize("mode", ["shadow", "active"])
def test_the_adapter_of_the_page_passes_the_test_of_the_page(rank: int, mode: str, tmp_path: pathlib.Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    folder = tmp_path / str(rank)
    for name, block in zip(FILES, blocks, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(block, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(foremoe, "__path__", [*foremoe.__path__, str(folder / "adapters")])
        importlib.import_module("test_of_the_page").test_gradients_equal_those_of_the_trainer(rank, mode)
    assert sum(len(block.splitlines()) for block in blocks[1:]) <= 80

"""scripts/check_docs finds documented output that differs from the command's output."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import pathlib
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PRINTED = """\
one.load: 4 ranks

  policy   ρ mean  of first     µs
  vanilla  1.4385     1.000    5.0
  foremoe  1.0016  0.7 ±0.1  127.1

placed in 0.12 s, on 2 threads
"""
PAGE = f"""\
# Title

<!-- measured: µs; of first; placed -->
```console
$ cat printed
{PRINTED}```
"""
TABLE = """\
```console
$ cat table
```

Prose.

<!-- printed above; measured: planning, µs -->
| table | ρ | planning, µs |
|---|---|---|
| one | 1.008 | 97 |
"""


@pytest.fixture(scope="module")
def blocks() -> Any:
    loader = importlib.machinery.SourceFileLoader("printed_blocks", str(ROOT / "scripts" / "check_docs"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("printed_blocks", loader))  # type: ignore[arg-type]
    sys.modules["printed_blocks"] = module  # dataclasses look it up
    loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "printed").write_text(PRINTED, encoding="utf-8")
    (tmp_path / "table").write_text(TABLE[TABLE.index("| table") :].replace("97", "105"), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("there", "shown", "lines"),
    [
        ("1.0016", "1.0017", [10]),  # an exact value in a line that also has measured values
        ("4 ranks", "8 ranks", [6]),
        ("vanilla", "vanille", [9]),
        ("placed in", "placed at", [12]),
        ("±0.1", "", [10]),
        ("  vanilla  1.4385     1.000    5.0\n", "", [8]),  # a missing line; reported at the line before
        ("  vanilla", "  other    1.4385     1.000    5.0\n  vanilla", [9]),  # an extra line
        ("µs\n", "ms\n", None),  # the measured column is missing
        ("127.1", "98.35", []),
        ("0.7 ±0.1", "0.655 ±0.02", []),
        ("0.12 s, on 2", "  1.4e-05 s, on 64", []),
        (" 1.4385     1.000    5.0", " 1.4385     1.000  1234.0", []),
    ],
)
def test_exact_values_must_be_equal_and_measured_values_need_the_same_format(
    blocks: Any, root: pathlib.Path, there: str, shown: str, lines: list[int] | None
) -> None:
    page = PAGE.replace(there, shown)
    assert page != PAGE
    if lines is None:
        with pytest.raises(blocks.PageError, match=r"page.md:3: no column or line of the block has µs"):
            blocks.check("page.md", page, root)
        return
    findings, _, _ = blocks.check("page.md", page, root)
    assert [int(finding.split(":")[1]) for finding in findings] == lines


def test_a_correct_page_has_no_findings_and_is_not_rewritten(blocks: Any, root: pathlib.Path) -> None:
    assert blocks.check("page.md", PAGE, root)[:2] == ([], PAGE)


def test_an_ellipsis_line_skips_lines_but_later_lines_are_compared(blocks: Any, root: pathlib.Path) -> None:
    short = PAGE[: PAGE.index("  vanilla")] + "…\n" + PAGE[PAGE.rindex("placed") :]
    assert blocks.check("page.md", short, root)[0] == []
    assert blocks.check("page.md", short.replace("2 threads", "2 cores"), root)[0]
    assert blocks.check("page.md", short.replace("…\n", "…\n  foremoe  1.0016  0.7 ±0.1  127.1\n"), root)[0]


def test_a_table_is_compared_with_the_command_above_it(blocks: Any, root: pathlib.Path) -> None:
    assert blocks.check("page.md", TABLE, root)[0] == []  # 97 µs is measured
    findings, new, _ = blocks.check("page.md", TABLE.replace("1.008", "1.009"), root)
    assert findings == ["page.md:10: '| one | 1.009 | 97 |' there, '| one | 1.008 | 105 |' now"]
    assert new == TABLE.replace("| 97 |", "| 105 |")


def test_a_command_that_fails_is_named_with_page_and_line(blocks: Any, root: pathlib.Path) -> None:
    findings, _, _ = blocks.check("page.md", "Text.\n\n```console\n$ foremost plan\n```\n", root)
    (finding,) = findings
    assert finding.startswith("page.md:4: exit status 127 of `foremost plan`: ") and "not found" in finding


def test_commands_share_a_folder_and_leave_nothing_in_the_repository(blocks: Any, root: pathlib.Path) -> None:
    page = "```console\n$ cp printed copied\n$ head -n 1 \\\n    copied\none.load: 4 ranks\n```\n"
    assert blocks.check("page.md", page, root)[0] == []
    assert not (root / "copied").exists()


def test_python_is_compared_with_the_text_block_after_it(blocks: Any, root: pathlib.Path) -> None:
    page = "```python\nprint(open('printed').readline().strip())\n```\n\n```text\none.load: 4 ranks\n```\n"
    assert blocks.check("page.md", page, root)[0] == []
    assert blocks.check("page.md", page.replace("4 ranks", "5 ranks"), root)[0]
    with pytest.raises(blocks.PageError, match=r"page.md:7: ```text shows output, but no ```python block precedes it"):
        blocks.check("page.md", page.replace("\n```text", "\nProse.\n\n```text"), root)


def test_python_blocks_without_output_run_and_fail_if_a_name_is_missing(blocks: Any, root: pathlib.Path) -> None:
    assert blocks.check("page.md", "```python\nimport math\n```\n", root)[0] == []
    (finding,) = blocks.check("page.md", "```python\nprint(load)\n```\n", root)[0]
    assert finding.startswith("page.md:1: exit status 1 of `print(load)`: NameError: name 'load' is not defined")


def test_a_python_block_runs_after_the_earlier_ones_of_its_page_without_their_output(
    blocks: Any, root: pathlib.Path
) -> None:
    page = "```python\nx = 1\nprint(x)\n```\n\n```python\nx += 1\nprint(x)\n```\n\n```text\n2\n```\n"
    assert blocks.check("page.md", page, root)[0] == []
    skipped = "<!-- not run: needs a model -->\n" + page
    assert "NameError: name 'x' is not defined" in blocks.check("page.md", skipped, root)[0][0]


def test_a_block_marked_not_run_is_kept_with_its_reason(blocks: Any, root: pathlib.Path) -> None:
    page = "<!-- not run: needs MPI -->\n```console\n$ mpirun program\n1.0\n```\n"
    findings, new, commands = blocks.check("page.md", page, root)
    assert (findings, new, [command.not_run for command in commands]) == ([], page, ["needs MPI"])


@pytest.mark.parametrize("language", ["sh", "cpp", ""])
def test_a_block_that_never_runs_must_say_why(blocks: Any, root: pathlib.Path, language: str) -> None:
    page = f"Prose.\n\n```{language}\nfalse\n```\n"
    with pytest.raises(blocks.PageError, match=rf"page\.md:3: ```{language} never runs; say why above"):
        blocks.check("page.md", page, root)
    findings, _, commands = blocks.check(
        "page.md", page.replace("\n```" + language, "\n<!-- not run: it fails -->\n```" + language, 1), root
    )
    assert (findings, [command.not_run for command in commands]) == ([], ["it fails"])


def test_the_sh_blocks_of_readme_are_left_to_scripts_check(blocks: Any, root: pathlib.Path) -> None:
    assert blocks.check("README.md", "```sh\nfalse\n```\n", root)[2] == []


def test_the_documented_demo_matches_the_script(blocks: Any) -> None:
    demo = (ROOT / "scripts" / "demo").read_text(encoding="utf-8").replace("\\\n ", "").replace(' "$@"', "")
    page = (ROOT / "docs" / "users" / "command_line.md").read_text(encoding="utf-8")
    shown = [c.text for c in blocks.commands_of("page", page) if " data/rollout-math.safetensors " in c.text]
    run = [" ".join(line.split()) for line in demo.splitlines() if line.startswith("build/release/bin/foremoe")]
    assert shown == run[:1]  # the page only describes the output of the second command

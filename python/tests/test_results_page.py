"""scripts/results --compare: what differs between lab/results.md and a new run is found, wherever it stands."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import pathlib
from typing import Any

import pytest
from experiments import HOT_RANK, ROOT, changed, run

import foremoe
from foremoe import reproduce

MEASURED = {"all planning, µs"}
LONG = """\
## one: Title

About it.

| input | system | ρ mean | published | all planning, µs |
|---|---|---|---|---|
| EP 2 | before | 1.5000 | 1.4 | 12 |
| EP 2 | ours | 1.0000 | – | 34 |
| EP 4 | ours | skipped: no such file | | |

- Aim: ρ mean of ours ≤ 1: met, it is 1.0000
"""
WIDE = """\
| ρ mean / all planning, µs | before | ours |
|---|---|---|
| EP 2 | 1.5000 / 12 | 1.0000 [1.1] / 34 |
| EP 4 | 1.6000 / 13 | skipped |
"""


@pytest.fixture(scope="module")
def results() -> Any:
    loader = importlib.machinery.SourceFileLoader("results", str(ROOT / "scripts" / "results"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("results", loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "before", "now", "expected"),
    [
        (LONG, "1.0000 | – | 34", "1.0001 | – | 34", [(7, "ρ mean of EP 2, ours: 1.0000 there, 1.0001 now")]),
        (LONG, "1.5000 | 1.4 | 12", "1.5000 | 1.3 | 99", [(6, "published of EP 2, before: 1.4 there, 1.3 now")]),
        (WIDE, "1.0000 [1.1]", "1.0001 [1.1]", None),
        (LONG, "skipped: no such file", "skipped: other", [(8, "ρ mean of EP 4, ours: skipped: no such file there")]),
        (LONG, "met, it is 1.0000", "missed, it is 1.1", [(10, "missed, it is 1.1' now")]),
        (LONG, "About it.", "About more.", [(2, "'About it.' there, 'About more.' now")]),
        (
            LONG,
            "| EP 2 | before",
            "| EP 2 | first | 1 | 2 | 3 |\n| EP 2 | before",
            [(5, "nothing there, '| EP 2 | first")],
        ),
        (LONG, "| EP 2 | ours | 1.0000 | – | 34 |\n", "", [(7, "nothing now")]),
    ],
)
def test_a_changed_figure_is_named_with_its_line(
    results: Any, page: str, before: str, now: str, expected: list[tuple[int, str]] | None
) -> None:
    found = list(results.differences(page, changed(page, before, now), MEASURED))
    if expected is None:
        expected = [(2, "ours of EP 2: 1.0000 [1.1] / measured there, 1.0001 [1.1] / measured now")]
    assert [line for line, _ in found] == [line for line, _ in expected]
    for (_, what), (_, words) in zip(found, expected, strict=True):
        assert words in what


def test_only_columns_of_measured_figures_may_differ(results: Any) -> None:
    for page, old, new in ((LONG, "| 12 |", "| 99 |"), (WIDE, "/ 34", "/ 99"), (WIDE, "1.6000 / 13", "1.6000 / 1")):
        assert not list(results.differences(page, changed(page, old, new), MEASURED))
        assert list(results.differences(page, changed(page, old, new), set()))


def test_compare_tells_the_line_of_the_page(
    results: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "# Results\n\nhead\n\n" + LONG + "\n" + LONG.replace("one", "two").rstrip() + "\n"
    monkeypatch.setattr(results, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(results, "experiments", lambda: ["one", "two"])
    monkeypatch.setattr(results, "foremoe", lambda _, name, kind: LONG.replace("one", name) + "\n")
    results.PAGE.write_text(page, encoding="utf-8")
    assert not results.compare(["one", "two"])
    assert capsys.readouterr().out.startswith("2 experiments, 0 differences")
    lines = page.splitlines()
    at = max(i for i, line in enumerate(lines) if "ours | 1.0000" in line)
    lines[at] = lines[at].replace("1.0000", "1.0100").replace("34", "35")
    results.PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert results.compare(["one", "two"])
    found, count = capsys.readouterr().out.splitlines()
    assert found == f"lab/results.md:{at + 1}: ρ mean of EP 2, ours: 1.0100 there, 1.0000 now"
    assert count.startswith("2 experiments, 1 differences")
    assert not results.compare(["one"])


def test_a_finding_tells_figures_of_the_table() -> None:
    told = "ρ is {w2 | none | rho_mean}, in short {w2|none|rho_mean|1}; 40 % of {w2 | ours | straggler}."
    text = reproduce.to_markdown(run(changed(HOT_RANK, 'finding = "Finding."', f'finding = "{told}"')))
    assert "\n\n**What came out.** ρ is 2.5000, in short 2.5; 40 % of 0.\n\n" in text


def test_a_finding_that_names_no_exact_or_modelled_cell_is_refused() -> None:
    for told, problem in (
        ("{w2 | none}", "'{w2 | none}', expected {input | system | column}"),
        ("{w2 | none | rho_mean | two}", "expected {input"),
        ("{w3 | none | rho_mean}", "'{w3 | none | rho_mean}': no input 'w3'"),
        ("{w2 | nobody | rho_mean}", "no system 'nobody'"),
        ("{w2 | none | rho_p99}", "no column 'rho_p99'"),
        ("{w2 | none | all_plan_us}", "all_plan_us is measured"),
        ("{w2 | none | rho_mean", "a brace without its pair"),
    ):
        text = changed(HOT_RANK, 'finding = "Finding."', f'finding = "{told}"')
        with pytest.raises(foremoe.InputError) as caught:
            reproduce.parse_experiment(changed(text, '"copies"]', '"copies", "all_plan_us"]'), "mine.toml")
        assert problem in str(caught.value) and caught.value.field == "finding", told

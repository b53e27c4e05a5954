"""lab/write_results --compare: what differs between lab/results.md and a new run is found, wherever it stands."""

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
    loader = importlib.machinery.SourceFileLoader("results", str(ROOT / "lab" / "write_results"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("results", loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        ("1.0000 | – | 34", "1.0001 | – | 34", [4]),  # of the digest
        ("1.5000 | 1.4 | 12", "1.5000 | 1.3 | 99", [4]),
        ("skipped: no such file", "skipped: other", [4]),
        ("met, it is 1.0000", "missed, it is 1.1", [6]),
        ("About it.", "About more.", [2]),
        ("| EP 2 | before", "| EP 2 | first | 1 | 2 | 3 |\n| EP 2 | before", [4]),
        ("| EP 2 | ours | 1.0000 | – | 34 |\n", "", [4]),
        ("ρ mean |", "ρ max |", [4]),
        ("| 34 |", "| 35 |", []),  # measured
    ],
)
def test_what_changes_in_an_experiment_is_seen_in_its_headlines(
    results: Any, before: str, now: str, lines: list[int]
) -> None:
    there, changed_now = (results.headlines("one", text, MEASURED) for text in (LONG, changed(LONG, before, now)))
    assert [line for line, _ in results.differences(there, changed_now)] == lines


def test_headlines_have_no_table_and_say_where_it_is(results: Any) -> None:
    told = results.headlines("one", LONG, MEASURED)
    assert "|" not in told
    assert told.startswith("## one: Title\n\nAbout it.\n\n`foremoe reproduce one` prints its table (digest ")
    assert told.endswith("- Aim: ρ mean of ours ≤ 1: met, it is 1.0000\n\n")


def test_only_columns_of_measured_figures_may_differ(results: Any) -> None:
    for page, old, new in ((LONG, "| 12 |", "| 99 |"), (WIDE, "/ 34", "/ 99"), (WIDE, "1.6000 / 13", "1.6000 / 1")):
        page = page if page is LONG else f"## wide: Title\n\nAbout it.\n\n{page}"
        there, now = page, changed(page, old, new)
        assert results.headlines("wide", there, MEASURED) == results.headlines("wide", now, MEASURED)
        assert results.headlines("wide", there, set()) != results.headlines("wide", now, set())


def test_compare_tells_the_line_of_the_page(
    results: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of = {name: LONG.replace("one", name) + "\n" for name in ("one", "two")}
    monkeypatch.setattr(results, "measured_titles", lambda: MEASURED)
    monkeypatch.setattr(results, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(results, "experiments", lambda: ["one", "two"])
    monkeypatch.setattr(results, "foremoe", lambda _, name, kind: of[name])
    page = results.wrapped(
        "# Results\n\nhead\n\n" + "".join(results.headlines(name, of[name], MEASURED) for name in of)
    )
    results.PAGE.write_text(page.rstrip() + "\n", encoding="utf-8")
    assert not results.compare(["one", "two"])
    assert capsys.readouterr().out.startswith("2 experiments, 0 differences")
    of["two"] = of["two"].replace("it is 1.0000", "it is 1.0100")
    assert results.compare(["one", "two"])
    found, count = capsys.readouterr().out.splitlines()
    at = page.splitlines().index(
        "- Aim: ρ mean of ours ≤ 1: met, it is 1.0000", page[: page.index("## two")].count("\n")
    )
    assert found.startswith(f"lab/results.md:{at + 1}: '- Aim: ρ mean of ours ≤ 1: met, it is 1.0000' there, ")
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

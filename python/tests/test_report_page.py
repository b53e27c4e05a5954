"""HTML pages of foremoe.report."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import pathlib
import re
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from reports import MODEL, draw, shared_load, shared_report, without_plotly_script

import foremoe
from foremoe.report import page, to_html, write_report
from foremoe.report.facts import ExpertHeat, LayerLoads, Report, Skipped
from foremoe.report.gather import Request, gather_report
from foremoe.report.sections import sections

SECTIONS = ["policies", "load", "experts", "balance", "shares", "time", "ablation", "memory", "traffic", "timeline"]
EVIL = '</title></style></script><script>alert(1)</script><img src=x onerror="alert(2)">\'<b>%{x}\u202e'


@pytest.fixture
def load() -> foremoe.Load:
    return shared_load()


@pytest.fixture
def report() -> Report:
    return shared_report()


@pytest.fixture(scope="module")
def html() -> str:
    return to_html(shared_report())


def test_a_page_has_every_section_with_data(html: str, report: Report) -> None:
    assert re.findall('<section id="([^"]+)"', html) == SECTIONS
    less = dataclasses.replace(report, ablation={}, memory=[], windows=[])
    assert [s.id for s in sections(less)] == [s for s in SECTIONS if s not in ("ablation", "memory", "timeline")]


def test_a_page_needs_no_other_files(html: str) -> None:
    plotly = page.plotly_script()
    assert html.count(plotly) == 1
    assert len(html.encode()) <= 6_000_000
    for never in ("http:", "https:", "@import", "url(", " style=", " src=", "javascript:", 'rel="stylesheet"'):
        assert never not in without_plotly_script(html)
    policy = re.search('Content-Security-Policy" content="([^"]+)"', html)[1]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"

    def hashes(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag.split()[0]}>", html, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in texts)

    assert rules["script-src"] == hashes("script")
    assert "unsafe" not in rules["script-src"] + rules["style-src"]


def test_ids_are_unique_and_every_plot_has_a_label_a_caption_and_details(html: str) -> None:
    ids = re.findall(' id="([^"]+)"', without_plotly_script(html))
    assert len(ids) == len(set(ids))
    figures = json.loads(re.search('id="figures">(.*?)</script>', html)[1])
    places = re.findall('<div class="plot" id="([^"]+)" role="img" aria-label="[^"]{20,}">', html)
    assert list(figures) == places
    assert html.count("<details>") == html.count("<figcaption>") == len(places) >= 12


def test_every_colour_has_a_light_and_a_dark_value(html: str) -> None:
    style = pathlib.Path(page.__file__).with_name("style.css").read_text()
    figures = re.search('id="figures">(.*?)</script>', html)[1]
    names = set(re.findall(r'"var\(--(\w+)\)"', figures))
    assert len(names) > 20
    assert figures.count("var(") == len(re.findall(r'"var\(--\w+\)"', figures)), "page.js replaces whole texts only"
    for name in names:
        assert style.count(f"--{name}:") == 2, f"{name} has a light and a dark colour"


def test_the_policy_tables_have_all_columns_and_the_skipped_policies(html: str) -> None:
    table = html[html.index('<section id="policies"') : html.index('<section id="load"')]
    heads = "policy,residency,speedup,RL step,step,of ideal,ρ mean,ρ 99 %,ρ most,waits for copies,policy,copies"
    heads += ",memory,guests,peak tokens,home moves,planning,largest micro-batch"
    assert re.findall('<th scope="col">([^<]+)', table) == heads.split(",")
    assert table.count("<td>") == 4 * (9 + 7)  # vanilla, static, eplb, foremoe
    assert re.search('finemoe-symmetric</th><td colspan="9" class="words">skipped: ', table)
    assert table.count('<tr class="strong"><th scope="row">foremoe</th>') == 2


def test_data_cannot_close_its_script_element() -> None:
    figure = go.Figure(go.Bar(name="</script><script>alert(1)</script>"))
    plot = page.Plot("p", "caption", "label", figure)
    text = without_plotly_script(page.document("title", "", [page.Section("s", "heading", "", plots=(plot,))], ""))
    assert text.count("<script") == text.count("</script>") == 3


def test_hovering_over_a_cell_shows_rank_micro_step_and_tokens(report: Report) -> None:
    (plot,) = (p for s in sections(report) for p in s.plots if p.id == "load-before")
    tokens = int(report.loads.before[2, 3])
    assert f"rank 3, micro-step 2: {tokens:,} tokens, " in plot.figure.data[0].hovertext[2][3]


def test_maps_of_experts_show_the_step_and_what_three_of_four_micro_steps_reach(load: foremoe.Load) -> None:
    loads = load.array.sum(2)  # [micro_steps, layers, experts]
    ratios = loads / loads.mean(-1, keepdims=True)
    expected = loads.sum(0) / loads.sum(0).mean(-1, keepdims=True), np.sort(ratios, 0)[len(ratios) // 4]
    (section,) = (s for s in sections(shared_report()) if s.id == "experts")
    for plot, values in zip(section.plots, expected, strict=True):
        drawn = plot.figure.data[0]
        np.testing.assert_array_equal(drawn.z, np.digitize(values, [0.5, 0.8, 0.95, 1.05, 1.25, 1.5, 2, 3]))
        assert drawn.hovertext[1][7] == f"expert 7, layer 1: {values[1, 7]:.3f}"


def test_large_maps_are_grouped_and_each_group_shows_its_most_loaded_entry(report: Report) -> None:
    tokens = np.full((100, 1024), 10)
    tokens[7, 21] = 5000
    heat = np.full((100, 512), 0.98)
    heat[41, 306] = 11.5
    many = dataclasses.replace(
        report, num_ranks=1024, ranks_per_node=8, loads=LayerLoads(0, tokens, tokens), experts=ExpertHeat(heat, heat)
    )
    html = to_html(many)
    assert "ranks, 16 in a cell: the most loaded" in html
    assert "micro-steps, 2 in a cell: the most loaded" in html
    assert "rank 21, micro-step 7: 5,000 tokens" in html
    assert "experts, 4 in a cell: the most loaded" in html
    assert "expert 306, layer 41: 11.5" in html
    assert len(html.encode()) <= 6_000_000


def test_a_single_node_shows_its_internal_traffic() -> None:
    inside = gather_report(draw(ranks=2), Request(("static",), (1,), {"cluster": "h100", "model": MODEL}))
    (traffic,) = (s for s in sections(inside) if s.id == "traffic")
    assert traffic.heading == "Traffic inside the node"
    assert [plot.id for plot in traffic.plots] == ["traffic-bars"]


def test_hostile_names_are_escaped(report: Report, html: str) -> None:
    named = {p.policy: dataclasses.replace(p, policy=p.policy + EVIL) for p in report.planned}
    evil = dataclasses.replace(
        report,
        model=EVIL,
        cluster=EVIL,
        input=EVIL,
        settings={EVIL: EVIL},
        remarks=[EVIL],
        before=named["vanilla"],
        after=named["foremoe"],
        policies=[*named.values(), Skipped(EVIL, EVIL)],
        traffic={EVIL: next(iter(report.traffic.values())), "b": next(iter(report.traffic.values()))},
        ablation={EVIL: report.after},
        memory=[dataclasses.replace(report.memory[0], residency=EVIL)],
        windows=[dataclasses.replace(w, policy=EVIL, what=EVIL) for w in report.windows],
    )
    text = without_plotly_script(to_html(evil))
    for tag in ("<script", "<img", "</script", "</title", "</style", "<b>"):
        assert text.count(tag) == without_plotly_script(html).count(tag)
    assert "\u202e" not in text and 'onerror="' not in text
    figures = json.loads(re.search('id="figures">(.*?)</script>', text)[1])
    drawn = [s for s in _strings(figures) if "alert" in s or "onerror" in s]
    assert len(drawn) > 40
    assert not [s for s in drawn if re.search("<(?!/?b>)", s)]  # Plotly interprets tags; the report itself adds <b>
    assert "hovertemplate" not in text and "texttemplate" not in text


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [s for v in value.values() for s in _strings(v)]
    if isinstance(value, list):
        return [s for v in value for s in _strings(v)]
    return [value] if isinstance(value, str) else []


def test_unprintable_characters_become_replacement_characters() -> None:
    assert page.escaped("txt\u202egpj \udcff\x00\x1b") == "txt\ufffdgpj \ufffd\ufffd\ufffd"
    assert page.escaped("two\nlines\t& <ρ混🙂>") == "two\nlines\t&amp; &lt;ρ混🙂&gt;"


def test_equal_input_gives_an_equal_page_except_for_measured_times(load: foremoe.Load) -> None:
    def made(threads: int, measured: bool) -> str:
        options = {"cluster": "h100", "model": MODEL, "threads": threads}
        return to_html(gather_report(load, Request(("static", "foremoe"), (1,), options, measured=measured)))

    one, two = (re.sub(r"<td>[\d.]+ µs</td>", "", made(threads, True)) for threads in (1, 2))
    assert one == two
    measured = one.count('<th scope="col">planning</th>')
    one, two = (made(threads, False) for threads in (1, 2))
    assert one == two
    assert one.count('<th scope="col">planning</th>') == measured - 1, "modelled alone: gathering of the step's loads"


def test_write_report_takes_the_options_of_plan_and_simulate(load: foremoe.Load, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "page.html"
    report = write_report(
        load, out, cluster="h100", model=MODEL, residency="resident", guest_slots=(1,), policies="foremoe", in_flight=2
    )
    assert report.after.policy == "foremoe" and report.wrong == []
    assert "<dt>micro-steps in flight</dt><dd>2</dd>" in out.read_text()
    before = foremoe.plan(load)
    options = {
        "guest_slots": 1,
        "homes": before,
        "previous": before,
        "previous_load": load,
        "threads": 1,
        "residency": "resident",
    }
    again = write_report(load, out, cluster="h100", model=MODEL, policies="foremoe", **options)
    (figures,) = foremoe.simulate(load, "foremoe", cluster="h100", model=MODEL, **options)
    assert again.after.copies_per_layer_event == figures["copies_per_layer_event"]
    assert again.after.copies_per_layer_event != report.after.copies_per_layer_event
    with pytest.raises(TypeError, match="no option 'colour'"):
        write_report(load, out, cluster="h100", model=MODEL, colour="red")  # type: ignore[call-arg]
    with pytest.raises(foremoe.InputError, match="load: is a str"):
        write_report("a.safetensors", out, cluster="h100")  # type: ignore[arg-type]

"""foremoe.report: the page's numbers, its promises as a file, and the command that makes it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import pathlib
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

import foremoe
from foremoe import _core
from foremoe._command_line import parse
from foremoe.report import numbers, page, to_html, write_report
from foremoe.report.command import command, main
from foremoe.report.facts import LayerLoads, PolicyResult, Report, Skipped
from foremoe.report.gather import Request, gather_report
from foremoe.report.sections import sections

MODEL = "qwen3-30b-a3b"
SECTIONS = ["policies", "load", "balance", "shares", "time", "ablation", "memory", "traffic", "timeline"]
EVIL = '</title></style></script><script>alert(1)</script><img src=x onerror="alert(2)">\'<b>%{x}\u202e'


def draw(ranks: int = 4, **more: Any) -> foremoe.Load:
    shape = {"micro_steps": 3, "layers": 2, "experts": 128, "top_k": 8, "tokens_per_rank": 128}
    return foremoe.synthesize_load(ranks=ranks, ranks_per_node=2, **{**shape, **more})


@pytest.fixture(scope="module")
def load() -> foremoe.Load:
    return draw()


@pytest.fixture(scope="module")
def report(load: foremoe.Load) -> Report:
    options = {"cluster": "h100", "model": MODEL, "rollout_seconds": 2, "memory_budget": 80}
    return gather_report(load, Request(("static", "eplb", "finemoe-symmetric", "foremoe"), (1, 2), options))


@pytest.fixture(scope="module")
def html(report: Report) -> str:
    return to_html(report)


@pytest.fixture
def given(load: foremoe.Load, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command line, in a folder of its own, that lacks --out."""
    monkeypatch.chdir(tmp_path)
    load.save("step.load.safetensors")
    return ["step.load.safetensors", "--cluster", "h100", "--model", MODEL, "--guest-slots", "1"]


def own(html: str) -> str:
    """The page without Plotly's script."""
    return html.replace(page.plotly_script(), "")


def planned(report: Report) -> dict[str, PolicyResult]:
    return {p.policy: p for p in report.planned}


def test_the_numbers_are_those_of_simulate(load: foremoe.Load, report: Report) -> None:
    options = {"cluster": "h100", "model": MODEL, "rollout_seconds": 2, "memory_budget": 80}
    names = ["vanilla", "static", "eplb", "foremoe"]
    for figures in foremoe.simulate(load, names, guest_slots=1, **options):
        ours = planned(report)[figures["policy"]]
        assert ours.step_seconds == figures["step_seconds"]
        assert ours.speedup == pytest.approx(figures["speedup_over_vanilla"])
        assert ours.rl_speedup == pytest.approx(figures["rl_step_speedup"])
        assert ours.mean_rho == pytest.approx(figures["rho"]["mean"])
        assert ours.rho.max() == pytest.approx(figures["rho"]["max"])
        assert ours.memory_bytes == figures["memory_bytes_per_rank"]
        assert ours.largest_micro_batch == figures["largest_micro_batch_tokens"]
        memory = [stage["memory"] for stage in figures["stages"]]
        assert ours.guest_bytes == max(m["guest_weights"] + m["guest_gradients"] for m in memory)
        seconds = [stage["seconds"] for stage in figures["stages"]]
        moved = figures["home_move_seconds"]
        assert [ours.recompute.seconds, ours.policy_update.seconds - moved] == pytest.approx(seconds)
        rows = sum(t["row_bytes"] for stage in figures["stages"] for t in stage["traffic"])
        assert sum(link.rows for link in ours.links) == rows


def test_before_is_vanilla_and_after_is_foremoe_or_the_fastest(load: foremoe.Load, report: Report) -> None:
    assert [p.policy for p in report.policies] == ["vanilla", "static", "eplb", "finemoe-symmetric", "foremoe"]
    assert (report.before.policy, report.after.policy) == ("vanilla", "foremoe")
    without = gather_report(load, Request(("static", "eplb"), (1,), {"cluster": "h100", "model": MODEL}))
    assert without.after is max(without.planned[1:], key=lambda p: p.speedup)


def test_loads_are_those_of_the_layer_that_vanilla_balances_worst(load: foremoe.Load, report: Report) -> None:
    homes = load.array.sum(2).reshape(3, 2, 4, 32).sum(-1)  # [micro_steps, layers, ranks]
    worst = int((homes.max(-1) / homes.mean(-1)).sum(0).argmax())
    assert report.loads.layer == worst
    np.testing.assert_array_equal(report.loads.before, homes[:, worst])
    np.testing.assert_array_equal(report.loads.after.sum(1), homes[:, worst].sum(1))


def test_ablation_and_memory_are_plans_of_foremoe(load: foremoe.Load, report: Report) -> None:
    assert list(report.ablation) == ["vanilla", "B", "BL", "BLP", "BLPT"]
    assert report.ablation["BLPT"].step_seconds == report.after.step_seconds
    points = [(p.residency, p.guest_slots) for p in report.memory]
    slots = [(residency, n) for residency in ("static", "resident", "shared") for n in (1, 2)]
    assert points == [("no guests", 0), *slots]
    assert report.memory[3].result.step_seconds == report.after.step_seconds


def test_lanes_have_no_gaps_and_end_with_the_window(report: Report) -> None:
    for window in report.windows:
        assert list(window.lanes) == [0, 1, 2, 3]
        for lane in window.lanes.values():
            work = [span for span in lane if not span.beneath]
            edges = [span.begin for span in work[1:]]
            assert [span.end for span in work[:-1]] == pytest.approx(edges, abs=2e-9)
            assert work[0].begin == pytest.approx(0, abs=2e-9)
            assert work[-1].end == pytest.approx(window.seconds, abs=2e-9)


def test_a_page_has_every_section_that_there_is_data_for(html: str, report: Report) -> None:
    assert re.findall('<section id="([^"]+)"', html) == SECTIONS
    less = dataclasses.replace(report, ablation={}, memory=[], windows=[])
    assert [s.id for s in sections(less)] == [s for s in SECTIONS if s not in ("ablation", "memory", "timeline")]


def test_a_page_needs_nothing_beside_itself(html: str) -> None:
    plotly = page.plotly_script()
    assert html.count(plotly) == 1
    assert len(html.encode()) <= 6_000_000
    for never in ("http:", "https:", "@import", "url(", " style=", " src=", "javascript:", 'rel="stylesheet"'):
        assert never not in own(html)
    policy = re.search('Content-Security-Policy" content="([^"]+)"', html)[1]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"

    def hashes(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag.split()[0]}>", html, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in texts)

    assert rules["script-src"] == hashes("script")
    assert "unsafe" not in rules["script-src"] + rules["style-src"]


def test_ids_are_unique_and_every_plot_has_a_place_words_and_numbers(html: str) -> None:
    ids = re.findall(' id="([^"]+)"', own(html))
    assert len(ids) == len(set(ids))
    figures = json.loads(re.search('id="figures">(.*?)</script>', html)[1])
    places = re.findall('<div class="plot" id="([^"]+)" role="img" aria-label="[^"]{20,}">', html)
    assert list(figures) == places
    assert html.count("<details>") == html.count("<figcaption>") == len(places) >= 12


def test_plotly_knows_every_attribute_of_the_figures(report: Report) -> None:
    def coloured(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: coloured(v) for k, v in value.items()}
        if isinstance(value, list):
            return [coloured(v) for v in value]
        return "#123456" if isinstance(value, str) and value.startswith("--") else value

    style = pathlib.Path(page.__file__).with_name("style.css").read_text()
    for section in sections(report):
        for plot in section.plots:
            go.Figure(coloured(plot.data), coloured(plot.layout))
            for name in set(re.findall(r'"--(\w+)"', json.dumps([plot.data, plot.layout]))):
                assert style.count(f"--{name}:") == 2, f"{name} has a light and a dark colour"


def test_the_table_of_policies_has_all_columns_and_names_the_skipped(html: str) -> None:
    table = html[html.index('<section id="policies"') : html.index('<section id="load"')]
    heads = "policy,residency,speedup,RL step,step,of ideal,ρ mean,ρ 99 %,ρ most,waits for copies,copies,memory"
    heads += ",guests,peak tokens,home moves,planning,largest micro-batch"
    assert re.findall('<th scope="col">([^<]+)', table) == heads.split(",")
    assert table.count("<td>") == 4 * 16  # vanilla, static, eplb, foremoe
    assert re.search('finemoe-symmetric</th><td colspan="16" class="words">skipped: ', table)
    assert '<tr class="strong"><th scope="row">foremoe</th>' in table


def test_data_cannot_end_its_script() -> None:
    plot = page.Plot("p", "caption", "label", [{"name": "</script><script>alert(1)</script>"}], {})
    text = own(page.document("title", "", [page.Section("s", "heading", "", plots=(plot,))], ""))
    assert text.count("<script") == text.count("</script>") == 3


def test_pointing_at_a_cell_tells_rank_micro_step_and_tokens(report: Report) -> None:
    (plot,) = (p for s in sections(report) for p in s.plots if p.id == "load-before")
    tokens = int(report.loads.before[2, 3])
    assert f"rank 3, micro-step 2: {tokens:,} tokens, " in plot.data[0]["hovertext"][2][3]


def test_many_ranks_are_shown_in_groups_by_their_most_loaded(report: Report) -> None:
    tokens = np.full((100, 1024), 10)
    tokens[7, 21] = 5000
    many = dataclasses.replace(report, num_ranks=1024, ranks_per_node=8, loads=LayerLoads(0, tokens, tokens))
    html = to_html(many)
    assert "ranks, 16 in a cell: the most loaded" in html
    assert "micro-steps, 2 in a cell: the most loaded" in html
    assert "rank 21, micro-step 7: 5,000 tokens" in html
    assert len(html.encode()) <= 6_000_000


def test_one_node_shows_the_traffic_inside_of_it() -> None:
    inside = gather_report(draw(ranks=2), Request(("static",), (1,), {"cluster": "h100", "model": MODEL}))
    (traffic,) = (s for s in sections(inside) if s.id == "traffic")
    assert traffic.heading == "Traffic inside the node"
    assert [plot.id for plot in traffic.plots] == ["traffic-bars"]


def test_hostile_names_are_text(report: Report, html: str) -> None:
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
    text = own(to_html(evil))
    for tag in ("<script", "<img", "</script", "</title", "</style", "<b>"):
        assert text.count(tag) == own(html).count(tag)
    assert "\u202e" not in text and 'onerror="' not in text
    figures = json.loads(re.search('id="figures">(.*?)</script>', text)[1])
    drawn = [s for s in _strings(figures) if "alert" in s or "onerror" in s]
    assert len(drawn) > 40
    assert not [s for s in drawn if re.search("<(?!/?b>)", s)]  # Plotly reads tags; the <b> is ours
    assert "hovertemplate" not in text and "texttemplate" not in text


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [s for v in value.values() for s in _strings(v)]
    if isinstance(value, list):
        return [s for v in value for s in _strings(v)]
    return [value] if isinstance(value, str) else []


def test_what_cannot_be_shown_becomes_a_replacement_character() -> None:
    assert page.escaped("txt\u202egpj \udcff\x00\x1b") == "txt\ufffdgpj \ufffd\ufffd\ufffd"
    assert page.escaped("two\nlines\t& <ρ混🙂>") == "two\nlines\t&amp; &lt;ρ混🙂&gt;"


def test_equal_input_makes_an_equal_page_but_for_measured_times(load: foremoe.Load) -> None:
    pages = []
    for threads in (1, 2):
        again = gather_report(
            load, Request(("static", "foremoe"), (1,), {"cluster": "h100", "model": MODEL, "threads": threads})
        )
        pages.append(re.sub(r"<td>[\d.]+ µs</td>", "", to_html(again)))
    assert pages[0] == pages[1]


def test_no_load_is_told_as_that(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = foremoe.Load.from_array(np.zeros((3, 2, 4, 128), np.int64), top_k=8)
    path = tmp_path / "none.load.safetensors"
    nothing.save(path)
    assert (
        main(
            [
                str(path),
                "--cluster",
                "h100",
                "--model",
                MODEL,
                "--policy",
                "foremoe",
                "--out",
                str(tmp_path / "page.html"),
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.endswith("Qwen3-30B-A3B on h100, no load\n")
    text = own((tmp_path / "page.html").read_text())
    assert "No load" in text and "<td>–</td>" in text
    assert "times the mean load" not in text and '<section id="load"' not in text


def test_a_plan_that_cannot_train_is_said_to_serve_recompute_alone(
    given: list[str], report: Report, html: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [p.policy for p in report.planned if not p.can_train] == ["eplb"]
    assert "<td>free*</td>" in html and "free*: experts may be anywhere" in html
    for policy in ("eplb", "foremoe"):
        assert main([*given, "--policy", f"static,{policy}", "--residency", "free", "--out", "page.html"]) == 0
        assert ("in recompute alone" in capsys.readouterr().out) == (policy == "foremoe")  # static is faster than eplb
    text = own(pathlib.Path("page.html").read_text())
    summary = text[text.index('<p class="summary">') : text.index("</header>")]
    assert "for recompute of Qwen3-30B-A3B" in summary and "It cannot train" in summary
    assert "training step" not in summary and "Speedup of recompute" in summary and "Speedup of a step" not in summary


def test_where_nothing_but_vanilla_can_be_planned_nothing_is_compared(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*given, "--policy", "eplb", "--in-flight", "2", "--out", "page.html"]) == 0
    said = capsys.readouterr().out
    assert "nothing could be planned but vanilla" in said and "as fast as" not in said
    text = own(pathlib.Path("page.html").read_text())
    assert "Nothing but vanilla could be planned" in text
    assert "as fast" not in text[text.index('<p class="summary">') : text.index("</header>")]
    assert "skipped: " in text


def test_the_command_says_what_came_out_and_replaces_a_page(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = pathlib.Path("page.html")
    out.write_text("old")
    options = ["--policy", "vanilla", "--optimizer-shards", "64", "--memory-budget", "0.5", "--prefer", "links"]
    assert main([*given, *options, "--ranks-per-node", "4", "--out", "page.html"]) == 0
    said = capsys.readouterr()
    assert re.fullmatch(r"page.html: Qwen3-30B-A3B on h100, vanilla, [\d.]+ % of ideal\n", said.out)
    assert said.err == "foremoe: --prefer links has no effect: all ranks are on one node\n"
    text = out.read_text()
    assert "nothing fits the budget of 0.5 GB; the least is" in text
    assert "<dt>data-parallel ranks that share optimizer state</dt><dd>64</dd>" in text
    assert "<dt>memory of a rank</dt><dd>80.0 GB</dd>" in text
    assert "<dt>memory budget</dt><dd>0.5 GB</dd>" in text
    assert sorted(p.name for p in pathlib.Path.cwd().iterdir()) == ["page.html", "step.load.safetensors"]


def test_nodes_are_as_large_as_the_clusters_unless_said_otherwise(given: list[str]) -> None:
    assert main([*given, "--policy", "vanilla", "--out", "page.html"]) == 0
    assert "128 experts on 4 ranks (1 node)" in pathlib.Path("page.html").read_text()
    assert main([*given, "--policy", "vanilla", "--ranks-per-node", "2", "--out", "page.html"]) == 0
    assert "128 experts on 4 ranks (2 nodes)" in pathlib.Path("page.html").read_text()


def test_a_wrong_plan_is_left_out_and_named_and_the_exit_code_is_1(
    given: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = _core._evaluate

    def damaged(load: foremoe.Load, policy: str, options: dict[str, Any], **others: Any) -> Any:
        good = evaluate(load, policy, options, **others)
        if policy != "static":
            return good
        plan = SimpleNamespace(guest_slots=1, residency="static")
        figures = {"ok": False, "violations": [{"message": "rank 3 serves nothing"}]}
        return SimpleNamespace(policy=policy, skipped=None, figures=figures, plan=plan)

    monkeypatch.setattr(_core, "_evaluate", damaged)
    assert main([*given, "--policy", "static,eplb", "--out", "page.html"]) == 1
    reason = "its plan is WRONG: rank 3 serves nothing"
    assert capsys.readouterr().err == f"foremoe report: static, 1 guest slot, residency static: {reason}\n"
    text = own(pathlib.Path("page.html").read_text())
    assert f"skipped: {reason}" in text
    assert text.count("static</th>") == 1 + text.count('<th scope="row">static</th><td>1<')  # the memory table's


REFUSED = [
    (["--out", "nowhere/page.html"], "nowhere/page.html: cannot be written: No such file or directory"),
    (["--out", "."], ".: cannot be written: Is a directory"),
    (["--out", "step.load.safetensors"], "--out: is also an input"),
    (["--out", ""], "--out: is empty"),
    (["--out", "-"], "--out: '-', expected the name of a file"),
    ([], "--out is required"),
    (["--out", "page.html", "--guest-slots", "x"], "--guest-slots: 'x' is not a whole number"),
    (["--out", "page.html", "--guest-slots", ","], "--guest-slots: lists no number"),
    (["--out", "page.html", "-G70000"], "--guest-slots: 70000 is not in 0 … 65536"),
    (["--out", "page.html", "--residency", "auto"], "--residency: 'auto', expected static"),
    (["--out", "page.html", "--policy", "nobody"], "--policy: 'nobody', expected one of vanilla"),
    (["--out", "page.html", "--model", "deepseek-v3"], "--model"),
    (["--out", "page.html", "--cluster", "nowhere"], "nowhere: is no cluster file"),
    (["--out", "page.html", "--ranks", "3"], "3"),
    (["--out", "page.html", "--threads", "many"], "--threads: 'many' is not a whole number"),
    (["--out", "page.html", "--threads", "5000"], "--threads: 5000 is not in 1 … 4096"),
    (["--out", "page.html", "--threads", "0"], "--threads: 0 is not in 1 … 4096"),
    (["--out", "page.html", "--align", "0"], "--align: 0 is not in 1"),
    (["--out", "page.html", "--rollout-seconds", "-1"], "--rollout-seconds: -1 is not in 0"),
    (["--out", "page.html", "--homes", "nowhere.plan"], "nowhere.plan"),
    (["--out", "page.html", "--homes", "not-\udcff-unicode"], "--homes: is no UTF-8 text"),
    (["--out", "page.html", "--seed", "1", "--seed", "2"], "--seed: is given twice"),
    (["--out", "page.html", "--colour", "red"], "unrecognized arguments: --colour red"),
]


@pytest.mark.parametrize(("arguments", "saying"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line_before_the_work(
    given: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], saying: str
) -> None:
    names = set(arguments)
    kept = given[:5] if names & {"--guest-slots", "-G70000"} else given
    kept = [kept[0], *kept[3:]] if "--cluster" in names else kept
    kept = [*kept[:3], *kept[5:]] if "--model" in names else kept
    assert main([*kept, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("foremoe report: ")
    assert saying in said.err
    assert [p.name for p in pathlib.Path.cwd().iterdir()] == ["step.load.safetensors"]


def test_without_plotly_the_command_says_what_to_install(
    given: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    assert main([*given, "--out", "page.html"]) == 2
    said = "foremoe report: plotly is not installed: pip install 'foremoe[report]'\n"
    assert capsys.readouterr().err == said


def test_options_are_those_of_the_librarys_tables() -> None:
    names = {option.name for option in command().options}
    for table in ("input", "planning", "cost", "simulation"):
        assert {option["name"] for option in _core._option_tables()[table]} <= names
    given = parse(
        command(), ["x", "--cluster=h20", "-G", "1", "--guest-slots=2,4", "--keep-activations", "-opage.html"]
    )
    assert given == {"input": "x", "cluster": "h20", "guest_slots": "1,2,4", "keep_activations": "", "out": "page.html"}


def test_help_is_short_and_help_all_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    short = capsys.readouterr().out
    assert main(["--help-all"]) == 0
    whole = capsys.readouterr().out
    assert "--cluster" in short and "--seed" not in short and "auto stays within" not in " ".join(short.split())
    hidden = int(re.search(r"(\d+) more options, and what words mean: foremoe report --help-all", short)[1])
    spelt = [option.spelling for option in command().options]
    assert [name for name in spelt if name not in whole] == []
    assert hidden == sum(not (o.main or o.required or o.positional) for o in command().options) > 20
    for policy in foremoe.policies():
        assert f"\n  {policy} " in whole
    assert "%%" not in whole


def test_python_writes_the_same_page(load: foremoe.Load, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "page.html"
    report = write_report(load, out, cluster="h100", model=MODEL, guest_slots=(1,), policies="foremoe", in_flight=2)
    assert report.after.policy == "foremoe" and report.wrong == []
    assert "<dt>micro-steps in flight</dt><dd>2</dd>" in out.read_text()
    with pytest.raises(foremoe.InputError, match="colour: is no option"):
        write_report(load, out, cluster="h100", model=MODEL, colour="red")
    with pytest.raises(foremoe.InputError, match="load: is a str"):
        write_report("a.safetensors", out, cluster="h100")  # type: ignore[arg-type]


def test_numbers_have_three_digits_and_the_unit_that_fits() -> None:
    seconds = {0: "0 s", 12.345: "12.3 s", 1234.5: "1234 s", 0.0034: "3.40 ms", 78e-6: "78.0 µs", 108e-6: "108 µs"}
    seconds |= {0.99999: "1.00 s", 9.9999: "10.0 s"}
    for value, text in seconds.items():
        assert numbers.seconds_text(value).replace("\u00a0", " ") == text
    for value, text in {0: "0 B", 999: "999 B", 999.9: "1.00 kB", 2.7e9: "2.70 GB", 4e18: "4000 PB"}.items():
        assert numbers.bytes_text(value).replace("\u00a0", " ") == text
    assert [numbers.ratio_text(v) for v in (1.0024, 12.34)] == ["1.002", "12.3"]
    assert [numbers.times_text(v) for v in (1.4237, 312)] == ["1.42×", "312×"]
    assert [numbers.counted(v, "rank") for v in (1, 1234)] == ["1 rank", "1,234 ranks"]

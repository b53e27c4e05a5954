"""Experiments as TOML files: what they say, and what in them cannot be."""

from __future__ import annotations

import pathlib

import pytest
from experiments import LISTS, MODELLED, PROSE, ROOT, SHAPE, TRACE, changed

import foremoe
from foremoe import reproduce
from foremoe.reproduce import experiment_file


def test_a_list_makes_one_input_of_each_value_and_common_keys_hold_for_all() -> None:
    experiment = reproduce.parse_experiment(LISTS, "folder/mine.toml")
    assert experiment.name == "mine"
    assert [one.label for one in experiment.inputs] == ["1 layers", "3 layers"]
    assert [one.load["layers"] for one in experiment.inputs] == [1, 3]
    assert [one.load["ranks"] for one in experiment.inputs] == [4, 4]


def test_a_table_says_otherwise_than_what_all_have_in_common() -> None:
    none, ours = reproduce.parse_experiment(LISTS, "mine.toml").systems
    assert none.options == {}  # vanilla has no use for guest slots
    assert ours.options == {"guest_slots": 2, "stages": "BT"}


@pytest.mark.parametrize("key", ["foresight = true", "warm = true", 'forecast = "former_step"'])
def test_a_key_that_all_have_in_common_is_named_where_it_stands(key: str) -> None:
    with pytest.raises(foremoe.InputError) as caught:
        reproduce.parse_experiment(changed(LISTS, "[every_system]", f"[every_system]\n{key}"), "mine.toml")
    assert caught.value.field == f"every_system.{key.split()[0]}"


def test_what_all_have_in_common_holds_for_those_that_can_use_it() -> None:
    text = changed(LISTS, 'routing = "w2"', "step_spread = 0.5")
    text = changed(text, "[every_system]", '[[input]]\nlabel = "zipf"\nrouting = "zipf"\nskew = 2\n[every_system]')
    text = changed(text, "[every_system]", f'[[input]]\nlabel = "file"\nfile = "{TRACE}"\n[every_system]\ndyn = 2')
    text = changed(text, "[[published]]", '[[system]]\nlabel = "FEPLB"\npolicy = "feplb"\n[[published]]')
    experiment = reproduce.parse_experiment(text, "mine.toml")
    assert ["step_spread" in one.load for one in experiment.inputs] == [True, True, False, False]
    assert experiment.inputs[3].load == {"ranks": 4}
    assert [system.own for system in experiment.systems] == [{}, {}, {"dyn": 2}]


@pytest.mark.parametrize(
    ("old", "new", "field", "words"),
    [
        ('title = "A hot rank"', "", "title", "is missing"),
        ('title = "A hot rank"', "title = 3", "title", "expected a text"),
        ('finding = "Finding."', "across = 1", "across", "expected true or false"),
        ("ranks = 4", "ranks = 0", "every_input.ranks", "0 is not in 1"),
        ("ranks = 4", "ranks = true", "every_input.ranks", "cannot be"),
        ("ranks = 4", "ranks = 7", "every_input.ranks", "16 experts"),
        ("ranks = 4", "rank = 4", "every_input.rank", "no such key"),
        ("layers = [1, 3]", "layers = 1\nwrong_percent = 101", "input[0].wrong_percent", "101, expected 0 … 100"),
        ("layers = [1, 3]", "layers = 1\nmissing_percent = -1", "input[0].missing_percent", "-1, expected 0 … 100"),
        ('policy = "vanilla"', 'policy = "vanilla"\nforesight = true', "system[0].foresight", "has no effect"),
        ("layers = [1, 3]", "layer = [1, 3]", "input[0].layer", "no such key"),
        ("layers = [1, 3]", "layers = [1, 0]", "input[1].layers", "0 is not in 1"),
        ("layers = [1, 3]", "layers = [1, 3]\nseed = [1, 2]", "input[0].seed", "one list"),
        ("layers = [1, 3]", "layers = []", "input[0].layers", "is empty"),
        ("layers = [1, 3]", "skew = 2", "input[0].skew", "has no effect on these columns with routing w2"),
        ("layers = [1, 3]", "sequence_tokens = 2", "input[0].sequence_tokens", "has no effect"),
        ("layers = [1, 3]", "steps = 1", "input[0].steps", "has no effect on these columns with routing w2"),
        ("layers = [1, 3]", "layers = [1, 1]", "input[1].label", "'1 layers' twice"),
        ("layers = [1, 3]", 'cluster = "h100"', "input[0].cluster", "has no effect on these columns with routing w2"),
        ("layers = [1, 3]", 'layers = 1\nmodel = "tinier"', "input[0].model", "'tinier'"),
        ("layers = [1, 3]", 'routing = "zpif"\nskew = 2', "input[0].routing", "'zpif'"),
        ("{layers} layers", "{layer} layers", "input[0].label", "{layer} is no key of this table"),
        ("{layers} layers", "{skew} layers", "input[0].label", "{skew} is no key of this table"),
        ('label = "ours"', 'label = "{} ours"', "system[1].label", "{} is no key of this table"),
        ("[[input]]", "[input]", "input", "[[input]]"),
        ('routing = "w2"', 'routing = "w9"', "every_input.routing", "zipf"),
        ("hidden = 64", "hiden = 64", "shape.hiden", "is no option"),
        ("hidden = 64", "hidden = 0", "shape.hidden", "0 is not in 1"),
        ('name = "tiny"', "", "shape.name", "is missing"),
        ('stages = "BT"', 'stages = "BX"', "system[1].stages", "'BX'"),
        ('policy = "foremoe"', 'policy = "foremoe"\nforecast = "tea leaves"', "system[1].forecast", "'tea leaves'"),
        ('policy = "vanilla"', 'policy = "vanilla"\nforecast = "step"', "system[0].forecast", "has no effect"),
        (
            'policy = "foremoe"',
            'policy = "foremoe"\nforecast = "former_step"',
            "system[1].forecast",
            "needs former_step",
        ),
        ('policy = "foremoe"', 'policy = "foremoe"\nforecast = "average"', "system[1].forecast", "residency shared"),
        (
            'policy = "foremoe"',
            'policy = "foremoe"\nforecast = "step"\nin_flight = 2',
            "system[1].forecast",
            "several micro-steps in flight",
        ),
        (
            'policy = "foremoe"',
            'policy = "foremoe"\nforecast = "step"\nprefer = "links"',
            "system[1].forecast",
            "beside prefer links, which splits",
        ),
        ('policy = "foremoe"', 'policy = "foremoe"\nwarm = true', "system[1].warm", "has no effect where"),
        (
            'policy = "foremoe"',
            'policy = "foremoe"\nwarm = true\nresidency = "shared"',
            "system[1].warm",
            "has no effect under residency shared",
        ),
        ('policy = "vanilla"', 'policy = "vanilla"\nwarm = true', "system[0].warm", "has no effect"),
        ("layers = [1, 3]", "layers = 1\ndrift = 1", "input[0].drift", "has no effect"),
        ("layers = [1, 3]", 'layers = 1\nover_steps = "median"', "input[0].over_steps", "has no effect"),
        ('finding = "Finding."', 'finding = "{1 layers | none | rho_mean | 2 ±}"', "finding", "has one draw"),
        ('finding = "Finding."', 'finding = "{1 layers | none | rho_mean | ±}"', "finding", "number of decimals"),
        ('policy = "foremoe"', 'policy = "nobody"', "system[1].policy", "vanilla"),
        ('policy = "foremoe"', 'polcy = "foremoe"', "system[1].polcy", "no such key"),
        (
            'policy = "foremoe"',
            'policy = "feplb"',
            "system[1].stages",
            "has no effect on these columns with policy feplb",
        ),
        ('policy = "foremoe"', 'policy = "foremoe"\ndyn = 2', "system[1].dyn", "has no effect on these columns with"),
        ('policy = "vanilla"', 'policy = "vanilla"\nguest_slots = 1', "system[0].guest_slots", "policy vanilla"),
        ('policy = "vanilla"', 'policy = "vanilla"\npath = "peer"', "system[0].path", "has no effect on these columns"),
        ("[every_system]\nguest_slots = 1", "[every_system]\ndyn = 1", "every_system.dyn", "no effect on any system"),
        ('policy = "vanilla"', 'policy = "feplb"\ndyn = "two"', "system[0].dyn", "'two' is not a whole number"),
        ('policy = "foremoe"', 'policy = "foremoe"\nresidency = "auto"', "input[0].cluster", "system 'ours' needs"),
        ("guest_slots = 2", 'guest_slots = "two"', "system[1].guest_slots", "'two' is not a whole number"),
        ("guest_slots = 2", 'path = "up"\nresidency = "auto"', "system[1].path", "peer"),
        ("at_most = 2", "", "aim[0].at_least", "at_most"),
        ("at_most = 2", "at_most = nan", "aim[0].at_most", "expected a number"),
        ("value = 1.25", "", "published[0].value", "is missing"),
        ("value = 1.25", "value = true", "published[0].value", "a number or a text"),
        ('system = "ours"', 'system = "yours"', "published[0].system", "no system 'yours'"),
        ('input = "1 layers"', 'input = "2 layers"', "published[0].input", "no input '2 layers'"),
        ("at_most = 2", 'at_most = 2\nrelative_to = "yours"', "aim[0].relative_to", "no system 'yours'"),
        ('"straggler"]', '"stragler"]', "columns[1]", "straggler_less"),
        ('"straggler"]', "3]", "columns[1]", "expected a text"),
        ('"straggler"]', '"rho_mean"]', "columns[1]", "'rho_mean' twice"),
        ('policy = "vanilla"', 'policy = "vanilla"\nep_groups = 0', "system[0].ep_groups", "0, expected 1 or more"),
        ('policy = "vanilla"', 'policy = "vanilla"\nep_groups = "2"', "system[0].ep_groups", "expected an integer"),
        (
            'policy = "vanilla"',
            'policy = "vanilla"\nep_groups = 2',
            "system[0].ep_groups",
            "column 'straggler' is of one",
        ),
        ('"straggler"]', '"speedup"]', "input[0].cluster", "is missing: column 'speedup' needs cluster and model"),
        ("ranks = 4", "ranks = 4\ndraws = 0", "every_input.draws", "0, expected 1"),
        ('label = "{layers} layers"', 'label = "x"\nfile = "f"\ndraws = 2', "input[0].draws", "has no effect"),
        ('"straggler"]', '"placement_s"]', "input[0].cluster", "is missing: column 'placement_s' needs cluster"),
        ('label = "ours"', 'label = "none"', "system[1].label", "'none' twice"),
        ('label = "{layers} layers"', 'label = "layers"', "input[1].label", "'layers' twice"),
        ('title = "A hot rank"', "title = ", "", "line 2"),
        ('title = "A hot rank"', 'title = "A hot rank"\nabuot = ""', "abuot", "no such key"),
    ],
)
def test_what_is_wrong_is_named_with_file_key_and_index(old: str, new: str, field: str, words: str) -> None:
    text = changed(changed(LISTS, "[every_input]", SHAPE + "[every_input]"), old, new)
    with pytest.raises(foremoe.InputError, match=r"^mine\.toml") as caught:
        reproduce.parse_experiment(text, "mine.toml")
    assert (caught.value.file, caught.value.field) == ("mine.toml", field)
    assert f"mine.toml: {field}" in str(caught.value)
    assert words in str(caught.value).removeprefix(f"mine.toml: {field}")


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"h100": "b300", "Qwen3-30B-A3B": "tinier", "ranks = 8": "sequence_tokens = 0"}, "cluster", "gb200"),
        ({"Qwen3-30B-A3B": "tinier", "ranks = 8": "sequence_tokens = 0"}, "model", "'tinier'"),
        ({'model = "Qwen3-30B-A3B"': "sequence_tokens = 0"}, "model", "is missing beside cluster"),
        ({'cluster = "h100"': "", "Qwen3-30B-A3B": "tinier"}, "cluster", "is missing: column 'step_ms' needs"),
        ({"ranks = 8": "sequence_tokens = 0", "layers = 2": "layers = 49"}, "sequence_tokens", "0 is not in 1"),
        (
            {'"step_ms"': '"gap_ideal_ms"', "ranks = 8": "ranks = 8\nwrong_percent = 1"},
            "wrong_percent",
            "'gap_ideal_ms'",
        ),
        ({"layers = 2": "layers = 49"}, "layers", "49, but Qwen3-30B-A3B has 48 MoE layers"),
        ({"ranks = 8": "ranks = 8\nexperts = 16"}, "experts", "16, but Qwen3-30B-A3B has 128"),
        ({"ranks = 8": "ranks = 8\ntop_k = 2"}, "top_k", "2, but Qwen3-30B-A3B has 8"),
        ({"ranks = 8": 'ranks = 8\ndispatch = "both"'}, "dispatch", "no dispatch 'both'; there are token, row"),
        ({"ranks = 8": 'ranks = 8\ndispatch = ["row", "both"]'}, "dispatch", "no dispatch 'both'"),
        ({"ranks = 8": 'ranks = 8\ndispatch = ["row", "token", "row"]'}, "dispatch", "'row' twice"),
        ({"ranks = 8": "ranks = 8\ndispatch = []"}, "dispatch", "is empty"),
        ({"ranks = 8": "ranks = 8\ndispatch = 3"}, "dispatch", "expected a text or a list of texts"),
        (
            {'"step_ms", "speedup", "ideal_speedup", "of_free"': '"experts_ms"', "seed = 3": 'dispatch = "row"'},
            "dispatch",
            "has no effect on these columns",
        ),
        ({"ranks = 8": "ranks = 8\ntrace = true\nformer_step = true"}, "trace", "cannot be used beside former_step"),
        ({"ranks = 8": "ranks = 8\ntrace = true\nwrong_percent = 0"}, "trace", "cannot be used beside wrong_percent"),
        ({"step_ms": "step_change", "ranks = 8": "ranks = 8\nsteps = 3"}, "steps", "3 does not divide 4 micro-steps"),
        ({"ranks = 8": "ranks = 8\nplan_each_step = true\ndrift = 2"}, "drift", "2, expected 0 … 1"),
        ({"ranks = 8": "ranks = 8\nplan_each_step = true\ndrift = 1"}, "drift", "has no effect with one step"),
        ({"ranks = 8": 'ranks = 8\nplan_each_step = true\nover_steps = "mode"'}, "over_steps", "no statistic 'mode'"),
        ({'"h100"': "8"}, "cluster", "a text or a table"),
        ({'"h100"': "{ node.ranks_per_switch = 2 }"}, "cluster.like", "expected a cluster's name"),
        ({'"h100"': '{ like = "b300" }'}, "cluster.like", "gb200"),
        ({'"h100"': '{ like = "h100", network.latency_seconds = 25 }'}, "cluster.network.latency_seconds", "25"),
        ({'"h100"': '{ like = "h100", network.bytes = 25 }'}, "cluster.network.bytes", "no option"),
        ({'"h100"': '{ like = "h100", ranks_per_node = 4 }'}, "cluster.ranks_per_node", "no option"),
        ({'"h100"': '{ like = "h100", node.ranks_per_switch = 9 }'}, "cluster.node.ranks_per_switch", "8 ranks"),
        ({"step_ms": "step_change", "ranks = 8": "ranks = 8\nsteps = true"}, "steps", "expected an integer"),
    ],
)
def test_of_several_keys_the_cluster_is_named_first_then_the_model(
    changes: dict[str, str], field: str, words: str
) -> None:
    text = MODELLED
    for old, new in changes.items():
        text = changed(text, old, new)
    with pytest.raises(foremoe.InputError, match=words) as caught:
        reproduce.parse_experiment(text, "mine.toml")
    assert caught.value.field == f"input[0].{field}"


def test_a_list_of_dispatches_stays_with_its_input_and_is_the_same_in_all() -> None:
    text = changed(MODELLED, "ranks = 8", "ranks = [4, 8]").replace('"grpo"', '"{ranks} ranks"')
    text = changed(text, "seed = 3", 'seed = 3\ndispatch = ["token", "row"]')
    experiment = reproduce.parse_experiment(text, "mine.toml")
    assert [(on.label, on.dispatches) for on in experiment.inputs] == [
        ("4 ranks", ("token", "row")),
        ("8 ranks", ("token", "row")),
    ]
    other = '[[input]]\nlabel = "other"\ncluster = "h100"\nmodel = "Qwen3-30B-A3B"\ndispatch = "row"\n'
    for old, new, field in (
        ("[[system]]", f"{other}[[system]]", "input[2].dispatch"),
        ('"{ranks} ranks"', '"{dispatch}, {ranks} ranks"', "input[0].label"),
        ("guest_slots = 2", 'guest_slots = 2\nresidency = "auto"', "system[1].residency"),
    ):
        with pytest.raises(foremoe.InputError) as caught:
            reproduce.parse_experiment(changed(text, old, new), "mine.toml")
        assert caught.value.field == field


def test_without_a_dispatch_rows_travel_by_the_token() -> None:
    (on,) = reproduce.parse_experiment(MODELLED, "mine.toml").inputs
    assert on.dispatches == ("token",)


@pytest.mark.parametrize(
    "key",
    [
        "layers = 1",
        "micro_steps = 2",
        "seed = 1",
        'routing = "grpo"',
        "steps = 1",
        "former_step = true",
        "trace = true",
        'model = "Mixtral-8x7B"',
        "step_spread = 1",
    ],
)
def test_an_input_from_a_file_has_no_keys_of_one_that_is_drawn(key: str) -> None:
    text = f'{PROSE}columns = ["rho_mean"]\n[[input]]\nlabel = "file"\nfile = "{TRACE}"\nranks = 4\n'
    text += '[[system]]\nlabel = "none"\npolicy = "vanilla"\n'
    reproduce.parse_experiment(text, "mine.toml")
    with pytest.raises(
        foremoe.InputError, match=rf"input\[0\]\.{key.split()[0]}: has no effect on these columns with file"
    ):
        reproduce.parse_experiment(changed(text, "ranks = 4", key), "mine.toml")


def test_keys_are_those_of_the_tables_of_options() -> None:
    assert experiment_file._BATCHED < experiment_file._DRAWN


def test_a_model_that_is_no_preset_has_the_sizes_of_its_shape() -> None:
    text = changed(
        LISTS, "experts = 16\ntop_k = 2\n", 'cluster = "h100"\nmodel = "tiny"\nrecompute_activations = false\n'
    )
    text = changed(text, '"straggler"]', '"step_ms"]')
    one, three = reproduce.parse_experiment(changed(text, "[every_input]", SHAPE + "[every_input]"), "mine.toml").inputs
    assert (one.load["experts"], one.load["top_k"], three.load["layers"]) == (16, 2, 3)
    assert one.cost is not None
    assert one.cost["keep_activations"] and one.cost["model"]["hidden"] == 64


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(foremoe.InputError) as caught:
        reproduce.read_experiment("nothing-like-this")
    for name in reproduce.experiment_names():
        assert name in str(caught.value)


def test_every_experiment_of_the_package_can_be_read() -> None:
    assert set(reproduce.experiment_names()) == {path.stem for path in (ROOT / "lab" / "experiments").glob("*.toml")}
    for name in reproduce.experiment_names():
        experiment = reproduce.read_experiment(name)
        assert (experiment.name, experiment.argument) == (name, name)
        assert experiment.finding, f"{name}: what came out is not told"


def test_a_package_without_its_experiments_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(experiment_file, "FOLDER", tmp_path / "experiments")
    with pytest.raises(foremoe.InputError, match="pip install"):
        reproduce.read_experiment("ultraep-table")

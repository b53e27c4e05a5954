"""Experiments as TOML files: what they say, and what in them cannot be."""

from __future__ import annotations

import pathlib

import pytest
from experiments import LISTS, PROSE, ROOT, SHAPE, TRACE, changed

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
    assert none.options == {"guest_slots": 1}
    assert ours.options == {"guest_slots": 2, "stages": "BT"}


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
        ("ranks = 4", "ranks = 0", "input[0].ranks", "0 is not in 1"),
        ("ranks = 4", "ranks = true", "input[0].ranks", "cannot be"),
        ("ranks = 4", "ranks = 7", "input[0].ranks", "16 experts"),
        ("ranks = 4", "rank = 4", "every_input.rank", "no such key"),
        ("layers = [1, 3]", "layer = [1, 3]", "input[0].layer", "no such key"),
        ("layers = [1, 3]", "layers = [1, 0]", "input[1].layers", "0 is not in 1"),
        ("layers = [1, 3]", "layers = [1, 3]\nseed = [1, 2]", "input[0].seed", "one list"),
        ("layers = [1, 3]", "layers = []", "input", "is missing"),
        ("layers = [1, 3]", "skew = 2", "input[0].skew", "none of use here"),
        ("layers = [1, 3]", "sequence_tokens = 2", "input[0].sequence_tokens", "none of use here"),
        ("layers = [1, 3]", "steps = 5", "input[0].steps", "5 does not divide 32"),
        ("layers = [1, 3]", "steps = true", "input[0].steps", "expected an integer"),
        ("layers = [1, 3]", 'cluster = "h100"', "input[0].model", "is missing beside cluster"),
        ("layers = [1, 3]", 'cluster = "b300"\nmodel = "tiny"', "input[0].cluster", "gb200"),
        ("layers = [1, 3]", 'cluster = "h100"\nmodel = "tinier"', "input[0].model", "'tinier'"),
        ("layers = [1, 3]", 'cluster = "h100"\nmodel = "tiny"\nlayers = 5', "input[0].layers", "tiny has 4 MoE layers"),
        (
            "layers = [1, 3]",
            'cluster = "h100"\nmodel = "Mixtral-8x7B"',
            "input[0].experts",
            "16, but Mixtral-8x7B has 8",
        ),
        ("[[input]]", "[input]", "input", "[[input]]"),
        ('routing = "w2"', 'routing = "w9"', "input[0].routing", "zipf"),
        ("hidden = 64", "hiden = 64", "shape.hiden", "is no option"),
        ("hidden = 64", "hidden = 0", "shape.hidden", "0 is not in 1"),
        ('name = "tiny"', "", "shape.name", "is missing"),
        ('stages = "BT"', 'stages = "BX"', "system[1].stages", "'BX'"),
        ('policy = "foremoe"', 'policy = "nobody"', "system[1].policy", "vanilla"),
        ('policy = "foremoe"', 'polcy = "foremoe"', "system[1].policy", "is missing"),
        ('policy = "foremoe"', 'policy = "foremoe"\ndyn = 2', "system[1].dyn", "none of use here"),
        ('policy = "foremoe"', 'policy = "feplb"\ndyn = "two"', "system[1].dyn", "'two' is not a whole number"),
        ('policy = "foremoe"', 'policy = "foremoe"\nresidency = "auto"', "system", "'ours' needs cluster and model"),
        ("guest_slots = 2", 'guest_slots = "two"', "system[1].guest_slots", "'two' is not a whole number"),
        ("guest_slots = 2", 'path = "up"', "system[1].path", "peer"),
        ("at_most = 2", "", "aim[0].at_least", "at_most"),
        ("at_most = 2", "at_most = nan", "aim[0].at_most", "expected a number"),
        ("value = 1.25", "", "published[0].value", "is missing"),
        ("value = 1.25", "value = true", "published[0].value", "a number or a text"),
        ('system = "ours"', 'system = "yours"', "published[0].system", "no system 'yours'"),
        ('input = "1 layers"', 'input = "2 layers"', "published[0].input", "no input '2 layers'"),
        ("at_most = 2", 'at_most = 2\nrelative_to = "yours"', "aim[0].relative_to", "no system 'yours'"),
        ('"straggler"]', '"stragler"]', "columns", "straggler_less"),
        ('"straggler"]', "3]", "columns[1]", "expected a text"),
        ('"straggler"]', '"speedup"]', "columns", "'speedup' needs cluster and model of input '1 layers'"),
        ('label = "ours"', 'label = "none"', "system", "'none' twice"),
        ('label = "{layers} layers"', 'label = "layers"', "input", "'layers' twice"),
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
    "key",
    [
        "layers = 1",
        "micro_steps = 2",
        "seed = 1",
        'routing = "grpo"',
        "steps = 1",
        "former_step = true",
        'model = "Mixtral-8x7B"',
        "step_spread = 1",
    ],
)
def test_an_input_from_a_file_has_no_keys_of_one_that_is_drawn(key: str) -> None:
    text = f'{PROSE}columns = ["rho_mean"]\n[[input]]\nlabel = "file"\nfile = "{TRACE}"\nranks = 4\n'
    text += '[[system]]\nlabel = "none"\npolicy = "vanilla"\n'
    reproduce.parse_experiment(text, "mine.toml")
    with pytest.raises(foremoe.InputError, match=rf"input\[0\]\.{key.split()[0]}: no such key, or none of use here"):
        reproduce.parse_experiment(changed(text, "ranks = 4", key), "mine.toml")


def test_keys_are_those_of_the_tables_of_options() -> None:
    for keys in experiment_file._ROUTING.values():
        assert keys < experiment_file._DRAWN
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
    assert set(reproduce.experiment_names()) == {path.stem for path in (ROOT / "reproduce").glob("*.toml")}
    for name in reproduce.experiment_names():
        experiment = reproduce.read_experiment(name)
        assert (experiment.name, experiment.argument) == (name, name)
        assert experiment.finding, f"{name}: what came out is not told"


def test_a_package_without_its_experiments_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(experiment_file, "FOLDER", tmp_path / "experiments")
    with pytest.raises(foremoe.InputError, match="pip install"):
        reproduce.read_experiment("ultraep-table")

"""Experiments as TOML files; docs/formats.md lists the keys.

[every_input] and [every_system] hold for each input and system that can use a key and does not set its own. A list in
place of one value makes one input (or system) of each of its values, and {key} in the label becomes that value. What
is wrong is an InputError with file and key, such as "mine.toml: system[1].stages: …", where system[1] is the second
one once lists are multiplied out.
"""

from __future__ import annotations

import os
import pathlib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .. import _core
from .._errors import InputError
from .columns import COLUMNS, Column
from .experiment import Aim, Experiment, Input, Published, System
from .toml_table import Options, Table, problem_of

FOLDER = pathlib.Path(__file__).with_name("experiments")  # of the installed package: reproduce/*.toml

_TABLES = {name: {option["name"] for option in table} for name, table in _core._option_tables().items()}
_DRAWN = _TABLES["synthesis"] - {"shape"}  # which is `model` here
_BATCHED = {"ranks", "ranks_per_node", "tokens_per_rank"}  # keywords of collect()
_COST = (_TABLES["cost"] - {"cluster", "model", "keep_activations"}) | {"rollout_seconds"}
_PLANNED = _TABLES["planning"] | {"path"}
# What one routing model alone uses.
_ROUTING = {
    "grpo": {"step_spread", "group_spread"},
    "zipf": {"skew", "permute_probability"},
    "dirichlet": {"concentration", "sequence_concentration"},
}

Labelled = TypeVar("Labelled", Input, System)


def experiment_names() -> list[str]:
    """Of the package's own experiments."""
    names = sorted(path.stem for path in FOLDER.glob("*.toml"))
    if not names:
        raise InputError(f"no experiments in {FOLDER}: `pip install .` puts them there; or name a .toml file")
    return names


def read_experiment(name_or_path: str | os.PathLike[str]) -> Experiment:
    """One of the package's own by name, else a TOML file by its path. Raises InputError that names file and key."""
    name = os.fspath(name_or_path)
    if name.endswith(".toml"):
        return parse_experiment(_text_of(pathlib.Path(name)), name)
    if name not in (names := experiment_names()):
        raise InputError(f"'{name}' is no experiment and no .toml file; there are {', '.join(names)}")
    return parse_experiment(_text_of(FOLDER / f"{name}.toml"), f"reproduce/{name}.toml", own=True)


def parse_experiment(text: str, file: str, *, own: bool = False) -> Experiment:
    """file: what messages call it. own: the experiment is the package's, and found by its name."""
    try:
        root = Table(tomllib.loads(text), file)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file}: {error}", file=file) from error
    prose: dict[str, Any] = {key: root.required(key) for key in ("title", "source", "about", "reading")}
    name = pathlib.Path(file).stem
    columns = _read_columns(root)
    shape = _read_shape(root)
    inputs = _by_label(root, "input", (_read_input(t, shape) for t in root.multiplied_out("input", _keys_of_input)))
    systems = _by_label(root, "system", map(_read_system, root.multiplied_out("system", _keys_of_system)))
    known = _Known(columns, inputs, systems)
    experiment = Experiment(
        **prose,
        name=name,
        file=file,
        argument=name if own else file,
        secondary=root.truth("secondary"),
        finding=root.text("finding"),
        across=root.truth("across"),
        columns=tuple(columns.values()),
        inputs=tuple(inputs.values()),
        systems=tuple(systems.values()),
        published=tuple(_read_published(table, known) for table in root.tables("published")),
        aims=tuple(_read_aim(table, known) for table in root.tables("aim")),
    )
    _expect_cost(root, experiment)
    root.finish()
    return experiment


def _text_of(path: pathlib.Path) -> str:
    if path.is_dir():
        raise InputError(f"{path}: is a folder", file=str(path))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read", file=str(path)) from error


def _by_label(root: Table, key: str, items: Iterable[Labelled]) -> dict[str, Labelled]:
    by_label: dict[str, Labelled] = {}
    for item in items:
        if item.label in by_label:
            root.fail(key, f"'{item.label}' twice")
        by_label[item.label] = item
    return by_label


def _read_columns(root: Table) -> dict[str, Column]:
    names = root.take("columns", "a list of texts", list)
    if not names:
        root.fail("columns", "is missing")
    for i, name in enumerate(names):
        if not isinstance(name, str):
            root.fail(f"columns[{i}]", "expected a text")
        if name not in COLUMNS:
            root.fail("columns", f"no column '{name}'; there are {', '.join(COLUMNS)}")
    return {name: COLUMNS[name] for name in names}


def _read_shape(root: Table) -> dict[str, Any]:
    """[shape]: a model that is none of the presets."""
    shape: dict[str, Any] = root.take("shape", "a table, [shape]", dict) or {}
    if not shape:
        return shape
    Table(shape, root.file, "shape").required("name")
    try:
        _core._check_evaluation({"model": shape})
    except InputError as error:
        key = error.index.strip("[']")  # model['hidden']
        root.fail(f"shape.{key}" if key else "shape", problem_of(error))
    return shape


def _keys_of_input(values: Options) -> set[str]:
    keys = {"label", "file", "cluster"}
    if values.get("cluster"):
        keys |= {"model", "recompute_activations"} | _COST
    if values.get("file"):
        return keys | _BATCHED
    others = [used for routing, used in _ROUTING.items() if routing != values.get("routing", "grpo")]
    return keys | {"model", "former_step", "steps"} | _DRAWN.difference(*others)


def _read_input(table: Table, shape: dict[str, Any]) -> Input:
    label = table.required("label")
    table.finish(but=_keys_of_input(table.rest))
    file, name, cluster = table.text("file"), table.text("model"), table.text("cluster")
    former_step, steps = table.truth("former_step"), table.take("steps", "an integer", int)
    steps = 1 if steps is None else steps
    own = bool(name) and shape.get("name") == name
    load = table.options(_BATCHED if file else _DRAWN)
    if own and not file:
        load = {"layers": shape["moe_layers"], "experts": shape.get("experts"), "top_k": shape.get("top_k"), **load}
    elif name and not file:
        load["shape"] = name
    sizes = table.checked(_core._check_synthesis, load)
    if not file:
        load["micro_steps"] = sizes["micro_steps"]
        if sizes["experts"] % sizes["ranks"] != 0:
            table.fail("ranks", f"{sizes['ranks']} do not divide {sizes['experts']} experts")
        if steps < 1 or sizes["micro_steps"] % steps != 0:
            table.fail("steps", f"{steps} does not divide {sizes['micro_steps']} micro-steps")
    cost: dict[str, Any] | None = None
    if cluster:
        if not name:
            table.fail("model", "is missing beside cluster")
        keep = not table.truth("recompute_activations", default=True)
        cost = {"cluster": cluster, "model": shape if own else name, "keep_activations": keep, **table.options(_COST)}
        model = table.checked(_core._check_evaluation, cost)
        if not file:
            _expect_fits(table, sizes, model)
    return Input(label, file, load, former_step, steps, cost)


def _expect_fits(table: Table, sizes: Mapping[str, int], model: Mapping[str, Any]) -> None:
    """A load of fewer layers stands for all of the model."""
    if sizes["layers"] > model["moe_layers"]:
        table.fail("layers", f"{sizes['layers']}, but {model['name']} has {model['moe_layers']} MoE layers")
    for key in ("experts", "top_k"):
        if sizes[key] != model[key]:
            table.fail(key, f"{sizes[key]}, but {model['name']} has {model[key]}")


def _keys_of_system(values: Options) -> set[str]:
    keys, policy = {"label", "policy"} | _PLANNED, values.get("policy")
    if isinstance(policy, str) and policy in _core.policies():
        keys.update(_core._own_options(policy))
    return keys


def _read_system(table: Table) -> System:
    label, policy = table.required("label"), table.required("policy")
    own_options = table.checked(_core._own_options, policy)
    table.finish(but=_PLANNED.union(own_options))
    own = table.options(set(own_options))
    table.checked(lambda options: _core._own_options(policy, options), own)
    options = table.options(_PLANNED)
    table.checked(_core._check_evaluation, options)
    return System(label, policy, options, own)


@dataclass(frozen=True)
class _Known:
    """What published figures and aims can speak of."""

    columns: Mapping[str, Column]
    inputs: Mapping[str, Input]
    systems: Mapping[str, System]

    def column(self, table: Table) -> Column:
        name = table.required("column")
        return self.columns.get(name) or table.fail("column", f"no column '{name}' in columns")

    def input(self, table: Table) -> str:
        name = table.text("input")
        return name if not name or name in self.inputs else table.fail("input", f"no input '{name}'")

    def system(self, table: Table, key: str = "system") -> str:
        name = table.text(key)
        return name if not name or name in self.systems else table.fail(key, f"no system '{name}'")


def _read_published(table: Table, known: _Known) -> Published:
    value = table.take("value", "a number or a text", int, float, str)
    if value is not None and not isinstance(value, str):
        value = table.finite("value", value)
    published = Published(
        input=known.input(table),
        system=known.system(table),
        column=known.column(table),
        value=table.fail("value", "is missing") if value is None else value,
        note=table.text("note"),
    )
    table.finish()
    return published


def _read_aim(table: Table, known: _Known) -> Aim:
    aim = Aim(
        input=known.input(table),
        system=known.system(table),
        column=known.column(table),
        relative_to=known.system(table, "relative_to"),
        at_least=table.number("at_least"),
        at_most=table.number("at_most"),
    )
    if aim.at_least is None and aim.at_most is None:
        table.fail("at_least", "neither at_least nor at_most is there")
    table.finish()
    return aim


def _expect_cost(root: Table, experiment: Experiment) -> None:
    for i in experiment.inputs:
        for column in experiment.columns:
            if column.origin == "modelled" and i.cost is None:
                root.fail("columns", f"'{column.name}' needs cluster and model of input '{i.label}'")
        for system in experiment.systems:
            if system.simulates and i.cost is None:
                root.fail("system", f"'{system.label}' needs cluster and model of input '{i.label}'")

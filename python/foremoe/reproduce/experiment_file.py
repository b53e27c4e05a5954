"""Experiments as TOML files; lab/experiments/README.md lists the keys.

[every_input] and [every_system] hold for each input and system that can use a key and does not set its own. A list in
place of one value makes one input (or system) of each of its values, and {key} in the label becomes that key's value.
Only a list of dispatches stays with one input.
What is wrong is an InputError with file and key, such as "mine.toml: system[1].stages: …", where system[1] is the
second one once lists are multiplied out.
"""

from __future__ import annotations

import os
import pathlib
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from .. import _core
from .._errors import InputError
from .columns import COLUMNS, DISPATCHES, OVER_STEPS, Column, Heading
from .experiment import Aim, Experiment, Input, Published, System
from .experiment_checks import check_input, check_system, check_together
from .finding import expect_known_cells
from .forecast import FORECASTS
from .toml_table import Options, Table

FOLDER = pathlib.Path(__file__).with_name("experiments")  # of the installed package: lab/experiments/*.toml

_TABLES = {name: {option["name"] for option in table} for name, table in _core._option_tables().items()}
_DRAWN = _TABLES["synthesis"] - {"shape"}  # which is `model` here
_BATCHED = {"ranks", "ranks_per_node", "tokens_per_rank"}  # keywords of collect()
_COST = (_TABLES["cost"] - {"cluster", "model", "keep_activations", "dispatch"}) | {
    "rollout_seconds",
    "rollout_tail_seconds",
}
_PLANNED = _TABLES["planning"] | {"path"}
_OTHER_ROUTES = {"wrong_percent", "missing_percent"}
_BY_STEPS = {"hottest", "step_change", "micro_step_change", "forecast_error"}  # columns that tell steps apart

_PROSE = ("title", "source", "about", "reading")
_TABLES_OF_ROOT = {"shape", "input", "every_input", "system", "every_system", "published", "aim"}
_OF_ROOT = {*_PROSE, "finding", "secondary", "across", "columns", *_TABLES_OF_ROOT}
_OF_INPUT = (
    {
        "label",
        "file",
        "model",
        "cluster",
        "recompute_activations",
        "steps",
        "plan_each_step",
        "draws",
        "over_steps",
        "drift",
    }
    | {"former_step", "former_plan", "guest_slots", "dispatch", "trace"}
    | _OTHER_ROUTES
    | _DRAWN
    | _COST
)
_ARRANGED = {"ep_groups", "padded", "in_place"}  # with columns of OF_GROUPS alone
_FORECASTING = {"foremoe", "static"}  # policies that place by the loads that they are given
_OF_SYSTEM = (
    {"label", "policy", "foresight", "forecast", "warm"}
    | _ARRANGED
    | _PLANNED.union(*map(_core._own_options, _core.policies()))
)

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
    root.expect_known(_OF_ROOT)
    prose: dict[str, Any] = {key: root.required(key) for key in _PROSE}
    name = pathlib.Path(file).stem
    columns, shapes = _read_columns(root), _read_shapes(root)
    modelled = next((f"column '{c.name}'" for c in columns.values() if c.needs_model), "")
    used_by_system = partial(_used_by_system, modelled=bool(modelled))
    read_system = partial(_read_system, columns=columns)
    read_systems = _read_all(root.multiplied_out("system", _OF_SYSTEM, used_by_system), read_system)
    systems = _by_label(read_systems)
    modelled = modelled or next((f"system '{s.label}'" for s in systems.values() if _plans_by_time(s.options)), "")
    by_dispatch = any(column.depends_on_dispatch for column in columns.values()) or any(
        system.options.get("residency") == "auto" for system in systems.values()
    )
    used_by_input = partial(_used_by_input, columns=columns, modelled=modelled, by_dispatch=by_dispatch)
    read_input = partial(_read_input, shapes=shapes, columns=columns, modelled=modelled, by_dispatch=by_dispatch)
    read_inputs = _read_all(root.multiplied_out("input", _OF_INPUT, used_by_input, lists={"dispatch"}), read_input)
    inputs = _by_label(read_inputs)
    check_together(read_inputs, read_systems)
    headings = _headings(columns, inputs)
    finding = root.text("finding")
    expect_known_cells(root, finding, headings, inputs, systems)
    of_whom = partial(_of_whom, columns=columns, inputs=inputs, systems=systems)
    return Experiment(
        **prose,
        name=name,
        file=file,
        argument=name if own else file,
        secondary=root.truth("secondary"),
        finding=finding,
        across=root.truth("across"),
        columns=tuple(columns.values()),
        headings=headings,
        inputs=tuple(inputs.values()),
        systems=tuple(systems.values()),
        published=tuple(_read_published(table, of_whom) for table in root.tables("published")),
        aims=tuple(_read_aim(table, of_whom, systems) for table in root.tables("aim")),
    )


def _text_of(path: pathlib.Path) -> str:
    if path.is_dir():
        raise InputError(f"{path}: is a folder", file=str(path))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read", file=str(path)) from error


def _read_all(tables: Iterable[Table], read: Callable[[Table], Labelled]) -> dict[Table, Labelled]:
    """By the tables that they are from, whose labels differ."""
    items: dict[Table, Labelled] = {}
    for table in tables:
        item = read(table)
        if any(item.label == other.label for other in items.values()):
            table.fail("label", f"'{item.label}' twice")
        items[table] = item
    return items


def _by_label(items: Mapping[Table, Labelled]) -> dict[str, Labelled]:
    return {item.label: item for item in items.values()}


def _read_columns(root: Table) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for i, name in enumerate(root.take("columns", "a list of texts", list) or root.fail("columns", "is missing")):
        if not isinstance(name, str):
            root.fail(f"columns[{i}]", "expected a text")
        if name not in COLUMNS:
            root.fail(f"columns[{i}]", f"no column '{name}'; there are {', '.join(COLUMNS)}")
        if name in columns:
            root.fail(f"columns[{i}]", f"'{name}' twice")
        columns[name] = COLUMNS[name]
    return columns


def _read_shapes(root: Table) -> dict[str, dict[str, Any]]:
    """[shape], or [[shape]]: models that are none of the presets, by their names."""
    several = isinstance(root.rest.get("shape"), list)
    shapes: dict[str, dict[str, Any]] = {}
    for table in root.tables("shape") if several else [root.table("shape")]:
        if not (shape := dict(table.rest)):
            continue
        if (name := table.required("name")) in shapes:
            table.fail("name", f"'{name}' twice")
        try:
            _core._check_evaluation({"model": shape})
        except InputError as error:
            key = error.index.strip("[']")  # model['hidden']
            (table if key else root).fail(key or "shape", error.problem)
        shapes[name] = shape
    return shapes


def _plans_by_time(options: Options) -> bool:
    """Whether planning itself needs a cluster and a model."""
    return options.get("residency") == "auto" or options.get("max_copies_per_rank") == "hidden"


def _used_by_system(table: Table, modelled: bool) -> tuple[set[str], str]:
    policy = table.required("policy")
    own = table.checked(_core._own_options, policy)
    used = {"label", "policy", "foresight", *_ARRANGED, *own, *_core._policy_uses(policy)}
    if modelled or _plans_by_time(table.rest):
        used.add("path")
    if policy in _FORECASTING:
        used.add("forecast")
    if "previous" in _core._policy_uses(policy):
        used.add("warm")
    return used, f"policy {policy}"


def _read_system(table: Table, columns: Collection[str]) -> System:
    label, policy, options = table.required("label"), table.required("policy"), table.options(_PLANNED)
    foresight, ep_groups = table.truth("foresight"), table.take("ep_groups", "an integer", int)
    padded, in_place = table.truth("padded"), table.truth("in_place")
    warm = table.truth("warm")
    forecast = table.name("forecast", FORECASTS, "forecast")
    if ep_groups is not None and ep_groups < 1:
        table.fail("ep_groups", f"{ep_groups}, expected 1 or more")
    table.checked(_core._check_evaluation, options)
    table.checked(partial(_core._own_options, policy), table.rest)
    system = System(
        label,
        policy,
        foresight,
        forecast,
        options,
        own=table.rest,
        ep_groups=ep_groups or 1,
        padded=padded,
        in_place=in_place,
        warm=warm,
    )
    check_system(table, system, columns)
    return system


def _headings(columns: Mapping[str, Column], inputs: Mapping[str, Input]) -> tuple[Heading, ...]:
    """Those of the table. Where one input has several dispatches, all have the same."""
    several = next((on.dispatches for on in inputs.values() if len(on.dispatches) > 1), ())
    return tuple(
        Heading(column, dispatch)
        for column in columns.values()
        for dispatch in (several if several and column.depends_on_dispatch else ("",))
    )


def _used_by_input(table: Table, columns: Collection[str], modelled: str, by_dispatch: bool) -> tuple[set[str], str]:
    used = {"label", "file", "guest_slots"} | _OTHER_ROUTES
    if modelled:
        used |= {"cluster", "model", "recompute_activations"} | _COST | ({"dispatch"} if by_dispatch else set())
    if table.text("file"):
        return used | _BATCHED, "file"
    by_steps = not _BY_STEPS.isdisjoint(columns)
    if each := table.truth("plan_each_step"):
        used.add("over_steps")
    if by_steps or each:
        used |= {"steps", "drift"}
    if table.truth("former_step"):
        used.add("former_plan")
    elif not by_steps and _OTHER_ROUTES.isdisjoint(table.rest):
        used.add("plan_each_step")
    routing = table.text("routing") or "grpo"
    table.checked(_core._check_synthesis, {"routing": routing})
    drawn = {key for key in _DRAWN if not _core._unused_of_synthesis({"routing": routing}, {key})}
    return used | drawn | {"model", "former_step", "draws", "trace"}, f"routing {routing}"


def _read_input(
    table: Table, shapes: Mapping[str, dict[str, Any]], columns: Mapping[str, Column], modelled: str, by_dispatch: bool
) -> Input:
    label, file, cluster, name = table.required("label"), table.text("file"), _read_cluster(table), table.text("model")
    cost: dict[str, Any] = {"cluster": cluster} if cluster else {}
    if modelled and not cluster:
        table.fail("cluster", f"is missing: {modelled} needs cluster and model")
    table.checked(_core._check_evaluation, cost)
    if cluster and not name:
        table.fail("model", "is missing beside cluster")
    if name:
        cost["model"] = shapes.get(name, name)
    model = table.checked(_core._check_evaluation, cost)
    if cluster:
        cost["keep_activations"] = not table.truth("recompute_activations", default=True)
        cost |= table.options(_COST)
        table.checked(_core._check_evaluation, cost)
    dispatches = _read_dispatches(table) if by_dispatch else ()
    trace = table.truth("trace")
    former_step, former_plan = table.truth("former_step"), table.truth("former_plan")
    steps, draws = (table.take(key, "an integer", int) for key in ("steps", "draws"))
    if draws is not None and not 1 <= draws <= 1000:
        table.fail("draws", f"{draws}, expected 1 … 1000")
    drift = table.number("drift")
    if drift is not None and not 0 <= drift <= 1:
        table.fail("drift", f"{drift:g}, expected 0 … 1")
    planned = table.options({"guest_slots"})
    table.checked(_core._check_evaluation, planned)
    wrong, missing = (_read_percent(table, key) for key in ("wrong_percent", "missing_percent"))
    load = table.options(_BATCHED if file else _DRAWN)
    if model and not file:
        load = {"layers": model["moe_layers"], "experts": model["experts"], "top_k": model["top_k"], **load}
    sizes = table.checked(_core._check_synthesis, load)
    if not file:
        load["micro_steps"] = sizes["micro_steps"]
        if sizes["experts"] % sizes["ranks"] != 0:
            table.fail("ranks", f"{sizes['ranks']} do not divide {sizes['experts']} experts")
        if steps is not None and (steps < 1 or sizes["micro_steps"] % steps != 0):
            table.fail("steps", f"{steps} does not divide {sizes['micro_steps']} micro-steps")
        if cluster:
            _expect_fits(table, sizes, model)
    on = Input(
        label=label,
        file=file,
        load=load,
        trace=trace,
        former_step=former_step,
        former_plan=former_plan,
        steps=1 if steps is None else steps,
        plan_each_step=table.truth("plan_each_step"),
        over_steps=table.name("over_steps", OVER_STEPS, "statistic"),
        drift=drift or 0.0,
        wrong_percent=wrong,
        missing_percent=missing,
        cost=cost if cluster else None,
        dispatches=dispatches,
        planned=planned,
        draws=draws or 1,
    )
    check_input(table, on, columns)
    return on


def _read_cluster(table: Table) -> str | dict[str, Any]:
    """A name, or `like` one with other numbers, which _core knows by section.key. Empty where there is none."""
    given = table.take("cluster", "a text or a table", str, dict)
    if not isinstance(given, dict):
        return given or ""
    cluster: dict[str, Any] = {}
    for key, value in given.items():
        cluster |= {f"{key}.{name}": v for name, v in value.items()} if isinstance(value, dict) else {key: value}
    try:
        _core._check_evaluation({"cluster": cluster})
    except InputError as error:
        key = error.index.strip("[']")  # cluster['network.bytes_per_second']
        table.fail(f"cluster.{key}", error.problem)
    return cluster


def _read_dispatches(table: Table) -> tuple[str, ...]:
    given = table.take("dispatch", "a text or a list of texts", str, list)
    names = given if isinstance(given, list) else [given or DISPATCHES[0]]
    if not names:
        table.fail("dispatch", "is empty")
    for i, name in enumerate(names):
        if name not in DISPATCHES:
            table.fail("dispatch", f"no dispatch '{name}'; there are {', '.join(DISPATCHES)}")
        if name in names[:i]:
            table.fail("dispatch", f"'{name}' twice")
    return tuple(names)


def _read_percent(table: Table, key: str) -> float | None:
    percent = table.number(key)
    if percent is not None and not 0 <= percent <= 100:
        table.fail(key, f"{percent:g}, expected 0 … 100")
    return percent


def _expect_fits(table: Table, sizes: Mapping[str, int], model: Mapping[str, Any]) -> None:
    """A load of fewer layers stands for all of the model."""
    if sizes["layers"] > model["moe_layers"]:
        table.fail("layers", f"{sizes['layers']}, but {model['name']} has {model['moe_layers']} MoE layers")
    for key in ("experts", "top_k"):
        if sizes[key] != model[key]:
            table.fail(key, f"{sizes[key]}, but {model['name']} has {model[key]}")


def _of_whom(
    table: Table, columns: Mapping[str, Column], inputs: Collection[str], systems: Collection[str]
) -> dict[str, Any]:
    """What a published figure, and an aim, is of."""
    column = table.name("column", columns, "column") or table.fail("column", "is missing")
    of = {key: table.name(key, known, key) for key, known in (("input", inputs), ("system", systems))}
    return {**of, "column": columns[column]}


def _read_published(table: Table, of_whom: Callable[[Table], dict[str, Any]]) -> Published:
    table.expect_known({"input", "system", "column", "value", "note"})
    value = table.take("value", "a number or a text", int, float, str)
    if value is None:
        table.fail("value", "is missing")
    return Published(
        **of_whom(table),
        value=value if isinstance(value, str) else table.finite("value", value),
        note=table.text("note"),
    )


def _read_aim(table: Table, of_whom: Callable[[Table], dict[str, Any]], systems: Collection[str]) -> Aim:
    bounds = ("at_least", "at_most")
    table.expect_known({"input", "system", "column", "relative_to", *bounds})
    if table.rest.keys().isdisjoint(bounds):
        table.fail("at_least", "neither at_least nor at_most is there")
    at_least, at_most = map(table.number, bounds)
    relative_to = table.name("relative_to", systems, "system")
    return Aim(**of_whom(table), relative_to=relative_to, at_least=at_least, at_most=at_most)

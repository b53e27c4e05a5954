"""What a key of an experiment needs of other keys. Messages name the table that has the key."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .columns import OF_GROUPS, Column
from .experiment import Input, System
from .forecast import OF_FORMER_STEP
from .toml_table import Table


def check_system(table: Table, system: System, columns: Collection[str]) -> None:
    """Keys of one system, and the columns."""
    _check_arrangement(table, system, columns)
    if system.warm and system.options.get("residency") == "shared":
        table.fail("warm", "has no effect under residency shared")
    if system.forecast:
        _check_forecast(table, system)


def _check_arrangement(table: Table, system: System, columns: Collection[str]) -> None:
    """`padded` and `in_place` exclude each other. With these or groups there is no foresight, forecast or warm start,
    and there are only the columns of OF_GROUPS.
    """
    if system.padded and system.in_place:
        table.fail("padded", "cannot be used beside in_place true")
    arrangements = {"padded": system.padded, "in_place": system.in_place, "ep_groups": system.ep_groups > 1}
    key = next((name for name, given in arrangements.items() if given), "")
    if not key:
        return
    value = system.ep_groups if key == "ep_groups" else "true"
    for name, given in (("foresight", system.foresight), ("forecast", system.forecast), ("warm", system.warm)):
        if given:
            table.fail(name, f"cannot be used beside {key} {value}")
    if other := next((name for name in columns if name not in OF_GROUPS), ""):
        table.fail(key, f"{value}, but column '{other}' is of one plan; of such systems are {', '.join(OF_GROUPS)}")


def _check_forecast(table: Table, system: System) -> None:
    if system.foresight:
        table.fail("forecast", "cannot be used beside foresight")
    if system.options.get("in_flight", 1) != 1:
        table.fail("forecast", "cannot be used with several micro-steps in flight")
    if "prefer" in system.options or "T" not in system.options.get("stages", "T"):
        name = "prefer" if "prefer" in system.options else "stages"
        table.fail("forecast", f"cannot be used beside {name} {system.options[name]}, which splits tokens otherwise")
    if system.forecast == "average" and system.options.get("residency") != "shared":
        table.fail("forecast", "average needs residency shared: others place by averages of later micro-steps too")


def check_input(table: Table, on: Input, columns: Mapping[str, Column]) -> None:
    """Keys of one input, and the columns."""
    of_counts = {
        "former_step": on.former_step,
        "plan_each_step": on.plan_each_step,
        "drift": on.drift,
        "missing_percent": on.missing_percent is not None,
        "wrong_percent": on.wrong_percent is not None,
    }
    if on.trace and (key := next((key for key, given in of_counts.items() if given), "")):
        table.fail("trace", f"cannot be used beside {key}, which keeps counts alone")
    if on.drift and on.steps == 1:
        table.fail("drift", "has no effect with one step")
    if on.drift and on.former_step:
        table.fail("drift", "cannot be used beside former_step")
    own_routes = next((name for name, column in columns.items() if column.needs_own_routes), "")
    if own_routes and on.has_other_routes:
        key = "wrong_percent" if on.wrong_percent is not None else "missing_percent"
        table.fail(key, f"column '{own_routes}' is of a plan on the routes by which it was made")


def check_together(inputs: Mapping[Table, Input], systems: Mapping[Table, System]) -> None:
    """Keys of inputs and systems together."""
    several = next((on.dispatches for on in inputs.values() if len(on.dispatches) > 1), ())
    for table, on in inputs.items():
        if several and on.dispatches != several:
            table.fail("dispatch", f"expected {list(several)}, as another input has")
    other_routes = any(on.has_other_routes for on in inputs.values())
    for table, system in systems.items():
        if several and system.options.get("residency") == "auto":
            table.fail("residency", "auto chooses by modelled seconds, and inputs have several dispatches")
        if system.forecast in OF_FORMER_STEP and not all(on.former_step for on in inputs.values()):
            table.fail("forecast", f"{system.forecast} needs former_step on every input")
        if system.forecast and other_routes:
            table.fail("forecast", "cannot be used beside wrong_percent and missing_percent")
        if system.warm and not all(on.plan_each_step for on in inputs.values()):
            table.fail("warm", "has no effect where steps are not planned one by one")
        if system.foresight and not other_routes:
            table.fail("foresight", "has no effect where no input has wrong_percent or missing_percent")

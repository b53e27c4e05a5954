"""Tables of a TOML file, read key by key: what is wrong is an InputError that names file, place and key."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypeVar

from .._errors import InputError

Options = Mapping[str, Any]
T = TypeVar("T")

NO_USE = "no such key, or none of use here"


def plain(value: float | str) -> str:
    """A number with as many digits as it takes: 51.0 is 51."""
    return str(value).removesuffix(".0")


def problem_of(error: InputError) -> str:
    """What the error says, less the argument that it names."""
    return str(error).removeprefix(f"{error.field}{error.index}: ")


class Table:
    """A table of the file that knows where it stands. Keys leave it as they are read; none must be left."""

    def __init__(self, values: Options, file: str, place: str = "") -> None:
        self.rest = dict(values)
        self.file = file
        self.place = place

    def fail(self, key: str, what: str) -> NoReturn:
        field = f"{self.place}.{key}" if self.place else key
        raise InputError(f"{self.file}: {field}: {what}", file=self.file, field=field)

    def finish(self, but: Collection[str] = ()) -> None:
        """No key must be left, but those that are still to be read."""
        for key in self.rest:
            if key not in but:
                self.fail(key, NO_USE)

    def take(self, key: str, what: str, *types: type) -> Any:
        """None where there is none. A truth value is no number."""
        value = self.rest.pop(key, None)
        if value is not None and type(value) not in types:
            self.fail(key, f"expected {what}")
        return value

    def text(self, key: str) -> str:
        return self.take(key, "a text", str) or ""

    def required(self, key: str) -> str:
        return self.text(key) or self.fail(key, "is missing")

    def truth(self, key: str, default: bool = False) -> bool:
        value = self.take(key, "true or false", bool)
        return default if value is None else bool(value)

    def number(self, key: str) -> float | None:
        value = self.take(key, "a number", int, float)
        return None if value is None else self.finite(key, value)

    def finite(self, key: str, value: float) -> float:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        return number if math.isfinite(number) else self.fail(key, f"{number}, expected a number")

    def options(self, keys: set[str]) -> dict[str, Any]:
        """Those of the keys that are there, for _core to check."""
        return {key: self.rest.pop(key) for key in list(self.rest) if key in keys}

    def checked(self, check: Callable[[T], Any], options: T) -> Any:
        """What `check` returns for the options. An option that cannot be is a key that cannot be."""
        try:
            return check(options)
        except InputError as error:
            self.fail("model" if error.field == "shape" else error.field, problem_of(error))

    def tables(self, key: str) -> list[Table]:
        given = self.take(key, f"tables, [[{key}]]", list) or []
        if not all(isinstance(table, dict) for table in given):
            self.fail(key, f"expected tables, [[{key}]]")
        return [Table(table, self.file, f"{key}[{i}]") for i, table in enumerate(given)]

    def multiplied_out(self, key: str, keys_of: Callable[[Options], set[str]]) -> list[Table]:
        """The tables that [[key]] stands for: what all have in common put in where it is of use, one for each value of
        a list. keys_of: those that a table can use.
        """
        every = f"every_{key}"
        common = self.take(every, f"a table, [{every}]", dict) or {}
        unused = dict.fromkeys(common)
        made: list[Table] = []
        for given in self.tables(key):
            for values in Table({**common, **given.rest}, self.file, f"{key}[{len(made)}]").without_list():
                usable = keys_of(values)
                for name in usable:
                    unused.pop(name, None)
                kept = {name: value for name, value in values.items() if name in usable or name in given.rest}
                made.append(Table(kept, self.file, f"{key}[{len(made)}]"))
        if not made:
            self.fail(key, "is missing")
        for name in unused:
            self.fail(f"{every}.{name}", NO_USE)
        return made

    def without_list(self) -> list[dict[str, Any]]:
        lists = [key for key, value in self.rest.items() if isinstance(value, list)]
        if not lists:
            return [self.rest]
        if len(lists) > 1:
            self.fail(lists[1], f"is a list, and so is {lists[0]}; expected one list in a table")
        (key,) = lists
        tables = [{**self.rest, key: value} for value in self.rest[key]]
        for table in tables:
            if isinstance(label := table.get("label"), str):
                table["label"] = label.replace(f"{{{key}}}", plain(table[key]))
        return tables

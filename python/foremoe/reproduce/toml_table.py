"""Tables of a TOML file, read key by key: what is wrong is an InputError that names file, place and key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from .._errors import InputError

Options = Mapping[str, Any]
T = TypeVar("T")


def plain(value: float | str) -> str:
    """A number with as many digits as it takes: 51.0 is 51."""
    return str(value).removesuffix(".0")


class Table:
    """A table of the file that knows where it stands. Keys leave it as they are read; none must be left.

    shared: keys whose values stand in another table of that place, for all of this kind.
    """

    def __init__(self, values: Options, file: str, place: str = "", shared: tuple[str, Collection[str]] = ("", ())):
        self.rest = dict(values)
        self.file = file
        self.place = place
        self.shared = shared

    def fail(self, key: str, what: str) -> NoReturn:
        place = self.shared[0] if key.split(".")[0] in self.shared[1] else self.place
        field = f"{place}.{key}" if place else key
        raise InputError(f"{self.file}: {field}: {what}", file=self.file, field=field)

    def expect_known(self, known: Collection[str]) -> None:
        for key in self.rest:
            if key not in known:
                self.fail(key, "no such key")

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

    def name(self, key: str, known: Collection[str], what: str) -> str:
        """One of those that are known; empty where there is none."""
        name = self.text(key)
        return name if not name or name in known else self.fail(key, f"no {what} '{name}'")

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

    def options(self, keys: Collection[str]) -> dict[str, Any]:
        """Those of the keys that are there, for _core to check."""
        return {key: self.rest.pop(key) for key in list(self.rest) if key in keys}

    def checked(self, check: Callable[[T], Any], options: T) -> Any:
        """What `check` returns for the options. An option that cannot be is a key that cannot be."""
        try:
            return check(options)
        except InputError as error:
            self.fail(error.field, str(error).removeprefix(f"{error.field}{error.index}: "))

    def table(self, key: str) -> Table:
        return Table(self.take(key, f"a table, [{key}]", dict) or {}, self.file, key)

    def tables(self, key: str) -> list[Table]:
        given = self.take(key, f"tables, [[{key}]]", list) or []
        if not all(isinstance(table, dict) for table in given):
            self.fail(key, f"expected tables, [[{key}]]")
        return [Table(table, self.file, f"{key}[{i}]") for i, table in enumerate(given)]

    def multiplied_out(
        self,
        key: str,
        known: Collection[str],
        used_by: Callable[[Table], tuple[Collection[str], str]],
        lists: Collection[str] = (),
    ) -> Iterator[Table]:
        """The tables that [[key]] stands for: what all have in common put in where it is of use, one for each value of
        a list, {name} in a label replaced by the value of that key. known: keys of any table. used_by: those that have
        an effect in one, and what keeps others from having one. lists: keys whose lists are values, and stay.
        """
        common = self.table(f"every_{key}")
        common.expect_known(known)
        unused = list(common.rest)
        number = 0
        for given in self.tables(key):
            shared = (common.place, common.rest.keys() - given.rest.keys())
            both = Table({**common.rest, **given.rest}, self.file, f"{key}[{number}]", shared)
            for values in both.without_list(lists):
                place = (self.file, f"{key}[{number}]", shared)
                Table(given.rest, *place).expect_known(known)
                used, beside = used_by(Table(values, *place))
                for name in given.rest:
                    if name not in used:
                        Table({}, *place).fail(name, f"has no effect on these columns with {beside}")
                unused = [name for name in unused if name not in used]
                yield Table({name: value for name, value in values.items() if name in used}, *place).with_label()
                number += 1
        if number == 0:
            self.fail(key, "is missing")
        for name in unused:
            common.fail(name, f"has no effect on any {key}")

    def without_list(self, kept: Collection[str] = ()) -> list[dict[str, Any]]:
        lists = [key for key, value in self.rest.items() if isinstance(value, list) and key not in kept]
        if not lists:
            return [self.rest]
        if len(lists) > 1:
            self.fail(lists[1], f"is a list, and so is {lists[0]}; expected one list in a table")
        return [{**self.rest, lists[0]: value} for value in self.rest[lists[0]] or self.fail(lists[0], "is empty")]

    def with_label(self) -> Table:
        def value_of(name: re.Match[str]) -> str:
            if name[1] not in self.rest:
                self.fail("label", f"{name[0]} is no key of this table")
            if isinstance(self.rest[name[1]], list):
                self.fail("label", f"{name[0]} is a list")
            return plain(self.rest[name[1]])

        if isinstance(label := self.rest.get("label"), str):
            self.rest["label"] = re.sub(r"{([^{}]*)}", value_of, label)
        return self

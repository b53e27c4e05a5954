"""Reads the commands of a shell script without running any of them.

Follows assignments, arrays, defaults such as ${X:-y}, conditions on known values, and files that the script sources.
Every other expansion, such as $(date) or an unset variable, stays in the text between two UNRESOLVED characters.
"""

from __future__ import annotations

import fnmatch
import operator
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .rules import plain

UNRESOLVED = "\0"
_MOST_FILES = 20  # that scripts source
_SCRIPT_FOLDER = re.compile(r"dirname\W+(?:\w+\W+)?(?:BASH_SOURCE|0)\b(?:\[0\])?[\"'}]*\)?[\"']?((?:/[\w.-]+)*)")
_COMPARED = {
    "=": operator.eq, "==": operator.eq, "-eq": operator.eq, "!=": operator.ne, "-ne": operator.ne, "-gt": operator.gt,
    "-ge": operator.ge, "-lt": operator.lt, "-le": operator.le,
}  # fmt: skip
_DEFAULT = re.compile(r"\$\{(\w+|[@*])(?:\[[@*0]\])?(:?[-=+])")

Value = str | list[str]


def mark(text: str) -> str:
    """Returns text that stands for a value that only the shell knows."""
    return f"{UNRESOLVED}{text.replace(UNRESOLVED, '')}{UNRESOLVED}"


class Script:
    """The commands of a script, in order.

    Attributes:
        commands: Words of each command that may run, expanded, after variables of its own (NAME=value).
        environment: Names of variables that are set for certain.
    """

    def __init__(self, path: pathlib.Path, given: Mapping[str, str]) -> None:
        """given: Variables of the environment. Raises ImportError, which says what to install."""
        try:
            import tree_sitter
            import tree_sitter_bash
        except ImportError as error:
            raise ImportError(
                f"reading shell scripts needs `pip install tree-sitter tree-sitter-bash`: {error}"
            ) from error
        self.commands: list[list[str]] = []
        self.environment: set[str] = set()
        self._parser: Any = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
        self._variables: dict[str, Value] = {**given, "@": [], "*": []}
        self._files = 0
        self._read(path)

    def variable(self, name: str) -> str | None:
        """Returns the last value of a variable; None if it has none."""
        value = self._variables.get(name)
        return value if isinstance(value, str) else None

    def _read(self, path: pathlib.Path) -> None:
        self._files += 1
        self._path = path
        self._run(self._parser.parse(path.read_bytes()).root_node, True)

    def _run(self, node: Any, certain: bool) -> None:
        """Follows a statement. certain: It runs; else it may run."""
        children = node.named_children
        match node.type:
            case "variable_assignment":
                self._assign(node, certain)
            case "command":
                self._command(children)
            case "if_statement":
                self._branch(children, certain)
            case "list":
                runs = self._test(children[0])
                self._run(children[0], certain)
                if runs is None or runs == (node.children[1].type == "&&"):
                    self._run(children[1], certain and runs is not None)
            case "case_statement" if UNRESOLVED not in (word := "".join(self._of(children[0], True))):
                self._case(word, children[1:], certain)
            case "for_statement" | "while_statement" | "case_statement" | "c_style_for_statement":
                for child in children:
                    if child.type == "variable_name":
                        self._variables[_text(child)] = mark(f"${_text(child)}")
                    self._run(child, False)
            case _:
                for child in children:
                    self._run(child, certain)

    def _command(self, children: list[Any]) -> None:
        own = [child for child in children if child.type == "variable_assignment"]
        self.environment |= {_text(child.children[0]) for child in own}
        words = [word for child in children if child not in own for word in self._of(child)]
        if words[:1] in (["source"], ["."]) and len(words) > 1:
            self._source(words[1])
        elif words:
            self.commands.append([*(f"{_text(of.children[0])}={self._assigned(of)}" for of in own), *words])

    def _case(self, word: str, items: list[Any], certain: bool) -> None:
        """Follows the first item of a case statement that matches the word."""
        for item in items:
            values = item.children_by_field_name("value")
            if any(fnmatch.fnmatchcase(word, "".join(self._of(value, True))) for value in values):
                self._run(item, certain)
                return

    def _branch(self, children: list[Any], certain: bool) -> None:
        runs = self._test(children[0])
        for child in children[1:]:
            if child.type in ("elif_clause", "else_clause"):
                if runs is True:
                    return
                certain = certain and runs is False
                if child.type == "elif_clause":
                    self._branch(child.named_children, certain)
                    runs = self._test(child.named_children[0])
                else:
                    self._run(child, certain)
            elif runs is not False:
                self._run(child, certain and runs is True)

    def _test(self, node: Any) -> bool | None:
        """Returns the result of a condition; None if it is unknown."""
        if node.type == "list" and node.children[1].type == "&&":
            return self._test(node.children[0])
        inner = node.named_children[0] if node.type == "test_command" and node.named_children else None
        if inner is None or inner.type not in ("unary_expression", "binary_expression"):
            return None
        words = [_text(of) if not of.is_named or of.type == "test_operator" else "".join(self._of(of, True)) for of in
                 inner.children]  # fmt: skip
        if any(UNRESOLVED in word for word in words):
            return None
        match words:
            case ["-z", word]:
                return not word
            case ["-n", word]:
                return bool(word)
            case [left, comparison, right] if comparison in _COMPARED:
                return bool(_COMPARED[comparison](plain(left), plain(right)))
        return None

    def _assign(self, node: Any, certain: bool) -> None:
        name, equals, *_ = node.children
        value = self._assigned(node)
        old = self._variables.get(_text(name), "")
        if equals.type == "+=":
            value = [*old, *value] if isinstance(old, list) and isinstance(value, list) else f"{old}{value}"
        if not certain and value != old:
            value = mark(f"${_text(name)}") if isinstance(value, str) else [*value, mark(f"${_text(name)}")]
        self._variables[_text(name)] = value
        self.environment |= {_text(name)} if certain else set()

    def _assigned(self, node: Any) -> Value:
        """Returns the value that an assignment has on its right."""
        values = node.children[2:]
        fields = self._of(values[0], True) if values else []
        return fields if values and values[0].type == "array" else " ".join(fields)

    def _source(self, name: str) -> None:
        """Follows a file: at its path or, since repositories move, at the end of its path near the script."""
        parts = pathlib.PurePath(name.rpartition(UNRESOLVED)[2].lstrip("/")).parts
        folders = self._path.resolve().parents[:6]
        likely = [pathlib.Path(name), *(of.joinpath(*parts[i:]) for i in range(len(parts)) for of in folders)]
        found = next((of for of in likely if UNRESOLVED not in str(of) and of.is_file()), None)
        if found is None or self._files > _MOST_FILES:
            self.commands.append(["source", mark(name)])
            return
        own = self._path
        self._read(found)
        self._path = own

    def _of(self, node: Any, quoted: bool = False) -> list[str]:
        """Returns the words that a word becomes."""
        text = _text(node)
        match node.type:
            case "raw_string":
                return [text[1:-1]]
            case "array":
                return [word for child in node.named_children if child.type != "comment" for word in self._of(child)]
            case "simple_expansion" | "expansion":
                value = self._value(node)
                return value if isinstance(value, list) else [value] if quoted else value.split() or []
            case "command_substitution":
                folder = _SCRIPT_FOLDER.search(text)
                return [str(self._path.resolve().parent) + folder[1] if folder else mark(text)]
            case "arithmetic_expansion":
                return [mark(text)]
            case "string" | "concatenation" | "command_name":
                cut = node.type == "string"
                return self._join(node, node.start_byte + cut, node.end_byte - cut, quoted or cut)
        return [re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)]

    def _join(self, node: Any, begin: int, end: int, quoted: bool) -> list[str]:
        """Joins the parts of a word and the text between them, which has no nodes."""
        words = [""]
        for part in _parts(node, begin, end):
            first, *rest = [part] if isinstance(part, str) else self._of(part, quoted) or [""]
            words = [*words[:-1], words[-1] + first, *rest]
        return words if words != [""] or (quoted and not self._is_list(node)) else []

    def _is_list(self, node: Any) -> bool:
        return any(of.type.endswith("expansion") and isinstance(self._value(of), list) for of in node.named_children)

    def _value(self, node: Any) -> Value:
        """Returns the value of $name or ${…}."""
        text = _text(node)
        found = _DEFAULT.match(text)
        name = found[1] if found else text.strip("${}").removesuffix("[@]").removesuffix("[*]")
        value = self._variables.get(name)
        if name in ("BASH_SOURCE[0]", "0"):
            return str(self._path)
        if isinstance(value, list) and name not in "@*" and "[@]" not in text and "[*]" not in text:
            value = value[0] if value else ""
        if found:
            is_set = value is not None and (value != "" or found[2][0] != ":")
            if is_set == (found[2][-1] == "+"):
                begin = node.start_byte + found.end()
                value = "" if not is_set and found[2][-1] == "+" else (
                    " ".join(self._join(node, begin, node.end_byte - 1, True)))  # fmt: skip
                if found[2][-1] == "=":
                    self._variables[name] = value
            elif not is_set:
                value = ""
        return mark(text) if value is None else value


def _text(node: Any) -> str:
    return str(node.text.decode("utf-8", "replace"))


def _parts(node: Any, begin: int, end: int) -> Iterator[Any]:
    """Yields the named children of a node between two offsets, and the text between them."""

    def text(start: int, stop: int) -> str:
        between = node.text[start - node.start_byte : stop - node.start_byte].decode("utf-8", "replace")
        return mark(between) if "$" in between else str(between)

    for child in node.named_children:
        inside = [child] if child.end_byte <= end else child.named_children  # the grammar takes } as part of a default
        for part in inside:
            if begin <= part.start_byte and part.end_byte <= end:
                yield text(begin, part.start_byte)
                yield part
                begin = part.end_byte
    yield text(begin, end)

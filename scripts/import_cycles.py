"""Rule for check_house.py: imports between files of the Python package have no cycles."""

import ast

PACKAGE = "python/foremoe"


def python_file(tree, name):
    """Returns the file of a dotted name, or of the module that defines it; None for names outside the package."""
    parts = name.split(".")
    if parts[:2] == ["foremoe", "_core"]:  # the extension module
        return None
    while parts and parts[0] == "foremoe":
        stem = "/".join([PACKAGE, *parts[1:]])
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if path in tree:
                return path
        parts.pop()
    return None


def imported_files(tree, path):
    """Returns {imported file of the package: line}, including imports under TYPE_CHECKING and inside functions. An
    import of a submodule does not count as an import of its parent packages."""
    folder = path.removeprefix("python/").rsplit("/", 1)[0].split("/")
    found = {}
    for node in ast.walk(ast.parse(tree[path])):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            file = python_file(tree, name)
            if file and file != path:
                found.setdefault(file, node.lineno)
    return found


def strongly_connected(graph):
    """Returns the strongly connected components with more than one node. graph: {node: successors}."""
    reached = {}
    for start in graph:
        seen, todo = set(), [start]
        while todo:
            for node in graph.get(todo.pop(), ()):
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
        reached[start] = seen
    groups = {frozenset(b for b in reached[a] if a in reached.get(b, ())) for a in graph if a in reached[a]}
    return sorted((group for group in groups if len(group) > 1), key=min)


def nothing_imports_back(tree):
    """Imports between files of the Python package have no cycles, direct or indirect."""
    files = [path for path in tree if path.startswith(f"{PACKAGE}/") and path.endswith(".py")]
    graph = {path: imported_files(tree, path) for path in files}
    for group in strongly_connected(graph):
        for path in sorted(group):
            to = min(file for file in graph[path] if file in group)
            yield path, graph[path][to], f"imports {to}, which imports it back"


# A tree in which each file breaks the rule.
BROKEN = {
    "python/foremoe/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from foremoe.c import C\n",
    "python/foremoe/b/__init__.py": "from .. import a\n",
    "python/foremoe/c.py": "def f():\n    from . import b\n",
    "python/foremoe/d.py": "import foremoe.e\n",
    "python/foremoe/e.py": "from .d import D\n",
}
# Edge cases that obey the rule.
CLEAN = {
    "python/foremoe/__init__.py": "from .first import plan\n",
    "python/foremoe/first.py": "from foremoe._core import Plan\nfrom . import _core\n",
    "python/foremoe/front/__init__.py": "from .last import Last\n",
    "python/foremoe/front/last.py": "import foremoe\nfrom .. import first\nfrom foremoe.front.inner import Inner\n",
    "python/foremoe/front/inner.py": "import foremoe.first\n",
}

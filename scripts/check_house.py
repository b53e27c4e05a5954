#!/usr/bin/env python3
"""Checks repository rules that a compiler does not check. `--self-test` shows that each rule can fail. `--count` prints
lines and files of C++.

A rule is a function from a tree, {path: text}, to findings, [(path, line number, problem)]. Pages document the rules:
docs/developers/architecture.md (permitted includes) and docs/developers/contributing.md (all others).
"""

import re
import sys
from pathlib import Path

import import_cycles

# Folders of src/foremoe that each folder may include: the transitive closure of the arrows in
# docs/developers/architecture.md.
SEES = {
    "core": set(),
    "cluster": {"core"},
    "rollout": {"core", "cluster"},
    "plan": {"core", "cluster", "rollout"},
    "planner": {"core", "cluster", "rollout", "plan"},
    "homes": {"core", "cluster", "rollout", "plan", "planner"},
    "policy": {"core", "cluster", "rollout", "plan", "planner"},
    "transfer": {"core", "cluster", "rollout", "plan"},
    "runtime": {"core", "cluster", "rollout", "plan", "transfer"},
    "reference": {"core", "cluster", "rollout", "plan", "transfer", "runtime"},
    "calibration": {"core", "cluster", "rollout", "plan", "transfer", "runtime"},
    "sim": {"core", "cluster", "rollout", "plan", "transfer"},
    "evaluate": {"core", "cluster", "rollout", "plan", "planner", "policy", "transfer", "sim"},
}
SEES["testing"] = {*SEES}  # included only by tests and benchmarks
TESTS_SEE = {"runtime": {"reference"}, "sim": {"policy"}}  # tests may also include what they compare or simulate
CODE = (".h", ".cpp", ".py", ".cmake", ".sh")
CPP = (".h", ".cpp")
VAGUE = r"utils?|helpers?|common|misc|mgr|managers?"

INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]foremoe/(\w+)/')


def lines(tree, pattern, where):
    """Yields (path, line number, match) for each match in the files that `where` accepts."""
    regex = re.compile(pattern) if isinstance(pattern, str) else pattern
    for path, text in tree.items():
        if where(path):
            for number, line in enumerate(text.splitlines(), 1):
                for match in regex.finditer(line):
                    yield path, number, match


def folder_of(path):
    """Returns the folder of src/foremoe that contains a path, or None."""
    parts = path.split("/")
    return parts[2] if parts[:2] == ["src", "foremoe"] and len(parts) > 3 else None


def includes_point_left(tree):
    """Files of a folder include only files of this folder and of its folders in SEES. In particular, planner and
    runtime do not include each other, and check_plan, in plan/, shares nothing with the planner. testing/ may include
    everything, and only tests include it. Tests of runtime/ may also include the reference."""
    of_tests = lambda here: {"testing", *TESTS_SEE.get(here, ())}
    for path, number, match in lines(tree, INCLUDE, lambda p: p.endswith(CPP) and folder_of(p)):
        here, there = folder_of(path), match[1]
        if here not in SEES:
            yield path, number, f"folder {here} is not in docs/developers/architecture.md"
        elif there != here and there not in SEES[here] | (of_tests(here) if path.endswith("_test.cpp") else set()):
            yield path, number, f"{here}/ must not include {there}/"


def libraries_know_no_program(tree):
    """Nothing in src/ includes from apps/, bench/, fuzz/ or python/."""
    pattern = r'#\s*include\s+"(?:\.\./)*(apps|bench|fuzz|python)/'
    for path, number, match in lines(tree, pattern, lambda p: p.startswith("src/") and p.endswith(CPP)):
        yield path, number, f"a library must not include {match[1]}/"


def mpi_stays_in_its_folder(tree):
    """MPI headers and conditions on MPI appear only in runtime/mpi. CUDA and NCCL appear nowhere: GPUs use PyTorch."""
    header = r"#\s*include\s+[<\"](cuda|cublas|cudnn|cuda_runtime|nvtx|nvtx3|nccl|mpi)[\w/]*\.(?:h|hpp|cuh)"
    condition = r"#\s*(?:el)?if(?:n?def)?\b.*(CUDA|NCCL|MPI)"
    for path, number, match in lines(tree, f"{header}|{condition}", lambda p: p.endswith(CPP)):
        word = (match[1] or match[2]).lower()
        if word != "mpi" or "/runtime/mpi/" not in f"/{path}":
            yield path, number, f"{word} outside runtime/mpi/"


def names_say_something(tree):
    """Names of files, folders, types and namespaces contain no vague words; see VAGUE."""
    for path in tree:
        for word in re.split(r"[/_.\-]", path.lower()):
            if re.fullmatch(VAGUE, word):
                yield path, 0, f"a name with '{word}'"
    camel = r"\w*(?:Utils?|Helpers?|Common|Misc|Mgr|Managers?)"
    pattern = rf"\b(?:namespace|class|struct|union|enum class|enum)\s+((?:\w*_)?(?:{VAGUE})(?:_\w*)?|{camel})\b"
    for path, number, match in lines(tree, pattern, lambda p: p.endswith(CPP)):
        yield path, number, f"'{match[1]}' says nothing about what it is"


def libraries_are_silent(tree):
    """Libraries never print and never end the process. Libraries return results and throw exceptions."""
    pattern = r"\bstd::(cout|cerr|clog|abort|terminate|exit|quick_exit)\b|\bfmt::(?:print)\b|\b(?:f?printf|puts|abort|_exit)\s*\("
    where = lambda p: p.startswith("src/") and p.endswith(CPP) and not p.endswith("_test.cpp")
    for path, number, match in lines(tree, pattern, where):
        yield path, number, f"a library must not call {match[0].rstrip('( ')}"


def nothing_is_left_open(tree):
    """Code contains no markers of unfinished work; issues track future work."""
    pattern = r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b|(?i:\bnot (?:yet )?impl" r"emented\b)"
    for path, number, match in lines(tree, pattern, lambda p: p.endswith((*CODE, ".txt"))):
        yield path, number, f"'{match[0]}' left in the code"


def merges_are_finished(tree):
    """Files contain no markers of conflicts that `git merge` wrote."""
    for path, number, match in lines(tree, r"^(?:<{7}|>{7})(?= )", lambda p: True):
        yield path, number, f"'{match[0]}' left by a merge"


def no_machine_is_named(tree):
    """Files contain no absolute paths of a machine and no package hosts, so that a clone works in any folder."""
    path_of_a_machine = r"(?<![\w.$}~)*:/-])/(?:home|root|mnt|srv|tmp|work|farm|opt|var/tmp|Users)(?:/|\b)"
    host = r"\b(?:deb\.debian|security\.debian|snapshot\.debian|archive\.ubuntu|pypi|files\.pythonhosted)\.(?:org|com)\b"
    for path, number, match in lines(tree, f"{path_of_a_machine}|{host}", lambda p: True):
        yield path, number, f"'{match[0]}' names a machine"


def headers_are_guarded(tree):
    """Every header starts with #pragma once."""
    for path, text in tree.items():
        if path.endswith(".h") and not text.startswith("#pragma once\n"):
            yield path, 1, "must start with #pragma once"


def files_named_in_code_exist(tree):
    """C++ names only files of the repository that exist. In capitals, a name is a placeholder: data/clusters/NAME.toml."""
    pattern = r"(?<![\w./])(?:bench|cmake|data|docs|lab|python|scripts|src)/(?:\w+/)*(?![A-Z]+\.)[\w\-]+\.[a-z]+\b"
    for path, number, match in lines(tree, pattern, lambda p: p.endswith(CPP)):
        if match[0] not in tree:
            yield path, number, f"{match[0]} does not exist"


def scripts_spell_out_options_of_pip(tree):
    """Scripts write --config-settings, since pip 23.0.1 of Debian 12 does not know -C."""
    for path, number, match in lines(tree, r"(?<![\w-])-C\s?[\w.-]+=", lambda p: p.startswith("scripts/")):
        yield path, number, f"{match[0]} needs pip 23.1; write --config-settings"


INSTALL = "cmake/Install.cmake"


def installed_headers_are_complete(tree):
    """Headers that are installed exist, and include no header that is not installed."""
    installed = {f"src/foremoe/{name}" for name in re.findall(r"(?<!\S)[\w/]+\.h(?=[\s)])", tree.get(INSTALL, ""))}
    for path in sorted(installed - tree.keys()):
        yield INSTALL, 1, f"{path} does not exist"
    for path, number, match in lines(tree, r'^\s*#\s*include "(foremoe/[^"]+)"', installed.__contains__):
        if f"src/{match[1]}" not in installed:
            yield path, number, f"is installed, but {match[1]} is not: {INSTALL}"


MOST_ARGUMENTS = 5
# Existing exceptions. Do not add to this list.
MANY_ARGUMENTS_TODAY = {
    "adam", "attempt", "backward", "combine", "combine_backward", "experts_backward", "for_all_guests", "improve",
    "least_max_load", "refresh_arena", "relocate_experts", "router_backward", "router_forward", "router_pick",
    "simulated",
}
NOT_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)'(?:\\.|[^'\\\n])*'|^[ \t]*\#(?:\\\n|[^\n])*""",
    re.DOTALL | re.MULTILINE)
NAME_BEFORE = re.compile(r"(~?\w+|operator\s*\S{1,3}|\])\s*$")
NAMED_PARAMETER = re.compile(r"(?:[\w:]+(?:<.*>)?[\w:]*[\s&*.]+)+\w+(?:\[\w*\])*", re.DOTALL)
KEYWORDS = {"if", "for", "while", "switch", "return", "catch", "sizeof", "decltype", "alignof", "static_assert", "requires"}


def without_comments(text):
    """Blanks comments, literals and preprocessor lines, but preserves line breaks."""
    return NOT_CODE.sub(lambda match: '""' * (match[0][:1] == '"') + "\n" * match[0].count("\n"), text)


def split_parameters(code, begin):
    """Splits the parenthesis that opens at `begin` at its commas. Returns None if it is not a parameter list."""
    parts, depth, last = [], 0, begin + 1
    for i in range(begin, min(len(code), begin + 4000)):
        c = code[i]
        if c in "([{" or (c == "<" and re.match(r"[\w]", code[i - 1])):
            depth += 1
        elif c in ")]}" or (c == ">" and code[i - 1] not in "-=<" and depth > 1):
            depth -= 1
            if depth == 0:
                return [*parts, code[last:i]]
        elif c == "," and depth == 1:
            parts.append(code[last:i])
            last = i + 1
        elif c == ";" and depth == 1:
            return None
    return None


def functions_take_few_arguments(tree):
    """Functions have at most five positional arguments. A parenthesis counts as a parameter list if most parts read
    `type name`; parts of calls and of function types such as std::function<void(int, int)> do not."""
    for path, text in tree.items():
        if not (path.startswith(("src/", "apps/")) and path.endswith(CPP)):
            continue
        code = without_comments(text)
        for opening in re.finditer(r"\(", code):
            name = NAME_BEFORE.search(code, max(0, opening.start() - 80), opening.start())
            if not name or name[1] in KEYWORDS or (name[1] == "]" and is_test(path)):
                continue
            parts = split_parameters(code, opening.start())
            if parts is None or len(parts) <= MOST_ARGUMENTS or name[1] in MANY_ARGUMENTS_TODAY:
                continue
            types = [re.sub(r"(?<![=<>!])=(?!=).*", "", part, flags=re.DOTALL).strip() for part in parts]
            named = sum(bool(NAMED_PARAMETER.fullmatch(part)) for part in types)
            if 2 * named > len(types) and not any(re.search(r"[-+/%?!|.]", re.sub(r"<.*>|\.\.\.", "", t)) for t in types):
                what = "a lambda" if name[1] == "]" else name[1]
                number = code[: opening.start()].count("\n") + 1
                yield path, number, f"{what} takes {len(parts)} positional arguments, more than {MOST_ARGUMENTS}"


LONGEST_LINE = 120
# Existing exceptions with long lines. Do not add to this list.
LONG_LINES_TODAY = {"lab/performance.md", "lab/policies.md", "lab/results.md"}


def lines_are_short(tree):
    """Lines of pages and of comments have at most 120 characters, except tables, code blocks and links."""
    for path, text in tree.items():
        if path in LONG_LINES_TODAY or not path.endswith((*CODE, ".md")):
            continue
        in_block = False
        for number, line in enumerate(text.splitlines(), 1):
            if path.endswith(".md"):
                in_block ^= line.lstrip().startswith("```")
                if in_block or line.startswith(("|", "    ")):
                    continue
            elif not line.lstrip().startswith(("//", "# ")):
                continue
            if len(line) > LONGEST_LINE and "://" not in line:
                yield path, number, f"{len(line)} characters, more than {LONGEST_LINE}"


# Phrases that readers stumbled over in comments, messages and pages. Use a noun, or the field's verb.
RIDDLES = re.compile(
    r", of which\b|\b[Ww]hoever\b|\bis none of\b|\bsuch as are\b|\bby way of\b|\blet go of\b|\bhand(?:s|ed)? (?:over|on)\b")


def prose_is_plain(tree):
    """Comments, messages and pages avoid phrases that readers stumbled over; see RIDDLES."""
    where = lambda p: p.endswith((*CODE, ".md", "CMakeLists.txt")) and p != "scripts/check_house.py"
    for path, number, match in lines(tree, RIDDLES, where):
        yield path, number, f"'{match[0].lstrip(', ')}': use a noun, or the field's verb"


SEEDS = "lab/seeds.md"
IN_CODE = re.compile(r"`([^`]+)`")


def file_named(tree, name):
    """Returns a file or folder in the repository or under src/foremoe/, or None if neither exists."""
    for path in (name, f"src/foremoe/{name}"):
        if path in tree or any(other.startswith(path.rstrip("/") + "/") for other in tree):
            return path
    return None


def seeds_page_names_files(tree):
    """Every path on the page of papers, SEEDS, exists, and the page lists every experiment."""
    if SEEDS not in tree:
        return
    for number, line in enumerate(tree[SEEDS].splitlines(), 1):
        for name in IN_CODE.findall(line):
            if re.fullmatch(r"[\w.\-]+/[\w.\-/]*", name) and not file_named(tree, name):
                yield SEEDS, number, f"there is no {name}"
    for path in tree:
        if re.fullmatch(r"lab/experiments/[^/]+\.py", path) and f"`{path}`" not in tree[SEEDS]:
            yield path, 0, f"is not on {SEEDS}"


def seeds_page_names_what_its_files_have(tree):
    """Each code name in a table cell of that page occurs in a file named earlier in the same cell."""
    for number, line in enumerate(tree.get(SEEDS, "").splitlines(), 1):
        for cell in line.split("|") if line.startswith("|") else ():
            names = IN_CODE.findall(cell)
            for at, name in enumerate(names):
                files = [tree.get(file_named(tree, before) or "", "") for before in names[:at] if "/" in before]
                word = re.compile(rf"(?<![\w\-]){re.escape(name)}(?![\w\-])")
                named = files and re.fullmatch(r"[A-Za-z][\w\-]*", name)
                if named and not any(word.search(text) for text in files):
                    yield SEEDS, number, f"{name} is in none of the files before it"


# Every rule, with a tree in which each file breaks the rule.
RULES = {
    includes_point_left: {
        "src/foremoe/plan/check_plan.cpp": '#include "foremoe/planner/planner.h"\n',
        "src/foremoe/plan/plan_file.cpp": '#include "foremoe/testing/good_plan.h"\n',
        "src/foremoe/sim/simulation.cpp": '#include "foremoe/evaluate/evaluate.h"\n',
        "src/foremoe/runtime/moe_model.cpp": '#include "foremoe/reference/reference_model.h"\n',
    },
    libraries_know_no_program: {"src/foremoe/sim/replay.cpp": '#include "../apps/foremoe/arguments.h"\n'},
    mpi_stays_in_its_folder: {
        "src/foremoe/runtime/slot_pool.cpp": "#include <mpi.h>\n",
        "src/foremoe/runtime/mpi/mpi_session.cpp": "#include <cuda_runtime.h>\n",
    },
    names_say_something: {"src/foremoe/core/string_utils.cpp": "\n"},
    libraries_are_silent: {"src/foremoe/core/error.cpp": 'void f() { std::cerr << "x"; }\n'},
    nothing_is_left_open: {"src/foremoe/core/error.cpp": "// TO" "DO: finish\n"},
    merges_are_finished: {"docs/users/formats.md": "ours\n" + ">" * 7 + " main\n"},
    no_machine_is_named: {"docs/users/formats.md": "see /ho" "me/someone/trace.safetensors\n"},
    headers_are_guarded: {"src/foremoe/core/ids.h": "#ifndef IDS_H\n"},
    files_named_in_code_exist: {"src/foremoe/core/error.cpp": "// cmake/gone.cmake\n"},
    scripts_spell_out_options_of_pip: {"scripts/build": "pip wheel -C" "build-dir=build .\n"},
    installed_headers_are_complete: {
        INSTALL: "set(public_headers core/units.h core/gone.h)\n",
        "src/foremoe/core/units.h": '#pragma once\n#include "foremoe/core/ids.h"\n',
    },
    functions_take_few_arguments: {
        "src/foremoe/core/a.h": "#pragma once\nvoid f(int a, int b, int c,  // three\n       int d, int e,\n       int f = 3);\n",
        "src/foremoe/core/b.cpp": "Sum::Sum(const A& a, B* b, std::span<const int> c, C c, D d, std::function<void(int, int)> e) : a_(a) {}\n",
        "apps/foremoe/c.cpp": "auto f = [&](int a, Grid<int, 2> b, int c, int d, int e, int f) { return a; };\n",
    },
    seeds_page_names_files: {"lab/seeds.md": "`policy/gone.h`\n", "lab/experiments/figure_1.py": "\n"},
    seeds_page_names_what_its_files_have: {"lab/seeds.md": "| 1 | `lab/experiments/figure_1.py`: `rho_max` |\n"},
    import_cycles.nothing_imports_back: import_cycles.BROKEN,
    prose_is_plain: {"src/foremoe/core/error.h": "#pragma once\n// A rank, of which none is full.\n", "docs/page.md": "Whoever"},
    lines_are_short: {"docs/page.md": "x" * 121 + "\n", "src/foremoe/core/error.cpp": "// " + "x" * 118 + "\n"},
}
# Edge cases that obey every rule.
CLEAN = {
    "src/foremoe/planner/planner.cpp": '#include "foremoe/plan/step_plan.h"\n// uncommon helper\n',
    "src/foremoe/runtime/mpi/mpi_session.h": "#pragma once\n#include <mpi.h>\n",
    "src/foremoe/plan/plan_test.cpp": '#include "foremoe/testing/good_plan.h"\nint main() { std::cout << "tests print"; }\n',
    "src/foremoe/runtime/moe_model_test.cpp": '#include "foremoe/reference/reference_model.h"\n',
    "src/foremoe/testing/good_plan.h": '#pragma once\n#include "foremoe/planner/planner.h"\n',
    "src/foremoe/core/ids.h": "#pragma once\nstruct CommonDivisorTable;\n",
    "src/foremoe/core/few.cpp": (
        "#define SIX(a, b, c, d, e, f) six(a, b, c, d, e, f)\n"
        "void f(std::map<int, int> a, int b = g(1, 2, 3, 4, 5, 6), std::function<void(int, int, int, int, int, int)> c = {});\n"
        "void g() { f(a, b, c, d, e, f); return h(a[1], *b, c.d, e->f, 1, a + b); }\n"
        "const T t(a * b, a * c, a * d, 1 + 2, 7, x.y);  // int a, int b, int c, int d, int e, int f\n"),
    "src/foremoe/core/few_test.cpp": "auto f = [](int a, int b, int c, int d, int e, int f) {};\n",
    **import_cycles.CLEAN,
    "src/foremoe/core/parts.h": "#pragma once\n// Parts, each of which is full.\n",
    "docs/table.md": "|" + "x" * 200 + "|\n```\n" + "x" * 200 + "\n```\n",
    "lab/experiments/figure_2.py": 'columns = ["rho_mean"]\n',
    "lab/seeds.md": "`plan/`\n| 2 | `planner/planner.cpp`, `lab/experiments/figure_2.py`: `rho_mean` | `vanilla` |\n",
    "README.md": "build/release/bin/foremoe, ~/tmp, ${dir}/tmp, https://example.org/tmp\n",
}


def is_test(path):
    """Returns whether a path is a test, shared test code or a test double."""
    return bool(re.search(r"_test\.\w+$|(?:^|/)(?:test_[^/]*|tests?/.*|testing/.*|[^/]*conformance[^/]*|[^/]*conformance/.*)$", path))


def count(tree):
    """Prints lines and files of C++ without tests, benchmarks and fuzzers, and includes between files of the command."""
    elsewhere = ("bench/", "fuzz/")
    counted = {path: text for path, text in tree.items()
               if path.endswith(CPP) and not is_test(path) and not path.startswith(elsewhere)}
    folders = {}
    for path, text in counted.items():
        name = folder_of(path) or path.split("/")[0]
        files, length = folders.get(name, (0, 0))
        folders[name] = (files + 1, length + len(text.splitlines()))
    for name, (files, length) in sorted(folders.items(), key=lambda folder: -folder[1][1]):
        print(f"{name:12} {length:6} lines {files:4} files")
    total = sum(length for _, length in folders.values())
    print(f"{'C++':12} {total:6} lines {len(counted):4} files, without tests, benches and fuzzers")

    app = {path: text for path, text in tree.items() if path.startswith("apps/foremoe/") and path.endswith(CPP)}
    between = 0
    for path, text in app.items():
        own = Path(path).with_suffix(".h").name
        names = [Path(name).name for name in re.findall(r'^\s*#\s*include\s+"(?!foremoe/\w+/)([^"]+)"', text, re.MULTILINE)]
        between += sum(f"apps/foremoe/{name}" in app and name != own for name in names)
    print(f"{between} includes between the {len(app)} files of apps/foremoe, own headers not counted")


def read_tree(root):
    skipped = re.compile(r"(?:^|/)(?:\.git|\.cache|\.venv|venv|__pycache__|build[^/]*)/")
    suffixes = (*CODE, ".md", ".txt", ".json", ".toml", ".supp")
    tree = {}
    for file in sorted(root.rglob("*")):
        path = file.relative_to(root).as_posix()
        if skipped.search(path) or not file.is_file():
            continue
        plain = file.suffix in suffixes or (file.suffix == "" and file.read_bytes()[:2] == b"#!")
        tree[path] = file.read_text(encoding="utf-8", errors="replace") if plain else ""
    return tree


def check(tree):
    return [(*finding, rule.__name__) for rule in RULES for finding in rule(tree)]


def self_test():
    failures = [
        f"{rule.__name__} does not see its violation in {path}"
        for rule, broken in RULES.items()
        for path in sorted(broken.keys() - {finding[0] for finding in rule(broken)})
    ]
    failures += [f"{f[3]} complains about a clean tree: {f[0]}: {f[2]}" for f in check(CLEAN)]
    for failure in failures:
        print(failure)
    print(f"{len(RULES)} rules, {len(failures)} failures")
    return bool(failures)


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    tree = read_tree(Path(__file__).resolve().parent.parent)
    if sys.argv[1:] == ["--count"]:
        return count(tree)
    findings = check(tree)
    for path, number, what, rule in findings:
        print(f"{path}:{number}: {what} ({rule})")
    print(f"{len(tree)} files, {len(RULES)} rules, {len(findings)} findings")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())

"""python -m foremoe.supported: prints the table of versions, or whether launch files would run with ForeMoE."""

from __future__ import annotations

import re
import sys

from foremoe._command_line import OK, printable, reporting
from foremoe._errors import InputError, refuse
from foremoe._variable import VARIABLE

from .check import SIZES, check
from .launch_file import read
from .rules import RULES
from .versions import table

_RAY = "export RAY_RUNTIME_ENV_HOOK=foremoe.ray.hook FOREMOE_ATTACH=mode=active"
_ATTACH = """--train-env-vars '{"FOREMOE_ATTACH": "mode=active"}'"""
ADD = {
    "verl": "export VERL_USE_EXTERNAL_MODULES=foremoe.verl FOREMOE_ATTACH=mode=active",
    "slime": f"--custom-megatron-init-path foremoe.slime.init {_ATTACH}",
    "miles": f"--custom-megatron-init-path foremoe.miles.init {_ATTACH}",
    "ms-swift": """export FOREMOE_ATTACH=mode=active; --external_plugins "$(python -m foremoe.swift)\"""",
    "NeMo-RL": _RAY.replace("export", "export PYTHONPATH=FOLDER"),
    "AReaL": "actor.scheduling_spec.0.cmd='python3 -m foremoe.areal'",
    "SkyRL": f"export RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 {_RAY.removeprefix('export ').replace('.hook', '.uv_hook')}",
} | dict.fromkeys(("ROLL", "RLinf"), _RAY)
"""What to add to a trainer's launch file for active mode; docs/users/adopting.md explains it."""
USAGE = """\
python -m foremoe.supported                           prints the versions of frameworks that ForeMoE accepts
python -m foremoe.supported FILE ... [NAME=value ...] says whether launch files would run: shell scripts, YAML, TOML,
                                                      or the JSON mapping of foremoe.supported.check(). Runs nothing.
                                                      NAME=value sets a variable of the scripts' environment.
                                                      Exit status 2 for files that cannot be read, else 0"""


def _report(file: str, given: dict[str, str]) -> None:
    launch = read(file, given)
    try:
        verdict = check(launch.mapping)
    except InputError as error:
        refuse(error.field, error.problem, file=file)
    settings, trainer = launch.mapping.get("settings", {}), str(launch.mapping.get("framework"))
    shown = {of: "?" if of in launch.unresolved else settings.get(of, 1) for of in SIZES}
    sizes = ", ".join(f"{of.removesuffix('_parallel_size')} {size}" for of, size in shown.items())
    print(f"{file}: {trainer}; {sizes}; {len(settings)} settings, not versions and the model's own")
    for field, text in launch.unresolved.items():
        if field in {rule.field for rule in RULES} | {*SIZES, VARIABLE}:
            print(f"  not resolved: {field} = {printable(text)}")
    accepted = {}
    for mode, found in (("active", verdict.active), ("shadow", verdict.shadow)):
        reasons = [reason for reason in found if reason.field not in launch.unresolved]
        ruled = {rule.field for rule in RULES if rule.enforced(mode)} | {*SIZES, VARIABLE}
        depends = ", ".join(sorted(ruled & launch.unresolved.keys()))
        accepted[mode] = not reasons
        print(f"  {mode} mode: {'refused' if reasons else 'runs'}{f'; depends on {depends}' if depends else ''}")
        for reason in reasons:
            print(f"    {printable(str(reason))}")
    if trainer in ADD and accepted["shadow"]:
        print(f"  add: {ADD[trainer] if accepted['active'] else ADD[trainer].replace('mode=active', 'mode=shadow')}")


def main(files: list[str]) -> int:
    """Prints the table, or a report on each launch file. An argument NAME=value sets a variable of the environment."""
    if {"-h", "--help"} & {*files}:
        print(USAGE)
        return OK
    for option in (of for of in files if of.startswith("-")):
        refuse("option", f"{option}; expected files, NAME=value or --help")
    given = {of.partition("=")[0]: of.partition("=")[2] for of in files if re.match(r"[A-Za-z_]\w*=", of)}
    if not [of for of in files if of.partition("=")[0] not in given]:
        print(table())
    for file in files:
        if file.partition("=")[0] not in given:
            _report(file, given)
    return OK


if __name__ == "__main__":
    sys.exit(reporting("foremoe.supported", {}, lambda: main(sys.argv[1:])))

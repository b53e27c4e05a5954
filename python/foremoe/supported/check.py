"""Would a launch file's configuration run under ForeMoE? Answers without the trainer, Megatron-LM or torch."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from foremoe._errors import InputError, refuse
from foremoe._variable import VARIABLE, arguments_from, expect_usable

from .rules import RULES, Reason, broken, plain, relevant
from .versions import FRAMEWORKS, MEGATRON, VERL, Framework

TRAINERS: dict[str, Framework] = {"verl": VERL, "verl-recipe": VERL} | {
    of.name: of
    for of in FRAMEWORKS
    if of.name in ("slime", "miles", "NeMo-RL", "SkyRL", "ROLL", "ms-swift", "AReaL", "RLinf", "prime-rl")
}
KEYS = ("framework", "framework_version", "megatron_core", "engine", "replay", "family", "flags", "settings", VARIABLE)
NOT_INPUTS = ("file", "model", "notes", "counted", "today")
FLAGS = (
    "npu", "offload_train", "vision_config", "use_remove_padding_False", "sequence_parallel_False", "modelopt_qat",
    "dynamic_context_parallel", "dsv4_contiguous_cp",
)  # fmt: skip
_KNOWN_VALUES = {rule.field: rule.accepted for rule in RULES if rule.field.startswith(("moe_token_", "moe_flex_"))}
_KNOWN_VALUES["replay"] = ("R3", "R2", "disabled")
SIZES = tuple(f"{of}_parallel_size" for of in ("tensor_model", "pipeline_model", "context", "expert_model"))
_TELL = "report it as an issue, or remove it"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Reasons why each mode refuses a launch file. Empty: the mode accepts it."""

    active: tuple[Reason, ...]
    shadow: tuple[Reason, ...]


@functools.cache
def known_fields() -> frozenset[str]:
    """Returns all names that settings may have: those of the rules, and those that change nothing for ForeMoE."""
    text = importlib.resources.files(__package__).joinpath("fields.txt").read_text(encoding="utf-8")
    names = (name for line in text.splitlines() for name in line.partition(": ")[2].split())
    return frozenset(names) | {rule.field for rule in RULES}


def check(launch: Mapping[str, Any]) -> Verdict:
    """Checks the configuration of one launch file.

    Args:
        launch: framework, framework_version, megatron_core (None: unknown), engine, replay (R3, R2 or disabled), family
            of the model, flags (see FLAGS), FOREMOE_ATTACH (its text; a cluster or model that is a file on another
            machine is not checked), and settings: fields of Megatron-LM's TransformerConfig and parallel sizes.
            expert_tensor_parallel_size is the effective one. A setting that is absent has the framework's default.

    Raises:
        InputError: if launch, its flags or its settings are of another type.
    """
    _expect("launch", launch, Mapping)
    _expect("flags", launch.get("flags", ()), list | tuple)
    _expect("settings", launch.get("settings", {}), Mapping)
    _expect(VARIABLE, launch.get(VARIABLE, ""), str)
    unknown = tuple(_unknown(launch))
    values, trainer = _values(launch), str(launch.get("framework"))
    for reason in unknown:
        values.pop(reason.field, None)
    active, shadow = (
        unknown + tuple(_versions(launch, mode)) + tuple(rule.reason(of) for rule, of in broken(values, mode, trainer))
        for mode in ("active", "shadow")
    )
    return Verdict(active, shadow)


def _expect(name: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind):
        expected = {Mapping: "a mapping", str: "text"}.get(kind, "a list")
        refuse(name, f"has type {type(value).__name__}; expected {expected}")


def _unknown(launch: Mapping[str, Any]) -> Iterator[Reason]:
    """Yields reasons that hold in both modes: names, values and sizes that ForeMoE does not know."""
    settings = launch.get("settings", {})
    for key in launch:
        if key not in KEYS + NOT_INPUTS:
            yield Reason(str(key), launch[key], "unknown key", f"expected one of {', '.join(KEYS)}")
    for flag in launch.get("flags", ()):
        if flag not in FLAGS:
            yield Reason("flags", flag, "unknown flag", _TELL)
    for field in settings:
        if field not in known_fields():
            yield Reason(field, settings[field], "unknown field, which may change how experts run", _TELL)
    for field, known in _KNOWN_VALUES.items():
        value = {**settings, "replay": launch.get("replay", "disabled")}.get(field)
        if plain(value) is not None and value not in known:
            yield Reason(field, value, "unknown value", f"expected {' or '.join(known)}")
    for field in SIZES:
        is_of_plans = field == "expert_model_parallel_size" and launch.get("engine") == "megatron"
        size, least = _size(settings.get(field)), 2 if is_of_plans else 1
        if size < least:
            why = "copies go from rank to rank" if least == 2 else "it is a number of ranks"
            yield Reason(field, settings.get(field), why, f"expected an integer from {least} on")
    yield from _refused_arguments(launch.get(VARIABLE, ""))


def _refused_arguments(text: str) -> Iterator[Reason]:
    """Yields the reason why adapters refuse this value of FOREMOE_ATTACH, if they do."""
    try:
        expect_usable({name: of for name, of in arguments_from(text).items() if not _is_elsewhere(name, of)})
    except InputError as error:
        yield Reason(VARIABLE, text, error.problem, "correct this argument")


def _is_elsewhere(name: str, value: Any) -> bool:
    """Returns whether the argument is a file that is not on this machine."""
    path = pathlib.Path(str(value))
    return name in ("cluster", "model") and path.suffix in (".toml", ".json") and not path.exists()


def _versions(launch: Mapping[str, Any], mode: str) -> Iterator[Reason]:
    name, version, core = (launch.get(key) for key in ("framework", "framework_version", "megatron_core"))
    trainer = TRAINERS.get(str(name))
    if trainer is None:
        if mode == "active":
            yield Reason(
                "framework", name, "unknown trainer", "call foremoe.megatron.attach() yourself; see adopting.md"
            )
        return
    if not re.match("run|read", trainer.plans if mode == "active" else trainer.shadow):
        remedy = "use shadow mode" if trainer.shadow != trainer.plans else "use a trainer of Megatron-LM models"
        yield Reason("framework", name, f"has no adapter for {mode} mode", remedy)
    if trainer.package:
        if not trainer.accepts(str(version), mode):
            accepted = trainer.accepted_in(mode)
            yield Reason("framework_version", version, f"{mode} mode was not tested with it", f"use {accepted}")
    elif mode == "active" and not any(word in str(version) for word in re.findall(r"[\w.]{5,}", trainer.sources)):
        yield Reason("framework_version", version, "its sources were not read", f"use {trainer.sources}")
    if core is not None and not MEGATRON.accepts(str(core), mode):
        accepted = MEGATRON.accepted_in(mode)
        yield Reason("megatron_core", core, f"{mode} mode was not tested with it", f"use {accepted}")


def _values(launch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values to which rules apply, by field."""
    values = dict(launch.get("settings", {}))
    values |= {"engine": launch.get("engine", "?"), "replay": launch.get("replay", "disabled")}
    for flag in (of for of in FLAGS if of in launch.get("flags", ())):
        values[flag.removesuffix("_False")] = not flag.endswith("_False")
    tensor, stages = (_size(values.get(f"{of}_model_parallel_size")) for of in ("tensor", "pipeline"))
    if launch.get("framework") not in ("NeMo-RL", "ms-swift", "AReaL"):  # whose default is 1
        values.setdefault("expert_tensor_parallel_size", tensor)
    if tensor == 1:
        values.pop("sequence_parallel", None)
    layout = values.get("pipeline_model_parallel_layout")
    if isinstance(layout, str) and stages:
        chunks = re.sub(r"\(([^)]+)\)\*(\d+)|(.)\*(\d+)", _repeated, layout).count("|") + 1
        values.setdefault("virtual_pipeline_model_parallel_size", chunks / stages)
    return relevant(values)


def _size(value: Any) -> int:
    """Returns a number of ranks; 1 if it is not given, 0 if it is invalid."""
    value = plain(value)
    if value is None:
        return 1
    return int(value) if type(value) in (int, float) and value > 0 and value % 1 == 0 else 0


def _repeated(part: re.Match[str]) -> str:
    return (part[1] or part[3]) * int(part[2] or part[4])

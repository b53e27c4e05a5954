"""Reads the launch file of a trainer without running it: a shell script, YAML, TOML or the JSON of check()."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from foremoe._errors import refuse
from foremoe._variable import VARIABLE

from .check import FLAGS, TRAINERS, known_fields
from .rules import plain
from .shell import UNRESOLVED, Script, mark

_VPP = "virtual_pipeline_model_parallel_size"
_ALIASES = {
    "fp8_format": "fp8", "fp4_format": "fp4", "virtual_pipeline_parallel_size": _VPP,
    "num_virtual_stages_per_pipeline_rank": _VPP, "num_experts":
    "num_moe_experts",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Format:
    """How a trainer's launch files spell what check() needs.

    Attributes:
        sign: Pattern of a key that no other trainer has.
        fields: Prefixes of keys that end with a field of Megatron-LM's configuration.
        facts: Other keys, and the field, flag or key of check() that they set.
        engine: The trainer's engine, if its files do not name it.
    """

    sign: str
    fields: tuple[str, ...]
    facts: Mapping[str, str]
    engine: str | None = None


_ARGUMENTS = {
    "train_backend": "engine", "use_routing_replay": "replay_of_log_probs",
    "use_rollout_routing_replay": "replay", "router_replay_mode": "replay",
    "colocate": "offload_train", "offload_train": "offload_train", "offload": "offload_train",
    "no_offload_train": "no_offload_train", "lora_rank": "lora_on_experts",
    "tuner_type": "lora_on_experts", "npu": "npu",
}  # fmt: skip
_ACTOR, _POLICY = "actor_rollout_ref.actor.", "trainer.policy."
_FORMATS = {
    "verl": _Format(
        r"actor_rollout_ref\.", (_ACTOR + "megatron.override_transformer_config.", _ACTOR + "megatron."),
        {
            "config_name": "engine", _ACTOR + "strategy": "engine", "model_engine": "engine",
            _ACTOR + "model_engine": "engine", _ACTOR + "megatron.router_replay.mode": "replay",
            _ACTOR + "router_replay.mode": "replay", "actor_rollout_ref.model.use_remove_padding": "use_remove_padding",
            "actor_rollout_ref.model.mtp.enable": "mtp_num_layers", "trainer.device": "npu", "npu": "npu",
            "actor_rollout_ref.model.lora.rank": "lora_on_experts",
            "actor_rollout_ref.model.lora_rank": "lora_on_experts",
        },
    ),
    "SkyRL": _Format(
        r"trainer\.policy\.", (_POLICY + "megatron_config.transformer_config_kwargs.", _POLICY + "megatron_config."),
        {
            "trainer.strategy": "engine", _POLICY + "megatron_config.moe_enable_routing_replay": "replay",
            _POLICY + "model.lora.rank": "lora_on_experts", "trainer.use_sample_packing": "use_remove_padding",
        },
    ),
    "NeMo-RL": _Format(
        r"policy\.(megatron|dtensor)_cfg\.", ("policy.megatron_cfg.",),
        {
            "policy.megatron_cfg.enabled": "engine",
            "policy.megatron_cfg.fp8_cfg.enabled": "fp8", "policy.router_replay.enabled": "replay",
            "policy.quant_cfg": "modelopt_qat", "policy.megatron_cfg.peft.enabled": "lora_on_experts",
        },
    ),
    "ROLL": _Format(
        r"actor_train\.strategy_args", ("actor_train.strategy_args.strategy_config.",),
        {
            "actor_train.strategy_args.strategy_name": "engine", "actor_train.router_replay.mode": "replay",
            "router_replay.mode": "replay", "actor_train.model_args.lora_rank": "lora_on_experts",
        },
    ),
    "RLinf": _Format(
        r"actor\.training_backend", ("actor.model.", "actor.megatron."),
        {"actor.training_backend": "engine", "actor.model.is_lora": "lora_on_experts"},
    ),
    "AReaL": _Format(
        r"actor\.(backend|megatron\.)|allocation_mode", ("actor.megatron.",),
        {"actor.backend": "engine", "allocation_mode": "engine", "actor.use_lora": "lora_on_experts"},
    ),
    "prime-rl": _Format(r"trainer\.model\.|orchestrator\.", (),
                        {"trainer.model.ep": "expert_model_parallel_size", "trainer.enable_router_replay": "replay"},
                        "torch (FSDP2+EP)"),
    "ms-swift": _Format(r"rlhf_type", ("",), _ARGUMENTS, "megatron"),
    "slime": _Format(r"actor_num_nodes|rollout_batch_size", ("",), _ARGUMENTS, "megatron"),
}  # fmt: skip
_REPLAYS = {True: "R3", "r3": "R3", "r2": "R2"}


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch file.

    Attributes:
        mapping: Argument of check(), without the values that the file does not resolve.
        unresolved: Those values as the file has them, by field.
    """

    mapping: dict[str, Any]
    unresolved: dict[str, str]


def read(file: str, given: Mapping[str, str]) -> Launch:
    """Reads a launch file.

    Args:
        file: Its path.
        given: Variables of the environment of a shell script.

    Raises:
        InputError: if it is none, with the file and, for YAML, the line.
        ImportError: if the parser of the format is missing, with the command that installs it.
    """
    path = pathlib.Path(file)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            mapping = json.loads(text)
            return Launch(mapping, {}) if isinstance(mapping, dict) else refuse("file", "is no JSON object", file=file)
        keys = dict(_keys(path, given))
    except OSError as error:
        refuse("file", error.strerror or "cannot be read", file=file)
    except RecursionError:
        refuse("file", "is nested too deeply", file=file)
    except UnicodeDecodeError:
        refuse("file", "is no text", file=file)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        refuse("file", str(error), file=file)
    for name, form in _FORMATS.items():
        if any(re.match(form.sign, key) for key in keys):
            if name == "slime" and re.search(r"\bmiles\b", f"{path.resolve()}\n{text}"):
                name = "miles"
            return _launch(name, form, keys)
    trainers = ", ".join(TRAINERS)
    expected = "expected the script, YAML or TOML that has them, not one that only starts Python"
    refuse("file", f"has no settings of {trainers}; {expected}", file=file)


def _launch(name: str, form: _Format, keys: dict[str, Any]) -> Launch:
    known = known_fields()
    found: dict[str, Any] = {"engine": form.engine or "?", "replay": "disabled"}
    for key, value in keys.items():
        if (given := _arguments(key, value)) is not None:
            found[VARIABLE] = given
            continue
        field, of_megatron = _field_of(form, key)
        known |= {field} if of_megatron else set()
        is_resolved = not (isinstance(value, str) and UNRESOLVED in value)
        if field == "no_offload_train":
            found.pop("offload_train", None)
        elif field:
            found |= _areal_sizes(str(value)) if field == "engine" and is_resolved else {}
            found[field] = _value_of(field, value) if is_resolved else value
    found["replay"] = _replay_of(name, found, keys)
    unresolved = {of: value.replace(UNRESOLVED, "") for of, value in found.items() if UNRESOLVED in str(value)}
    found = {of: value for of, value in found.items() if of not in unresolved}
    named = known_fields() | {"engine", "replay", VARIABLE}
    return Launch(_mapping(name, found, known), {of: text for of, text in unresolved.items() if of in named})


def _field_of(form: _Format, key: str) -> tuple[str, bool]:
    """Returns the field that a key sets, or "", and whether it may be one of Megatron-LM's that no rule names."""
    prefix = next((of for of in form.fields if key.startswith(of)), None)
    field = form.facts.get(key) or (key[len(prefix) :] if prefix is not None else "")
    return _ALIASES.get(field, field), "transformer_config" in str(prefix)


def _mapping(name: str, found: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Returns the argument of check(). found: Values by field. known: Fields of the mapping's settings."""
    flags = [of for of in FLAGS if plain(found.get(of.removesuffix("_False"))) is (not of.endswith("_False"))]
    return {
        "framework": name,
        "framework_version": (TRAINERS[name].tested or re.findall(r"[\w.]{5,}", TRAINERS[name].sources))[0],
        "megatron_core": None,
        "engine": found.get("engine", "megatron"),
        "replay": found.get("replay", "disabled"),
        "family": "?",
        "flags": flags,
        "settings": {of: found[of] for of in sorted(known & found.keys() - {"engine", "replay", *FLAGS})},
        VARIABLE: found.get(VARIABLE, ""),
    }


def _value_of(field: str, value: Any) -> Any:
    """Returns the value of a field as the rules have it. value: As the launch file has it."""
    match field:
        case "engine":
            named = {True: "megatron", False: "automodel"}.get(plain(value), value)
            return re.sub(r"^megatron(_train|:.*)$|.*megatron_trainer.*|.*\+megatron:.*", "megatron", str(named))
        case "replay":
            if plain(value) is True:
                return "R3"
            return _REPLAYS.get(value.lower() if isinstance(value, str) else value, "disabled")
        case "npu":
            return value == "npu"
        case "lora_on_experts":
            return plain(value) not in (None, 0, "full")
        case "mtp_num_layers" if isinstance(plain(value), bool):
            return int(bool(plain(value)))
        case "modelopt_qat":
            return value is not None
    return value


def _replay_of(name: str, found: dict[str, Any], keys: Mapping[str, Any]) -> Any:
    """Returns the kind of replay. Takes replay_of_log_probs out of the fields."""
    replays_log_probs = found.pop("replay_of_log_probs", None) is not None
    replay = "R2" if replays_log_probs and found["replay"] == "disabled" else found["replay"]
    recorded = keys.get("actor_rollout_ref.rollout.enable_rollout_routing_replay")
    return "disabled" if name == "verl" and replay == "R3" and not plain(recorded) else replay


def _arguments(key: str, value: Any) -> str | None:
    """Returns the value of FOREMOE_ATTACH: the variable itself, or an entry of a JSON mapping of variables."""
    if key.rpartition(".")[2] == VARIABLE:
        return str(value)
    entry = re.search(rf'"{VARIABLE}"\s*:\s*"([^"]*)"', value) if isinstance(value, str) else None
    return entry and entry[1]


def _areal_sizes(engine: str) -> dict[str, int]:
    """Returns the sizes in AReaL's names of engines, megatron:(attn:d1p12t4|ffn:d1p12e4) or megatron:d4t8."""
    if (text := re.search(r"megatron:([^+]*)", engine)) is None:
        return {}
    dense, _, experts = text[1].partition("ffn:")
    names = {"t": "tensor_model", "p": "pipeline_model", "c": "context"}
    sizes = {names[of]: int(n) for of, n in re.findall(r"([tpc])(\d+)", dense)}
    sizes |= {{"t": "expert_tensor", "e": "expert_model"}[of]: int(n) for of, n in re.findall("([te])(\\d+)", experts)}
    return {f"{of}_parallel_size": n for of, n in ({"expert_tensor": 1} | sizes).items()}


def _keys(path: pathlib.Path, given: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yields keys and values: dotted paths of YAML, TOML and Hydra overrides; flags as Python spells them."""
    if path.suffix in (".yaml", ".yml"):
        keys = dict(_flat(_yaml(path)))
        yield from ((key, _interpolated(value, keys)) for key, value in keys.items())
    elif path.suffix == ".toml":
        yield from _flat(tomllib.loads(path.read_text(encoding="utf-8")))
    elif path.suffix != ".py":
        script = Script(path, given)
        if any(re.match("(VLLM_)?ASCEND_|HCCL_", name) for name in script.environment):
            yield "npu", "npu"
        if (arguments := script.variable(VARIABLE)) is not None:
            yield VARIABLE, arguments
        for words in script.commands:
            for word, following in zip(words, [*words[1:], "--"], strict=True):
                if flag := re.fullmatch(r"--([a-zA-Z][\w-]*)(?:=(.*))?", word, re.DOTALL):
                    value = flag[2] if flag[2] is not None else following
                    value = True if str(value).startswith("--") or "[@]" in str(value) else value
                    yield flag[1].replace("-", "_"), value
                elif override := re.fullmatch(r"[+~]*([\w./@-]+)=(.*)", word, re.DOTALL):
                    yield override[1], override[2].strip("'\"")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _interpolated(value: Any, keys: Mapping[str, Any]) -> Any:
    for _ in range(5):
        found = re.search(r"\$\{(?:oc\.env:\w+,)?([^${}]+)\}", value) if isinstance(value, str) else None
        if not found:
            return value
        other = found[1].strip("'\"") if "oc.env:" in found[0] else keys.get(found[1], mark(found[0][1:]))
        value = other if found[0] == value else value.replace(found[0], str(other))
    return value


def _yaml(path: pathlib.Path, begun: tuple[pathlib.Path, ...] = ()) -> dict[str, Any]:
    """Returns a document merged onto its defaults: files, or entries of Hydra. Leaves out defaults without a file."""
    try:
        import yaml
    except ImportError as error:
        raise ImportError(f"reading YAML needs `pip install pyyaml`: {error}") from error
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        at = getattr(error, "problem_mark", None)
        refuse(f"line {at.line + 1}" if at else "file", str(getattr(error, "problem", error)), file=str(path))
    if not isinstance(tree, dict):
        refuse("file", "is no YAML mapping", file=str(path))
    merged: dict[str, Any] = {}
    defaults = tree.pop("defaults", [])
    for entry in filter(
        None, [defaults] if isinstance(defaults, str) else defaults if isinstance(defaults, list) else []
    ):
        group, name = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
        name, _, package = str(name).partition("@")
        group, _, of_group = group.partition("@")
        folder = path.parent / group
        found = next((of for of in (folder / name, folder / f"{name}.yaml") if of.is_file()), None)
        if found and found.resolve() not in begun and not group.startswith("override"):
            content = _yaml(found, (*begun, path.resolve()))
            where = of_group or package or group.replace("/", ".")
            for part in reversed(where.split(".") if where and not where.startswith("_") else []):
                content = {part: content}
            _merge(merged, content)
    _merge(merged, tree)
    return merged


def _merge(onto: dict[str, Any], tree: Mapping[str, Any]) -> None:
    for key, value in tree.items():
        if isinstance(value, Mapping) and isinstance(onto.get(key), dict):
            _merge(onto[key], value)
        else:
            onto[key] = value

"""foremoe.supported.check accepts configurations that run, and names what keeps others from running."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

import foremoe
from foremoe.supported import RULES, Reason, check, expect
from foremoe.supported.check import FLAGS, known_fields

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZES = {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2}
VERSIONS = {
    "verl": ("0.9.0", "0.18.0"), "verl-recipe": ("0.8.0.dev", None), "slime": ("624b824a", "0.16.0rc0"),
    "miles": ("31f1ca96", "0.16.0rc0"), "NeMo-RL": ("0.6.0+7ea279ab", "0.20.0"), "ms-swift": ("4.6.0.dev0", "0.18.0"),
    "SkyRL": ("main a9564572", "0.19.0"), "ROLL": ("main 8eb27cc2", "0.16.0"), "AReaL": ("1.0.4", "0.17.0"),
    "RLinf": ("main a3816b59", "0.17.0"), "prime-rl": ("main 559b4477", None),
}  # fmt: skip
SHADOW_ONLY, NEITHER = ("AReaL", "RLinf"), ("prime-rl",)


def launch(framework: str = "verl", *flags: str, replay: str = "R3", engine: str = "megatron", **more: Any) -> Any:
    """Returns a launch file's mapping. more: keys of the mapping or, if it has no such key, settings."""
    version, core = VERSIONS.get(framework, ("1.0", None))
    made: dict[str, Any] = {
        "framework": framework, "framework_version": version, "megatron_core": core, "engine": engine,
        "replay": replay, "family": "?", "flags": list(flags), "settings": dict(SIZES),
    }  # fmt: skip
    for key, value in more.items():
        (made if key in made else made["settings"])[key] = value
    return made


def fields(reasons: tuple[Reason, ...]) -> list[str]:
    return [reason.field for reason in reasons]


@pytest.mark.parametrize("framework", VERSIONS)
def test_each_trainer_is_accepted_in_the_modes_for_which_it_has_an_adapter(framework: str) -> None:
    verdict = check(launch(framework))
    assert fields(verdict.active) == ["framework"] * (framework in SHADOW_ONLY + NEITHER)
    assert fields(verdict.shadow) == ["framework"] * (framework in NEITHER)


# (launch, fields that active mode names, fields that shadow mode names)
@pytest.mark.parametrize(("given", "active", "shadow"), [
    (launch(replay="disabled"), ["replay"], []),
    (launch(replay="R2"), [], []),
    (launch("slime", replay="R2"), [], []),
    (launch("NeMo-RL", replay="R2"), ["replay"], []),
    (launch(lora_dropout=0.1), ["lora_dropout"], []),
    (launch(offload_train_target="disk"), ["offload_train_target"], []),
    (launch(num_layers_per_virtual_pipeline_stage=1), ["num_layers_per_virtual_pipeline_stage"], []),
    (launch(replay="R4"), ["replay"], ["replay"]),
    (launch(engine="veomni"), ["engine"], ["engine"]),
    (launch("NeMo-RL", engine="automodel"), ["engine"], ["engine"]),
    (launch("prime-rl", engine="torch (FSDP2+EP)"), ["framework", "engine"], ["framework", "engine"]),
    (launch("other"), ["framework"], []),
    (launch(framework_version="0.7.1"), ["framework_version"], []),
    (launch(framework_version="0.7.0"), ["framework_version"], ["framework_version"]),
    (launch(framework_version="0.10.0.dev"), [], []),
    (launch(framework_version="0.11.0"), ["framework_version"], []),
    (launch("slime", framework_version="aaaaaaaa"), ["framework_version"], []),
    (launch("NeMo-RL", framework_version="0.6.0"), ["framework_version"], []),  # has no router replay
    (launch(megatron_core="0.21.0"), ["megatron_core"], []),
    (launch(megatron_core="0.15.0"), ["megatron_core"], ["megatron_core"]),
    (launch("slime", "npu"), ["npu"], ["npu"]),
    (launch("slime", "offload_train"), [], []),
    (launch("verl", "offload_train"), ["offload_train"], []),
    (launch("verl", "vision_config"), [], []),
    (launch("verl", "use_remove_padding_False"), [], []),
    (launch("SkyRL", "use_remove_padding_False"), ["use_remove_padding"], []),
    (launch("verl", "sequence_parallel_False"), ["sequence_parallel"], []),
    (launch("verl", "sequence_parallel_False", tensor_model_parallel_size=1), [], []),
    (launch("NeMo-RL", "modelopt_qat"), ["modelopt_qat"], []),
    (launch("verl", "dynamic_context_parallel"), ["dynamic_context_parallel"], ["dynamic_context_parallel"]),
    (launch("verl", "dsv4_contiguous_cp"), ["dsv4_contiguous_cp"], []),
    (launch("verl", "moon"), ["flags"], ["flags"]),
    (launch(mtp_num_layers=2, moe_latent_size=1024, moe_shared_expert_overlap=True), [], []),
    (launch(mtp_num_layers=1, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="ncclep"),
     ["mtp_num_layers"], []),
    (launch(lora_on_experts=True, moe_router_bias_update_rate=0.001), [], []),
    (launch("ms-swift", lora_on_experts=True), ["lora_on_experts"], []),
    (launch(expert_tensor_parallel_size="2"), ["expert_tensor_parallel_size"], []),
    (launch(virtual_pipeline_model_parallel_size=2.0), ["virtual_pipeline_model_parallel_size"], []),
    (launch(pipeline_model_parallel_layout="Et|(tt|)*3tL", pipeline_model_parallel_size=5), [], []),
    (launch(pipeline_model_parallel_layout="Et|(tt|)*4L", pipeline_model_parallel_size=3),
     ["virtual_pipeline_model_parallel_size"], []),
    (launch(fp8="e4m3", fp8_recipe="blockwise"), ["fp8"], []),
    (launch(fp8="False", fp4="none", virtual_pipeline_model_parallel_size="null"), [], []),
    (launch(fine_grained_activation_offloading=0, moe_expert_capacity_factor=1.5), ["moe_expert_capacity_factor"], []),
    (launch(cuda_graph_impl="local"), ["cuda_graph_impl"], ["cuda_graph_impl"]),
    (launch(moe_token_dispatcher_type="flex", moe_enable_deepep=True), [], []),
    (launch(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep"), [], []),
    (launch(moe_token_dispatcher_type="ring"), ["moe_token_dispatcher_type"], ["moe_token_dispatcher_type"]),
    (launch(moe_lunar_phase=1), ["moe_lunar_phase"], ["moe_lunar_phase"]),
    (launch() | {"surprise": 1}, ["surprise"], ["surprise"]),
    (launch() | {"FOREMOE_ATTACH": "mode=active,cluster=H200,model=Qwen3-30B-A3B"}, [], []),
    (launch() | {"FOREMOE_ATTACH": "cluster=/on/another/machine.toml"}, [], []),
    (launch() | {"FOREMOE_ATTACH": "cluster=h10"}, ["FOREMOE_ATTACH"], ["FOREMOE_ATTACH"]),
    (launch() | {"FOREMOE_ATTACH": "cluster"}, ["FOREMOE_ATTACH"], ["FOREMOE_ATTACH"]),
    (launch() | {"file": "run.sh", "notes": ""}, [], []),
    (launch(expert_model_parallel_size=1), ["expert_model_parallel_size"], ["expert_model_parallel_size"]),
    (launch(expert_model_parallel_size="8", context_parallel_size="x"), ["context_parallel_size"],
     ["context_parallel_size"]),
    ({}, ["framework", "engine", "replay"], ["engine"]),
])  # fmt: skip
def test_modes_name_the_fields_that_they_refuse(given: Any, active: list[str], shadow: list[str]) -> None:
    verdict = check(given)
    assert (fields(verdict.active), fields(verdict.shadow)) == (active, shadow)


def test_absent_expert_tensor_parallelism_is_the_frameworks_default() -> None:
    for framework, refused in (("verl", ["expert_tensor_parallel_size"]), ("NeMo-RL", [])):
        given = launch(framework)
        del given["settings"]["expert_tensor_parallel_size"]
        assert fields(check(given).active) == refused


def test_a_reason_is_one_line_with_field_value_problem_and_remedy() -> None:
    (reason,) = check(launch(fp8="e4m3")).active
    assert str(reason) == (
        "fp8: 'e4m3': guests would be quantised anew for each copy; set it to False, or use shadow mode"
    )


@pytest.mark.parametrize(("given", "said"), [
    ([], "launch: has type list; expected a mapping"),
    ({"flags": "npu"}, "flags: has type str; expected a list"),
    ({"settings": None}, "settings: has type NoneType; expected a mapping"),
    ({"FOREMOE_ATTACH": {}}, "FOREMOE_ATTACH: has type dict; expected text"),
])  # fmt: skip
def test_mappings_of_another_form_are_rejected_by_name(given: Any, said: str) -> None:
    with pytest.raises(foremoe.InputError, match=re.escape(said)):
        check(given)


def test_adapters_get_the_same_rules_as_an_error_on_the_field() -> None:
    expect({"replay": "R2"}, "active", "verl")
    expect({"fp8": "hybrid"}, "shadow")
    with pytest.raises(
        foremoe.InputError, match=r"^fp8: 'hybrid' of layer 3; expected False, or use shadow mode"
    ) as at:
        expect({"mtp_num_layers": None, "fp8": "hybrid"}, "active", of="layer 3")
    assert at.value.field == "fp8"


def test_every_flag_has_a_rule_and_every_known_field_one_spelling() -> None:
    assert {flag.removesuffix("_False") for flag in FLAGS} <= {rule.field for rule in RULES}
    assert all(re.fullmatch(r"[a-z_0-9A-Z]+", name) for name in known_fields())
    assert len(RULES) == len({rule.field for rule in RULES})


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.also or rule.test], ids=lambda rule: rule.field)
def test_each_relaxed_rule_names_a_test_that_exists(rule: Any) -> None:
    file, _, name = rule.test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), rule.test

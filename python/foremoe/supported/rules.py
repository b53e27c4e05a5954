"""Rules for configurations: by field, the values under which training under plans and shadow mode work.

attach() applies CONFIGURATION to Megatron-LM's configuration, the adapters apply TRAINER to their trainer's, and
foremoe.supported.check() applies both to a launch file. No other module has rules of its own for such values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from foremoe._errors import refuse


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a mode refuses a configuration. str() returns one line.

    Attributes:
        field: Name of the field, as in Megatron-LM or in the launch file.
        value: Its value.
        problem: Why this value is refused.
        remedy: What to change.
    """

    field: str
    value: Any
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.value!r}: {self.problem}; {self.remedy}"


@dataclasses.dataclass(frozen=True)
class Rule:
    """Values that are accepted for a field.

    Attributes:
        field: Name of the field.
        accepted: Its values. A field that is absent is always accepted.
        why: Why other values are refused.
        remedy: What to change, if not the value.
        shadow: The rule holds in shadow mode, too.
        also: Values that single trainers accept besides, by trainer.
        test: Test of a relaxed rule: it shows that the values of `also` work or, without `also`, that all values do.
    """

    field: str
    accepted: tuple[Any, ...]
    why: str
    _: dataclasses.KW_ONLY
    remedy: str = ""
    shadow: bool = False
    also: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    test: str = ""

    def enforced(self, mode: str) -> bool:
        """Returns whether the mode refuses any value."""
        return (mode != "shadow" or self.shadow) and not (self.test and not self.also)

    def accepts(self, value: Any, mode: str, trainer: str = "") -> bool:
        """Returns whether the value is accepted. trainer: Name as in launch files; "" if unknown."""
        value = plain(value)
        return not self.enforced(mode) or value is None or value in self.accepted + self.also.get(trainer, ())

    def reason(self, value: Any) -> Reason:
        """Returns the reason to refuse a value."""
        return Reason(self.field, value, self.why, self.remedy or f"set it to {self.expected}")

    @property
    def expected(self) -> str:
        """The accepted values in words."""
        words = " or ".join(repr(value) for value in self.accepted if value is not None) or "None"
        return words if self.shadow else f"{words}, or use shadow mode"


NONE, OFF = (None,), (None, False)  # 0 equals False
_VERL = ("verl", "verl-recipe")
_TESTS = "python/tests/torch/"

_ONE_PASS = "a plan runs all layers of a micro-batch in one pass, but its chunks alternate with other micro-batches'"

CONFIGURATION = (
    Rule("virtual_pipeline_model_parallel_size", (None, 1), _ONE_PASS),
    Rule("num_layers_per_virtual_pipeline_stage", NONE, _ONE_PASS),
    Rule("expert_tensor_parallel_size", (None, 1), "an expert must lie on one rank"),
    Rule("expert_gtp_weight_remat_size", (None, 1), "a parameter is then a part of an expert"),
    Rule("moe_token_dispatcher_type", ("allgather", "alltoall", "flex"), "a plan replaces the dispatcher"),
    # Tested with stand-ins for their kernels, never on a GPU.
    Rule("moe_flex_dispatcher_backend", ("deepep", "hybridep", "ncclep"), "a plan replaces the dispatcher"),
    Rule("moe_router_fusion", OFF, "a fused router ignores the routes of router replay"),
    Rule("moe_expert_capacity_factor", NONE, "rows are dropped by expert"),
    Rule("moe_pad_expert_input_to_capacity", OFF, "rows are padded by expert"),
    Rule("moe_router_padding_for_quantization", OFF, "rows are padded by expert"),
    Rule("moe_router_padding_for_fp8", OFF, "rows are padded by expert"),
    Rule(
        "moe_latent_size", NONE, "experts are then of another width than the layer",
        test=_TESTS + "test_megatron_latent.py::test_losses_and_gradients_match_megatrons_own_layers",
    ),
    Rule(
        "moe_shared_expert_overlap", OFF, "the dispatcher runs the shared experts then",
        test=_TESTS + "test_megatron.py::test_losses_and_gradients_match_unplanned_layers_and_models_are_unchanged",
    ),
    Rule("moe_use_legacy_grouped_gemm", OFF, "its experts are one parameter"),
    Rule("moe_single_grouped_weight", OFF, "all experts of a rank are one parameter then"),
    Rule("moe_single_grouped_bias", OFF, "all experts of a rank are one parameter then"),
    Rule("moe_paged_stash", OFF, "activations of guests are not stashed"),
    Rule("use_transformer_engine_op_fuser", OFF, "the experts' forward is replaced then"),
    Rule("transformer_impl", (None, "local", "transformer_engine"), "it is for inference", shadow=True),
    Rule("fp8", OFF, "guests would be quantised anew for each copy"),
    Rule("quant_recipe", NONE, "guests would not be quantised"),
    Rule("fp4", OFF, "guests would be quantised anew for each copy"),
    Rule("cuda_graph_impl", (None, "none"), "a graph replays sizes that the plan changes", shadow=True),
    Rule("enable_cuda_graph", OFF, "a graph replays sizes that the plan changes", shadow=True),
    Rule("external_cuda_graph", OFF, "a graph replays sizes that the plan changes", shadow=True),
    Rule("overlap_moe_expert_parallel_comm", OFF, "passes of two micro-batches run at once"),
    Rule("delay_wgrad_compute", OFF, "gradients of guests would come after they went home"),
    Rule("overlap_dispatch_backward_with_experts_wgrad", OFF, "gradients of guests would come too late"),
    Rule("mlp_chunks_for_training", (None, 1), "a layer then dispatches a micro-batch in parts"),
    Rule("batch_invariant_mode", OFF, "a plan changes the order in which a token's results are added"),
    Rule("fine_grained_activation_offloading", OFF, "activations of guests are not offloaded"),
    Rule("cpu_offloading", OFF, "activations of guests are not offloaded"),
    Rule(
        "mtp_num_layers", (None, 0),
        "NCCL-EP's context has one number of experts, but only planned layers have guest slots",
        remedy="use another moe_flex_dispatcher_backend, or shadow mode",
    ),
)  # fmt: skip
"""Fields of TransformerConfig. Fields that the Megatron version lacks are not checked."""

TRAINER = (
    Rule(
        "engine", ("megatron",), "its experts are not layers of Megatron-LM", shadow=True,
        remedy="train with the engine megatron, if the trainer has it for this model",
    ),
    Rule(
        "replay", ("R3",), "a plan needs the routes of the update before it begins",
        remedy="switch on router replay of the rollout's routes (R3), or use shadow mode",
        also=dict.fromkeys((*_VERL, "slime", "miles", "ms-swift"), ("R2",)),
        test=_TESTS + "test_verl_engine.py::test_losses_and_gradients_match_those_of_verl",
    ),
    Rule("offload_train_target", (None, "cpu"), "memory is then not backed up on the host"),
    Rule("lora_dropout", (None, 0), "guests would draw other random numbers than their homes"),
    Rule("npu", OFF, "ForeMoE runs on CUDA devices", shadow=True, remedy="train on GPUs"),
    Rule(
        "offload_train", OFF, "guests and groups for copies may not survive while the trainer's weights are offloaded",
        also={"slime": (True,), "miles": (True,)},
        test=_TESTS + "test_megatron_slime.py::test_planned_steps_run_between_sleeps_of_the_trainer",
    ),
    Rule(
        "lora_on_experts", OFF, "experts have parameters of adapters",
        also=dict.fromkeys((*_VERL, "NeMo-RL", "SkyRL"), (True,)),
        test=_TESTS + "test_megatron_lora.py"
        "::test_guests_compute_with_the_adapter_of_their_home_and_its_gradient_goes_home",
    ),
    Rule(
        "vision_config", OFF, "rows of images may have no routes",
        test=_TESTS + "test_verl_engine.py::test_losses_and_gradients_match_those_of_verl",
    ),
    Rule(
        "use_remove_padding", (None, True), "rows of padded batches have no routes",
        also=dict.fromkeys(_VERL, (False,)),
        test=_TESTS + "test_verl_engine.py::test_losses_and_gradients_match_those_of_verl",
    ),
    Rule(
        "moe_router_bias_update_rate", (None, 0), "rows that are not replayed count too",
        test=_TESTS + "test_verl_engine.py::test_rows_that_verl_does_not_replay_are_not_in_the_statistics_of_a_bias",
    ),
    Rule("sequence_parallel", (None, True), "replayed routes are split over tensor parallel ranks"),
    Rule("modelopt_qat", OFF, "guests would not be quantised"),
    Rule("dynamic_context_parallel", OFF, "its micro-batches are not known beforehand", shadow=True),
    Rule("hybrid_context_parallel", OFF, "its micro-batches are not known beforehand"),
    Rule("dsv4_contiguous_cp", OFF, "rows are split otherwise over ranks"),
    Rule("expert_tensor_parallel_num_weight_shards", (None, 1), "a parameter is then a part of an expert"),
    Rule("use_megatron_fsdp", OFF, "experts are sharded"),
    Rule("use_custom_fsdp", OFF, "experts are sharded"),
    Rule("use_torch_fsdp2", OFF, "experts are sharded"),
)  # fmt: skip
"""Facts about the trainer and fields of its configuration."""

RULES = CONFIGURATION + TRAINER


def plain(value: Any) -> Any:
    """Returns a value as JSON has it: "1", 1 and 1.0 are equal, as are "None" and None. Others stay as they are."""
    if isinstance(value, str):
        word = value.strip().lower()
        if word in ("none", "null", ""):
            return None
        if word in ("true", "false"):
            return word == "true"
        try:
            return float(word)
        except ValueError:
            return value
    return value


def relevant(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values without those that have no effect in this configuration."""
    is_flex = values.get("moe_token_dispatcher_type") == "flex"
    is_nccl = is_flex and values.get("moe_flex_dispatcher_backend") == "ncclep"
    effect = {"moe_flex_dispatcher_backend": is_flex, "mtp_num_layers": is_nccl}
    return {field: value for field, value in values.items() if effect.get(field, True)}


def broken(values: Mapping[str, Any], mode: str, trainer: str = "") -> Iterator[tuple[Rule, Any]]:
    """Yields each rule that these values break, with the value. Fields that are absent break no rule."""
    for rule in RULES:
        if not rule.accepts(values.get(rule.field), mode, trainer):
            yield rule, values[rule.field]


def expect(values: Mapping[str, Any], mode: str, trainer: str = "", *, of: str = "") -> None:
    """Raises InputError with the first field, its value and its accepted values, unless these values are accepted.

    Args:
        values: Values by field of RULES.
        mode: active or shadow. Any other mode of attach() counts as active.
        trainer: Name of the trainer as in launch files.
        of: Name of what has the field.
    """
    for rule, value in broken(values, mode, trainer):
        where = f" of {of}" if of else ""
        refuse(rule.field, f"{value!r}{where}; expected {rule.expected}, since {rule.why}")

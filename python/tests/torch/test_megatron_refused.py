"""Versions, configurations and arguments that foremoe.megatron refuses."""

from __future__ import annotations

import contextlib
import copy
import logging
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_training import MICRO_STEPS, Case, batch, begin_groups, counts_of, make_config, make_net, replay
from processes import RANKS, gather
from refusals import input_error, refusal
from torch.distributed import distributed_c10d

import foremoe
import foremoe.megatron
from foremoe.megatron.ending import explain

REFUSED = {
    "virtual_pipeline_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "expert_gtp_weight_remat_size": 2,
    "moe_expert_capacity_factor": 1.5, "moe_router_fusion": True, "moe_pad_expert_input_to_capacity": True,
    "moe_router_padding_for_quantization": True, "moe_single_grouped_weight": True, "moe_paged_stash": True,
    "use_transformer_engine_op_fuser": True,
    "transformer_impl": "inference_optimized", "fp8": "hybrid", "fp4": "e2m1", "cuda_graph_impl": "local",
    "overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True,
    "overlap_dispatch_backward_with_experts_wgrad": True, "fine_grained_activation_offloading": True,
    "mlp_chunks_for_training": 2, "batch_invariant_mode": True,
}  # fmt: skip

attach = foremoe.megatron.attach
SHAPE = "[3, 3, 8]"


def make(**fields: Any) -> Any:
    """Build a model, then set `fields` of its configuration, since the constructor might refuse them itself."""
    begin_groups(4)
    net = make_net(make_config(Case()))
    for layer in net.moe:
        layer.config = copy.copy(layer.config)
        for field, value in fields.items():
            setattr(layer.config, field, value)
    return net


@pytest.mark.parametrize("field", REFUSED)
def test_unsupported_configurations_are_rejected_and_most_allow_shadow_mode(rank: int, field: str) -> None:
    net = make(**{field: REFUSED[field]})
    assert input_error(lambda: attach(net)).startswith(f"{field}: {REFUSED[field]!r} of moe.0; expected ")
    if field not in ("cuda_graph_impl", "transformer_impl"):
        attach(net, mode="shadow").detach()


def test_a_group_that_divides_experts_is_rejected_whatever_the_configuration_says(rank: int) -> None:
    """initialize_model_parallel() takes the tensor-parallel size if it gets none for experts."""
    begin_groups(2, tensor_model_parallel_size=2)
    net = make_net(make_config(Case(ep=2, tp=2)))
    assert net.moe[0].config.expert_tensor_parallel_size == 1
    words = "expert_tensor_parallel_size: 2 in parallel_state; expected 1, since an expert must lie on one rank"
    assert input_error(lambda: attach(net)).startswith(words)
    attach(net, mode="shadow").detach()


def test_interleaved_stages_are_rejected_with_what_a_plan_lacks(rank: int) -> None:
    said = input_error(lambda: attach(make(virtual_pipeline_model_parallel_size=2)))
    assert "since a plan runs all layers of a micro-batch in one pass, but its chunks alternate" in said


@pytest.mark.parametrize(("fields", "words"), [
    ({"moe_token_dispatcher_type": "other"},
     "moe_token_dispatcher_type: 'other' of moe.0; expected 'allgather' or 'alltoall' or"),
    ({"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "other"},
     "moe_flex_dispatcher_backend: 'other' of moe.0; expected 'deepep' or 'hybridep'"),
    ({"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "ncclep", "mtp_num_layers": 1},
     "mtp_num_layers: 1 of moe.0; expected 0, or use shadow mode, since NCCL-EP's context"),
])  # fmt: skip
def test_unsupported_dispatchers_are_rejected_by_name(rank: int, fields: dict[str, Any], words: str) -> None:
    net = make(**fields)
    assert input_error(lambda: attach(net)).startswith(words)


@pytest.mark.parametrize(("arguments", "words"), [
    ({"mode": "loud"}, "mode: 'loud', expected active, static or shadow"),
    ({"residency": "resident", "mode": "static"}, "residency: 'resident', but mode='static' stands for residency="),
    ({"residency": "free"}, "residency: 'free', expected static, resident, shared or auto"),
    ({"guest_slots": -1}, "guest_slots: -1, expected an integer from 0 on"),
    ({"ranks_per_node": 0}, "ranks_per_node: 0, expected an integer from 1 on"),
    ({"mode": "shadow", "cluster": "z80"}, "cluster: "),
    ({"mode": "shadow", "model": "Mixtral-8x7B", "cluster": "h200"}, "nothing"),
    ({"mode": "shadow", "model": "Qwen3-30B-A3B", "cluster": "h100"}, "model: "),
    ({"rehome": 1}, "rehome: is not one of"),
    ({"policy": "eplb"}, "policy: eplb made a plan of residency free"),
    ({"policy": "best"}, "policy: 'best', expected one of"),
    ({"tolerance": 2.0}, "tolerance"),
    ({"depth": 0}, "depth: 0, expected an integer from 1 on"),
])  # fmt: skip
def test_invalid_arguments_are_rejected_by_name(rank: int, arguments: dict[str, Any], words: str) -> None:
    net = make()
    assert input_error(lambda: attach(net, **arguments)).startswith(words)


def test_objects_that_are_no_models_with_moe_layers_are_rejected(rank: int) -> None:
    net = make()
    for chunks, words in (
        (torch.nn.Linear(2, 2), "model_chunks: have no MoELayer"),
        ([], "model_chunks: there is none"),
        ([net, "net"], "model_chunks[1]: is a str; expected a module"),
    ):
        mode = "shadow" if chunks == [] else "active"
        said = refusal(lambda chunks=chunks, mode=mode: attach(chunks, mode=mode))
        assert said.startswith(f"InputError: {words}")


@pytest.mark.parametrize("version", ["0.15.3", "0.21.0", "1.0"])
def test_unsupported_megatron_versions_are_rejected(rank: int, version: str) -> None:
    net = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.core.__version__", version)
        with pytest.raises(ImportError, match=f"foremoe.megatron needs megatron-core 0.16 to 0.20, not {version}"):
            attach(net)


def test_shadow_mode_warns_of_a_newer_megatron_version_and_rejects_an_older_one(rank: int) -> None:
    net, warnings = make(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.core.__version__", "0.15.3")
        with pytest.raises(ImportError, match=r"needs megatron-core 0\.16 or newer in mode shadow, not 0\.15\.3"):
            attach(net, mode="shadow")
        patch.setattr("megatron.core.__version__", "0.21.0")
        patch.setattr(logging.getLogger("foremoe"), "handle", lambda record: warnings.append(record.getMessage()))
        for _ in range(2):
            attach(net, mode="shadow").detach()
    assert warnings == ["foremoe.megatron was tested with megatron-core 0.16 to 0.20, not with 0.21.0"]


def test_invalid_counts_and_plans_are_rejected_by_name(rank: int) -> None:
    replicas, good = attach(make(), ranks_per_node=2), counts_of(0, rank)
    for arguments, words in (
        ((good.double(),), f"counts: is float64 {SHAPE}; expected integers"),
        ((good[..., :-1],), "counts: is int64 [3, 3, 7]"),
        ((good[:0],), "counts: has no micro-step"),
        ((good, "rollout"), "phase: 'rollout'"),
    ):
        assert input_error(lambda arguments=arguments: replicas.plan(*arguments)).startswith(words)
    of_two_layers = attach(make_net(make_config(Case()), layers=2)).plan(good[:, :2])
    of = "layers, experts, ranks, guest slots and residency; not (3, 8, "
    for plan, words in (
        (None, "plan: is NoneType"),
        (of_two_layers, f"plan: has (2, 8, 4, 1, 'resident') {of}"),
        (attach(make(), guest_slots=2).plan(good), f"plan: has (3, 8, 4, 2, 'resident') {of}"),
        (attach(make(), residency="shared").plan(good), f"plan: has (3, 8, 4, 1, 'shared') {of}"),
    ):
        assert input_error(lambda plan=plan: replicas.step(plan).__enter__()).startswith(words)
    ours = [replicas.plan(good), replicas.plan(good.flip(0))][rank // 3]
    said = input_error(lambda: replicas.step(ours).__enter__())
    assert said.startswith("plan: ") and " on rank 3, " in said and " on ranks 0, 1, 2; expected the same" in said
    some = make()
    some.moe[1].experts.local_experts[0].requires_grad_(False)
    partly = attach(some)
    planned = partly.plan(good)
    said = input_error(lambda: partly.step(planned).__enter__())
    assert said.startswith("model_chunks: some experts of moe.1 are frozen and others not")


def test_a_model_rejected_on_one_rank_is_rejected_on_all_without_new_groups(rank: int) -> None:
    net, adapted = make(), make()
    for expert in adapted.moe[0].experts.local_experts:
        expert.linear_fc1.adapter = torch.nn.Parameter(torch.zeros(2))
    before = len(distributed_c10d._world.pg_names)
    words = "model_chunks: the experts of moe.0 have other parameters"
    assert input_error(lambda: attach(adapted)).startswith(words)
    for odd, act in (
        (1, lambda: attach(net, depth=0 if rank == 1 else 2)),
        (3, lambda: attach(adapted if rank == 3 else net)),
    ):
        said = gather(refusal(act).removeprefix("InputError: "))
        own = said[odd]
        assert said == [own if of == odd else f"rank {odd} refused: {own}" for of in range(RANKS)]
    assert len(distributed_c10d._world.pg_names) == before


def test_attach_does_not_copy_functions_in_the_configuration(rank: int) -> None:
    """The function's owner refers to a process group, as an optimizer does after the first training step."""
    begin_groups(4)

    class Optimizer:
        group = dist.group.WORLD

        def __init__(self) -> None:
            self.own = self.group

        def scale_loss(self, loss: Any) -> Any:
            return loss

    config = make_config(Case(), ffn_hidden_size=16)  # differs from an expert's, so SequentialMLP deep-copies it
    net = make_net(config)
    config.grad_scale_func = Optimizer().scale_loss
    attach(net)


@pytest.mark.parametrize("idle", [True, False])
def test_an_error_is_explained_only_if_the_device_is_idle(monkeypatch: pytest.MonkeyPatch, idle: bool) -> None:
    class OnCuda(torch.Tensor):
        device = torch.device("cuda")

    deviates = torch.ones(1, 1, dtype=torch.bool).as_subclass(OnCuda)
    step: Any = types.SimpleNamespace(
        on_mismatch="refuse", deviates=deviates, moes=[types.SimpleNamespace(name="moe.0")]
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(query=lambda: idle))
    error = RuntimeError("an exchange failed")
    explain(step, error)
    assert len(getattr(error, "__notes__", [])) == int(idle)


def test_a_model_with_a_frozen_layer_trains_as_without_a_plan(rank: int) -> None:
    """If a layer's experts and input are frozen, gradients equal those of the same model without a plan."""
    gradients = []
    for planned in (False, True):
        net = make()
        net.mix[0].requires_grad_(False)
        net.moe[0].experts.requires_grad_(False)
        replicas = attach(net, ranks_per_node=2) if planned else None
        with replicas.step(replicas.plan(counts_of(0, rank))) if replicas is not None else contextlib.nullcontext():
            for m in range(MICRO_STEPS):
                replay(net, 0, m)
                net(batch(0, m).detach()).square().sum().backward()
        gradients.append([p.grad for p in net.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 0
    assert all(torch.allclose(a, b, rtol=1e-11, atol=1e-12) for a, b in zip(*gradients, strict=True))


RUNNING = "a step is running"


@pytest.mark.parametrize(("act", "words"), [
    ("plan", f"{RUNNING}: end it before plan()"),
    ("step", f"{RUNNING}: end it before step()"),
    ("backward", ", and of the phase recompute forwards alone"),
])  # fmt: skip
def test_invalid_calls_inside_a_step_are_rejected(rank: int, act: str, words: str) -> None:
    net = make()
    replicas = attach(net, ranks_per_node=2)
    plan = replicas.plan(counts_of(0, rank), phase="recompute")
    with pytest.raises(RuntimeError) as raised, replicas.step(plan):
        replay(net, 0, 0)
        y = net(batch(0, 0))
        {"plan": lambda: replicas.plan(plan), "step": replicas.step(plan).__enter__, "backward": y.sum().backward}[
            act
        ]()
    assert str(raised.value).endswith(words)


def test_nested_steps_and_detach_inside_a_shadow_step_are_rejected(rank: int) -> None:
    shadow = attach(make(), mode="shadow")
    with shadow.step():
        for act in (shadow.step().__enter__, shadow.detach):
            with pytest.raises(RuntimeError, match=f"^{RUNNING}: end it before (step|detach)"):
                act()
    shadow.detach()


def test_shadow_mode_accepts_a_stage_without_moe_layers(rank: int) -> None:
    begin_groups(4)
    replicas = attach(torch.nn.Linear(2, 2), mode="shadow")
    with replicas.step():
        pass
    replicas.detach()
    replicas.detach()
    assert replicas.metrics() == {}

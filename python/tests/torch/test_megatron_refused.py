"""What foremoe.megatron refuses: versions, configurations and arguments.

One spawn of four processes runs all checks.
"""

from __future__ import annotations

import contextlib
import copy
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_training import (
    EXPERTS,
    LAYERS,
    MICRO_STEPS,
    Case,
    batch,
    begin_groups,
    counts_of,
    make_config,
    make_net,
    replay,
)
from torch.distributed import distributed_c10d

import foremoe
import foremoe.megatron
from foremoe.megatron.ending import explain

REFUSED = {
    "virtual_pipeline_model_parallel_size": 2,
    "expert_tensor_parallel_size": 2,
    "expert_gtp_weight_remat_size": 2,
    "moe_expert_capacity_factor": 1.5,
    "moe_router_fusion": True,
    "moe_pad_expert_input_to_capacity": True,
    "moe_router_padding_for_quantization": True,
    "moe_latent_size": 64,
    "moe_shared_expert_overlap": True,
    "moe_single_grouped_weight": True,
    "moe_paged_stash": True,
    "use_transformer_engine_op_fuser": True,
    "transformer_impl": "inference_optimized",
    "fp8": "hybrid",
    "fp4": "e2m1",
    "cuda_graph_impl": "local",
    "overlap_moe_expert_parallel_comm": True,
    "delay_wgrad_compute": True,
    "overlap_dispatch_backward_with_experts_wgrad": True,
    "fine_grained_activation_offloading": True,
    "mtp_num_layers": 1,
}

BASE: dict[int, Any] = {}


def _with(net: Any, **fields: Any) -> Any:
    """The same layers, with fields of their configuration set, which the constructor might refuse itself."""
    for layer in net.moe:
        config = copy.copy(BASE.setdefault(id(net), layer.config))
        for field, value in fields.items():
            setattr(config, field, value)
        layer.config = config
    return net


def refusal(of: Any, *args: Any, **kwargs: Any) -> str:
    try:
        of(*args, **kwargs)
    except (foremoe.InputError, ImportError) as error:
        return f"{getattr(error, 'field', 'import')}: {error}"
    return "nothing"


def refusals() -> dict[str, str]:
    import megatron.core

    attach = foremoe.megatron.attach
    case = Case()
    net = make_net(make_config(case))
    found = {
        "no MoE layer": refusal(attach, torch.nn.Linear(2, 2)),
        "mode": refusal(attach, net, mode="loud"),
        "mode static": refusal(attach, net, residency="resident", mode="static"),
        "residency": refusal(attach, net, residency="free"),
        "guest_slots": refusal(attach, net, guest_slots=-1),
        "ranks_per_node": refusal(attach, net, ranks_per_node=0),
        "no chunk": refusal(attach, [], mode="shadow"),
        "no module": refusal(attach, [net, "net"]),
        "cluster": refusal(attach, net, mode="shadow", cluster="z80"),
        "model": refusal(attach, net, mode="shadow", model="Mixtral-8x7B", cluster="h200"),
        "model of other experts": refusal(attach, net, mode="shadow", model="Qwen3-30B-A3B"),
        "option": refusal(attach, net, rehome=1),
        "dispatcher": refusal(attach, _with(net, moe_token_dispatcher_type="other")),
        "flex": refusal(attach, _with(net, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="other")),
    }
    for field, value in REFUSED.items():
        found[field] = refusal(attach, _with(net, **{field: value}))
        if field not in ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph", "transformer_impl"):
            shadowed = attach(_with(net, **{field: value}), mode="shadow")
            shadowed.detach()
    with pytest.MonkeyPatch.context() as patch:
        for version in ("0.15.3", "0.20.0", "1.0"):
            patch.setattr(megatron.core, "__version__", version)
            found[f"version {version}"] = refusal(attach, net)
    replicas = attach(_with(net), ranks_per_node=2)
    good = counts_of(0, dist.get_rank())
    negative = good.clone()
    negative[1, 2, 3] = -1
    found |= {
        "counts of another dtype": refusal(replicas.plan, good.double()),
        "counts of another shape": refusal(replicas.plan, good[..., :-1]),
        "counts of no micro-step": refusal(replicas.plan, good[:0]),
        "negative counts": refusal(replicas.plan, negative.numpy() if dist.get_rank() == 1 else good),
        "phase": refusal(replicas.plan, good, phase="rollout"),
        "micro-steps": refusal(replicas.plan, good[: 2 + dist.get_rank() % 2]),
        "no plan": refusal(lambda: replicas.step(None).__enter__()),
    }
    other = attach(make_net(make_config(case), layers=2))
    few = other.plan(good[:, :2])
    found["plan of another shape"] = refusal(lambda: replicas.step(few).__enter__())
    of_two = attach(_with(net), guest_slots=2).plan(good)
    found["plan of other guest slots"] = refusal(lambda: replicas.step(of_two).__enter__())
    of_shared = attach(_with(net), residency="shared").plan(good)
    found["plan of another residency"] = refusal(lambda: replicas.step(of_shared).__enter__())
    different = [replicas.plan(good), replicas.plan(good.flip(0))][dist.get_rank() // 3]
    found["plans of ranks"] = refusal(lambda: replicas.step(different).__enter__())
    found["seeds of ranks"] = refusal(attach, _with(net), seed=dist.get_rank() // 2)
    found["modes of ranks"] = refusal(attach, _with(net), mode=("shadow", "active")[dist.get_rank() // 3])
    found["option of a rank"] = refusal(attach, _with(net), **({"tolerance": 0.1} if dist.get_rank() == 3 else {}))
    some = make_net(make_config(case))
    some.moe[1].experts.local_experts[0].requires_grad_(False)
    partly = attach(some)
    planned = partly.plan(good)
    found["some experts frozen"] = refusal(lambda: partly.step(planned).__enter__())
    adapted = make_net(make_config(case))
    for expert in adapted.moe[0].experts.local_experts:
        expert.linear_fc1.adapter = torch.nn.Parameter(torch.zeros(2))
    before = len(distributed_c10d._world.pg_names)
    found["adapters"] = refusal(attach, adapted)
    found["depth of a rank"] = refusal(attach, _with(net), depth=0 if dist.get_rank() == 1 else 2)
    found["adapters of a rank"] = refusal(attach, adapted if dist.get_rank() == 3 else _with(net))
    found["groups left"] = str(len(distributed_c10d._world.pg_names) - before)
    found["a trainer's functions"] = refusal(attach, net_of_a_trainer(case))
    found["depths of ranks"] = refusal(attach, _with(net), depth=1 + dist.get_rank() % 2)
    found["policy"] = refusal(attach, _with(net), policy="eplb")
    found["no such policy"] = refusal(attach, _with(net), policy="best")
    found["value of an option"] = refusal(attach, _with(net), tolerance=2.0)
    found["depth"] = refusal(attach, _with(net), depth=0)
    return found


def net_of_a_trainer(case: Case) -> Any:
    """Its config has a function whose owner holds a process group, as after the first training step."""

    class Optimizer:
        group = dist.group.WORLD

        def __init__(self) -> None:
            self.own = self.group

        def scale_loss(self, loss: Any) -> Any:
            return loss

    config = make_config(
        case, ffn_hidden_size=16
    )  # other than an expert's: then SequentialMLP copies its config deeply
    net = make_net(config)
    config.grad_scale_func = Optimizer().scale_loss
    return net


def frozen() -> bool:
    """A layer whose experts and input are frozen: whether gradients are those of the same model without a plan."""
    begin_groups(4)
    gradients = []
    for planned in (False, True):
        net = make_net(make_config(Case()))
        net.mix[0].requires_grad_(False)
        net.moe[0].experts.requires_grad_(False)
        replicas = foremoe.megatron.attach(net, ranks_per_node=2) if planned else None
        counts = counts_of(0, dist.get_rank())
        with replicas.step(replicas.plan(counts)) if replicas is not None else contextlib.nullcontext():
            for m in range(MICRO_STEPS):
                replay(net, 0, m)
                net(batch(0, m).detach()).square().sum().backward()
        gradients.append([p.grad for p in net.parameters() if p.grad is not None])
    return len(gradients[0]) == len(gradients[1]) > 0 and all(
        torch.allclose(a, b, rtol=1e-11, atol=1e-12) for a, b in zip(*gradients, strict=True)
    )


def inside_a_step() -> list[str]:
    """What plan(), step() and a backward pass say in a step in which they do not belong."""
    said = []
    acts: list[Any] = [lambda of, y: replicas.plan(of), lambda of, y: replicas.step(of).__enter__()]
    for act in (*acts, lambda of, y: y.sum().backward()):
        begin_groups(4)
        net = make_net(make_config(Case()))
        replicas = foremoe.megatron.attach(net, ranks_per_node=2)
        plan = replicas.plan(counts_of(0, dist.get_rank()), phase="recompute")
        with pytest.raises(RuntimeError) as raised, replicas.step(plan):
            replay(net, 0, 0)
            act(plan, net(batch(0, 0)))
        said.append(str(raised.value))
    shadow = foremoe.megatron.attach(net, mode="shadow")
    with shadow.step():
        for act in (shadow.step().__enter__, shadow.detach):
            with pytest.raises(RuntimeError) as raised:
                act()
            said.append(str(raised.value))
    shadow.detach()
    return said


def stage_of_dense_layers() -> dict[str, float]:
    replicas = foremoe.megatron.attach(torch.nn.Linear(2, 2), mode="shadow")
    with replicas.step():
        pass
    replicas.detach()
    replicas.detach()
    return replicas.metrics()


def work(rank: int) -> dict[str, Any]:
    begin_groups(4)
    return {
        "refused": refusals(),
        "frozen": frozen(),
        "inside": inside_a_step(),
        "dense": stage_of_dense_layers(),
    }


@pytest.mark.parametrize("field", REFUSED)
def test_configurations_that_cannot_be_served_are_refused_by_name(found: list[dict[str, Any]], field: str) -> None:
    for of in found:
        assert of["refused"][field].startswith(f"{field}: {field}: {REFUSED[field]!r} of moe.0; expected ")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no MoE layer", "model_chunks: model_chunks: have no MoELayer"),
        ("mode", "mode: mode: 'loud', expected active, static or shadow"),
        ("mode static", "residency: residency: 'resident', but mode='static' stands for residency='static'"),
        ("residency", "residency: residency: 'free', expected one of static, resident, shared"),
        ("guest_slots", "guest_slots: guest_slots: -1, expected an integer from 0 on"),
        ("ranks_per_node", "ranks_per_node: ranks_per_node: 0, expected an integer from 1 on"),
        ("no chunk", "model_chunks: model_chunks: there is none"),
        ("no module", "model_chunks: model_chunks[1]: is a str; expected a module"),
        ("cluster", "cluster: "),
        ("model", "nothing"),
        ("model of other experts", "model: "),
        ("option", "rehome: rehome: is none of"),
        (
            "dispatcher",
            "moe_token_dispatcher_type: moe_token_dispatcher_type: 'other' of moe.0; expected allgather or alltoall or",
        ),
        (
            "flex",
            "moe_flex_dispatcher_backend: moe_flex_dispatcher_backend: 'other' of moe.0; expected deepep or hybridep",
        ),
        ("version 0.15.3", "import: foremoe.megatron needs megatron-core 0.16 to 0.19, not 0.15.3"),
        ("version 0.20.0", "import: foremoe.megatron needs megatron-core 0.16 to 0.19, not 0.20.0"),
        ("version 1.0", "import: foremoe.megatron needs megatron-core 0.16 to 0.19, not 1.0"),
        (
            "counts of another dtype",
            f"counts: counts: is float64 [{MICRO_STEPS}, {LAYERS}, {EXPERTS}]; expected integers",
        ),
        ("counts of another shape", f"counts: counts: is int64 [{MICRO_STEPS}, {LAYERS}, {EXPERTS - 1}]"),
        ("counts of no micro-step", "counts: counts: has no micro-step"),
        ("phase", "phase: phase: 'rollout'"),
        ("no plan", "plan: plan: is NoneType"),
        (
            "plan of another shape",
            "plan: plan: has (2, 8, 4, 1, 'resident') layers, experts, ranks, guest slots and residency; not (3, 8, ",
        ),
        ("plan of other guest slots", "plan: plan: has (3, 8, 4, 2, 'resident') layers, "),
        ("plan of another residency", "plan: plan: has (3, 8, 4, 1, 'shared') layers, "),
        ("plans of ranks", "plan: plan: ranks "),
        ("some experts frozen", "model_chunks: model_chunks: some experts of moe.1 are frozen and others not"),
        ("adapters", "model_chunks: model_chunks: the experts of moe.0 have other parameters"),
        ("a trainer's functions", "nothing"),
        ("depths of ranks", "depth: depth: 1 on ranks 0, 2; 2 on ranks 1, 3; expected the same on all ranks"),
        ("seeds of ranks", "seed: seed: 0 on ranks 0, 1; 1 on ranks 2, 3; expected"),
        ("modes of ranks", "mode: mode: 'active' on rank 3, 'shadow' on ranks 0, 1, 2; expected"),
        ("option of a rank", "tolerance: tolerance: 0.1 on rank 3, not given on ranks 0, 1, 2; expected"),
        ("policy", "policy: policy: eplb made a plan of residency free"),
        ("no such policy", "policy: policy: 'best', expected one of"),
        ("value of an option", "tolerance: tolerance"),
        ("depth", "depth: depth: 0, expected an integer from 1 on"),
    ],
)
def test_bad_arguments_are_refused_by_name(found: list[dict[str, Any]], what: str, words: str) -> None:
    for of in found:
        assert of["refused"][what].startswith(words), of["refused"][what]


def test_all_ranks_refuse_what_one_refuses(found: list[dict[str, Any]]) -> None:
    refused = [of["refused"]["negative counts"] for of in found]
    own = "counts[1, 2, 3]: -1 rows, expected 0 to 2147483647"
    assert refused == [f"counts: {own if rank == 1 else f'rank 1 refused: {own}'}" for rank in range(4)]
    for of in found:
        assert of["refused"]["micro-steps"].startswith("counts: counts: 2 micro-steps on ranks 0, 2; 3 micro-steps on ")


def test_all_ranks_refuse_a_model_that_one_refuses_and_make_no_group(found: list[dict[str, Any]]) -> None:
    for what, rank in (("depth of a rank", 1), ("adapters of a rank", 3)):
        field, own = found[rank]["refused"][what].split(": ", 1)
        for r, of in enumerate(found):
            assert of["refused"][what] == f"{field}: {own if r == rank else f'rank {rank} refused: {own}'}"
    assert all(of["refused"]["groups left"] == "0" for of in found)


@pytest.mark.parametrize("idle", [True, False])
def test_an_error_is_explained_only_where_that_waits_for_no_device(monkeypatch: pytest.MonkeyPatch, idle: bool) -> None:
    class OnCuda(torch.Tensor):
        device = torch.device("cuda")

    others = torch.ones(1, 1, dtype=torch.bool).as_subclass(OnCuda)
    step: Any = types.SimpleNamespace(others=others, moes=[types.SimpleNamespace(name="moe.0")])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(query=lambda: idle))
    error = RuntimeError("an exchange failed")
    explain(step, error)
    assert len(getattr(error, "__notes__", [])) == int(idle)


def test_a_frozen_layer_has_its_turns(found: list[dict[str, Any]]) -> None:
    assert all(of["frozen"] for of in found)


def test_what_does_not_belong_in_a_step_is_named(found: list[dict[str, Any]]) -> None:
    running = "a step is running: plan() and step() of another belong before or after it"
    for of in found:
        assert [of["inside"][i] for i in (0, 1, 3, 4)] == [running, running, *2 * ["a step is running"]]
        assert of["inside"][2].endswith(", and of the phase recompute forwards alone")


def test_shadow_mode_serves_a_pipeline_stage_of_dense_layers(found: list[dict[str, Any]]) -> None:
    assert all(of["dense"] == {} for of in found)

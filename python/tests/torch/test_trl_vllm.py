"""trl's GRPO with vLLM in colocate mode, in two gloo processes: training under a plan matches trl's own trainer.

A stand-in for vLLM samples both runs' completions from the same seeds.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import vllm_stand_in
from processes import begin_rank, results_of

RANKS, STEPS = 2, 3
LOGGED = ("loss", "grad_norm", "reward", "sampling/importance_sampling_ratio/mean")


def work(rank: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    vllm_stand_in.install()
    import torch
    import torch.distributed as dist
    import trl
    from grpo import make_model, make_trainer

    import foremoe.trl

    begin_rank(rank, RANKS, folder)
    model = f"{folder}/model"
    if rank == 0:
        make_model(mlp_only_layers=[0], num_hidden_layers=3).save_pretrained(model)
    dist.barrier()
    of_vllm = {"use_vllm": True, "vllm_mode": "colocate", "max_steps": STEPS, "router_aux_loss_coef": 0.0}
    found: dict[str, Any] = {}

    def train(kind: Any, name: str) -> Any:
        trainer = make_trainer(kind, f"{folder}/{name}", model, **of_vllm)
        trainer.train()
        names = [*LOGGED, *(key for key in trainer.state.log_history[0] if key.startswith("foremoe/"))]
        found[name] = {key: [entry[key] for entry in trainer.state.log_history if key in entry] for key in names}
        return trainer

    plain = train(trl.GRPOTrainer, "plain")
    vllm_stand_in.LLM.up_first = True
    planned = train(foremoe.trl.GRPOTrainer, "planned")
    generator = planned.vllm_generation.llm.model.state_dict()
    planned.vllm_generation.sync_weights()
    whole = planned.expert_parallel.whole_state_dict(planned.model)
    found["published"] = whole.keys() == generator.keys() and all(
        torch.equal(whole[name], value) for name, value in generator.items()
    )
    found["copies"] = planned.generator, planned.vllm_generation.llm.syncs, plain.vllm_generation.llm.syncs

    def refusal(of: Any) -> str:
        try:
            of()
        except foremoe.InputError as error:
            return str(error)
        return ""

    llm = planned.vllm_generation.llm
    llm.routes_of = lambda ids: None
    found["without routes"] = refusal(planned.train)
    llm.ignored, planned.vllm_generation._weights_arrive = "model.norm.weight", False
    found["not reloaded"] = refusal(planned.vllm_generation.sync_weights)
    found["names"] = names_of_entries(planned.vllm_generation, f"{folder}/glm")
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def names_of_entries(vllm: Any, folder: str) -> tuple[set[str], set[str]]:
    """Returns the names that RoutedVLLM yields of a model with biases of routers, and those in transformers' file."""
    import torch.distributed as dist
    import transformers
    from grpo import SIZES
    from safetensors.torch import load_file

    import foremoe.hf
    import foremoe.torch

    sizes = SIZES | {"num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 8}
    vllm.model = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**sizes))
    vllm.model.save_pretrained(folder)  # rank 0 writes
    dist.barrier()
    expected = set(load_file(f"{folder}/model.safetensors"))
    vllm.expert_parallel = foremoe.torch.ExpertParallel(foremoe.hf.expert_layers(vllm.model), guest_slots=1)
    return {name for name, _ in vllm._iter_named_params()}, expected


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return results_of(RANKS, work)


@pytest.mark.parametrize("name", LOGGED)
def test_steps_log_the_same_values_as_trl_with_vllm(found: list[dict[str, Any]], name: str) -> None:
    for of in found:
        assert len(of["planned"][name]) == STEPS
        assert of["planned"][name] == pytest.approx(of["plain"][name], rel=1e-4, abs=1e-6)


def test_routes_of_vllm_are_replayed_under_a_plan(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert max(of["planned"]["foremoe/mismatch"]) < 0.01
        assert min(of["planned"]["foremoe/rho_vanilla"]) > 1.05 > max(of["planned"]["foremoe/rho_planned"])


def test_vllm_has_the_only_whole_copy_and_gets_the_experts_of_all_ranks(found: list[dict[str, Any]]) -> None:
    for of in found:
        generator, syncs, of_trl = of["copies"]
        assert generator is None and of["published"]
        assert syncs == of_trl + 1, "and this test's"


def test_completions_without_routes_are_refused(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["without routes"].startswith("sequence 0, segment 0: routed_experts: is missing")


def test_a_weight_that_vllm_does_not_reload_is_refused_by_name(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["not reloaded"].startswith("model: vLLM does not reload model.norm.weight of a Qwen3MoeForCausalLM")


def test_vllm_gets_all_entries_of_the_models_files(found: list[dict[str, Any]]) -> None:
    for of in found:
        names, expected = of["names"]
        assert names == expected and any(name.endswith("e_score_correction_bias") for name in names)

"""State dicts and files saved from a spread model equal those of the unspread model."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import tempfile
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from refusals import refusal
from safetensors.torch import load_file
from test_hf import BASE, EXPERTS, FAMILIES, MOE

from foremoe.hf import expert_layers
from foremoe.torch import ExpertParallel

ALL: dict[str, dict[str, Any]] = FAMILIES | {
    "Qwen3Moe, tied": FAMILIES["Qwen3Moe"] | {"tie_word_embeddings": True},
    "Qwen3Moe, bfloat16": FAMILIES["Qwen3Moe"],
    "Lfm2Moe": MOE
    | {"num_experts": EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "NemotronH": MOE
    | {
        "n_routed_experts": EXPERTS, "layers_block_type": ["moe", "full_attention", "linear_attention", "moe"],
        "head_dim": 16, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
        "chunk_size": 8, "moe_shared_expert_intermediate_size": 16, "num_hidden_layers": 4,
    },
}  # fmt: skip
WITH_ROUTER_BIAS = ("DeepseekV3", "Glm4Moe", "Lfm2Moe", "NemotronH")
TIED = ("Qwen3Moe, tied", "Lfm2Moe")


def make_model(case: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    family = case.split(",")[0]
    config_of = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = config_of(**BASE | ALL[case])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for name, buffer in model.named_buffers():
        if "bias" in name:  # a router's bias
            buffer.normal_(std=0.01)
    return model.bfloat16() if "bfloat16" in case else model


def spread(model: Any, wrapper: str | None = None) -> tuple[Any, Any]:
    ep = ExpertParallel(expert_layers(model), ranks_per_node=2)
    return ep, ep.wrap(model, wrapper)


@torch.no_grad()
def train(model: Any) -> None:
    """Changes all parameters and the biases of routers."""
    for p in model.parameters():
        p.mul_(1.5)
    for name, buffer in model.named_buffers():
        if "bias" in name:
            buffer.add_(0.25)


def first_difference(these: dict[str, Any], those: dict[str, Any]) -> str:
    """Returns the first entry that differs, "order" if only the order does, or "" if both are equal."""
    for name in [*those, *these]:
        if name not in these or name not in those or not torch.equal(these[name], those[name]):
            return name
    return "" if list(these) == list(those) else "order"


def shared_tensors(state: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs of names whose tensors share memory."""
    first: dict[int, str] = {}
    return [(first[of.data_ptr()], name) for name, of in state.items() if first.setdefault(of.data_ptr(), name) != name]


def files(folder: str) -> dict[str, Any]:
    """Reads the tensors of safetensors files, and the text of JSON files."""
    found: dict[str, Any] = {}
    for name in sorted(os.listdir(folder)):
        path = pathlib.Path(folder, name)
        if name.endswith(".safetensors"):
            found |= {f"{name}: {key}": value for key, value in load_file(path).items()}
        else:
            of = json.loads(path.read_text())
            of.get("metadata", {}).pop("total_size", None)  # transformers counts shared memory once
            found[name] = torch.tensor(list(json.dumps(of).encode()))
    return found


@functools.cache
def folder() -> str:
    """Creates a temporary folder that all ranks share."""
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    return folders[0]


@pytest.mark.parametrize("wrapper", [None, "fsdp2"])
@pytest.mark.parametrize("case", ALL)
def test_whole_states_and_files_equal_those_of_the_unspread_model_and_can_be_loaded(
    rank: int, case: str, wrapper: str | None
) -> None:
    eager, model = make_model(case), make_model(case)
    ep, trained = spread(model, wrapper)
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(rank))
    for of in (eager, model):
        train(of)
    with torch.no_grad():
        trained(ids, use_cache=False)  # leaves the parameters of FSDP2's root unsharded
    expected = eager.state_dict()
    state = ep.whole_state_dict(trained)
    assert first_difference(state, expected) == ""
    assert shared_tensors(state) == shared_tensors(expected) and (shared_tensors(state) or case not in TIED)
    fresh = make_model(case, seed=1)
    fresh.load_state_dict(state)
    with torch.no_grad():
        logits = [of(ids, use_cache=False).logits for of in (eager, fresh)]
    assert torch.equal(*logits)
    on_rank_0 = ep.whole_state_dict(trained, rank0_only=True, cpu_offload=True)
    assert first_difference(on_rank_0, expected) == "" if rank == 0 else not on_rank_0

    where = f"{folder()}/{case}, {wrapper}"
    ep.save_pretrained(trained, where, max_shard_size="20KB")
    if rank == 0:
        eager.save_pretrained(f"{where}, eager", max_shard_size="20KB")
    dist.barrier()
    assert first_difference(files(where), files(f"{where}, eager")) == ""
    assert first_difference(type(eager).from_pretrained(where).state_dict(), expected) == ""

    other = make_model(case, seed=2)
    of_other, wrapped = spread(other, wrapper)
    of_other.load_whole_state_dict(wrapped, state)
    assert first_difference(of_other.whole_state_dict(wrapped), expected) == ""
    with torch.no_grad():
        difference = (wrapped(ids, use_cache=False).logits - logits[0]).abs().max()
    assert float(difference) < (0.1 if "bfloat16" in case else 1e-3)
    for of in (ep, of_other):
        of.detach()


def test_families_with_router_biases_have_them_as_buffers() -> None:
    for case in WITH_ROUTER_BIAS:
        assert any("bias" in name for name, _ in make_model(case).named_buffers()), case


def test_save_pretrained_of_a_spread_model_is_rejected_and_names_the_replacement(rank: int) -> None:
    """Also checks that model.save_pretrained() accepts a whole state, and that detach() restores the unspread state."""
    model = make_model("Qwen3Moe")
    ep = ExpertParallel(expert_layers(model))
    own, where = model.state_dict(), f"{folder()}/report"
    for save in (model.save_pretrained, model.model.save_pretrained, partial(model.save_pretrained, state_dict=own)):
        assert "ep.checkpoints.save_pretrained(model, folder)" in refusal(lambda save=save: save(where))
        assert not os.path.exists(where)
    dist.barrier()
    whole = ep.whole_state_dict(model)
    model.save_pretrained(f"{where}/{rank}", state_dict=whole)
    ddp = ep.wrap(model, "ddp")
    ddp.load_state_dict(ddp.state_dict())
    assert first_difference(ep.whole_state_dict(ddp), whole) == ""
    ep.detach()
    assert first_difference(model.state_dict(), make_model("Qwen3Moe").state_dict()) == ""
    model.save_pretrained(f"{where}/detached/{rank}")


def test_partial_states_and_other_invalid_arguments_are_rejected_on_all_ranks(rank: int) -> None:
    model, other = make_model("Qwen3Moe"), make_model("Qwen3Moe")
    ep = ExpertParallel(expert_layers(model))
    own, whole = model.state_dict(), ep.whole_state_dict(model)
    expert = "model.layers.0.mlp.experts.down_proj"
    pathlib.Path(folder(), "file").touch()
    load = partial(ep.load_whole_state_dict, model)
    lacks = "model: it lacks 4 of the 4 expert parameters"
    for act, words in (
        (lambda: ep.whole_state_dict(other), f"InputError: {lacks}"),
        (lambda: ep.whole_state_dict(other if rank == 2 else model), lacks),
        (lambda: ep.whole_state_dict(model, rank0_only=rank == 0),
         "InputError: rank0_only: True on rank 0, False on ranks 1, 2, 3"),
        (lambda: ep.whole_state_dict(whole), "InputError: model: is a dict, expected a torch.nn.Module"),
        (lambda: load({k: whole[k] for k in list(whole)[1:]}),
         "InputError: state: model.embed_tokens.weight is missing"),
        (lambda: load(whole | {"more": torch.ones(1)}), "InputError: state: more is not an entry"),
        (lambda: load(whole | {expert: own[expert].to_local()}),
         f"InputError: state: {expert} is (4, 32, 16), expected (16, 32, 16)"),
        (lambda: load(own),
         "InputError: state: model.layers.0.mlp.experts.gate_up_proj is (16, 32, 32) in parts, expected"),
        (lambda: ep.save_pretrained(model, f"{folder()}/file"), "is not a folder"),
        (lambda: ep.save_pretrained(model, f"{folder()}/file/model"), "Not a directory"),
        (lambda: ep.save_pretrained(model, f"{folder()}/option", state_dict=own),
         "InputError: state_dict: is not an option of ep.checkpoints.save_pretrained"),
    ):  # fmt: skip
        said = refusal(act)
        assert words in said, said

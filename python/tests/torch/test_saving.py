"""What leaves a spread model for files and rollouts is what the unspread model would give.

One spawn of four processes runs all families; each rank reports what it found.
"""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from refusals import refusal
from safetensors.torch import load_file
from test_hf import BASE, EXPERTS, FAMILIES, MOE
from training import on_all_ranks

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
WRAPPERS = (None, "fsdp2")


def make_model(case: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    family = case.split(",")[0]
    config_of = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = config_of(**BASE | ALL[case])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for name, buffer in model.named_buffers():
        if "bias" in name:  # of a router
            buffer.normal_(std=0.01)
    return model.bfloat16() if "bfloat16" in case else model


def spread(model: Any, wrapper: str | None = None) -> tuple[Any, Any]:
    ep = ExpertParallel(expert_layers(model), ranks_per_node=2)
    return ep, ep.wrap(model, wrapper)


@torch.no_grad()
def train(model: Any) -> None:
    """Changes all of its parameters, and the biases of its routers."""
    for p in model.parameters():
        p.mul_(1.5)
    for name, buffer in model.named_buffers():
        if "bias" in name:
            buffer.add_(0.25)


def equal(these: dict[str, Any], those: dict[str, Any]) -> str:
    """The first entry that differs; empty where none does."""
    for name in [*those, *these]:
        if name not in these or name not in those or not torch.equal(these[name], those[name]):
            return name
    return "" if list(these) == list(those) else "order"


def tied(state: dict[str, Any]) -> list[tuple[str, str]]:
    """The names of tensors in the same memory."""
    first: dict[int, str] = {}
    return [(first[of.data_ptr()], name) for name, of in state.items() if first.setdefault(of.data_ptr(), name) != name]


def files(folder: str) -> dict[str, Any]:
    """Their tensors, and the words of all other files."""
    found: dict[str, Any] = {}
    for name in sorted(os.listdir(folder)):
        path = pathlib.Path(folder, name)
        if name.endswith(".safetensors"):
            found |= {f"{name}: {key}": value for key, value in load_file(path).items()}
        else:
            of = json.loads(path.read_text())
            of.get("metadata", {}).pop("total_size", None)  # transformers counts tensors in the same memory once
            found[name] = torch.tensor(list(json.dumps(of).encode()))
    return found


def save_family(rank: int, case: str, wrapper: str | None, folder: str) -> dict[str, Any]:
    eager, model = make_model(case), make_model(case)
    ep, trained = spread(model, wrapper)
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(rank))
    for of in (eager, model):
        train(of)
    with torch.no_grad():
        trained(ids, use_cache=False)  # leaves FSDP2's root with whole parameters
    expected = eager.state_dict()
    state = ep.whole_state_dict(trained)
    found: dict[str, Any] = {"state": equal(state, expected)}
    found["tied"] = tied(state)
    found["tied, expected"] = tied(expected)
    fresh = make_model(case, seed=1)
    fresh.load_state_dict(state)
    with torch.no_grad():
        logits = [of(ids, use_cache=False).logits for of in (eager, fresh)]
    found["logits"] = torch.equal(*logits)
    on_rank_0 = ep.whole_state_dict(trained, rank0_only=True, cpu_offload=True)
    found["rank 0"] = equal(on_rank_0, expected) if rank == 0 else len(on_rank_0)

    where = f"{folder}/{case}, {wrapper}"
    ep.save_pretrained(trained, where, max_shard_size="20KB")
    if rank == 0:
        eager.save_pretrained(f"{where}, eager", max_shard_size="20KB")
    dist.barrier()
    found["files"] = equal(files(where), files(f"{where}, eager"))
    loaded = type(eager).from_pretrained(where)
    found["reloaded"] = equal(loaded.state_dict(), expected)

    other = make_model(case, seed=2)
    of_other, wrapped = spread(other, wrapper)
    of_other.load_whole_state_dict(wrapped, state)
    found["loaded"] = equal(of_other.whole_state_dict(wrapped), expected)
    with torch.no_grad():
        found["spread logits"] = float((wrapped(ids, use_cache=False).logits - logits[0]).abs().max())
    for of in (ep, of_other):
        of.detach()
    return found


def report(rank: int, folder: str) -> dict[str, Any]:
    """What a spread model's own methods say, while it is spread."""
    model = make_model("Qwen3Moe")
    ep = ExpertParallel(expert_layers(model))
    own = model.state_dict()
    found: dict[str, Any] = {}
    where = f"{folder}/report"
    found["save"] = refusal(lambda: model.save_pretrained(where))
    found["save base"] = refusal(lambda: model.model.save_pretrained(where))
    found["save own"] = refusal(lambda: model.save_pretrained(where, state_dict=own))
    found["nothing written"] = not os.path.exists(where)
    whole = ep.whole_state_dict(model)
    found["save whole"] = refusal(lambda: model.save_pretrained(f"{where}/{rank}", state_dict=whole))

    ddp = ep.wrap(model, "ddp")
    found["ddp"] = refusal(lambda: ddp.load_state_dict(ddp.state_dict()))
    found["whole of ddp"] = equal(ep.whole_state_dict(ddp), whole)

    found["other model"] = refusal(lambda: ep.whole_state_dict(make_model("Qwen3Moe")))
    found["other model on rank 2"] = refusal(
        lambda: ep.whole_state_dict(make_model("Qwen3Moe") if rank == 2 else model)
    )
    found["rank0_only on rank 0"] = refusal(lambda: ep.whole_state_dict(model, rank0_only=rank == 0))
    found["no module"] = refusal(lambda: ep.whole_state_dict(whole))
    found["missing"] = refusal(lambda: ep.load_whole_state_dict(model, {k: whole[k] for k in list(whole)[1:]}))
    found["unexpected"] = refusal(lambda: ep.load_whole_state_dict(model, whole | {"more": torch.ones(1)}))
    expert = "model.layers.0.mlp.experts.down_proj"
    found["own part"] = refusal(lambda: ep.load_whole_state_dict(model, whole | {expert: own[expert].to_local()}))
    found["own state"] = refusal(lambda: ep.load_whole_state_dict(model, own))
    pathlib.Path(folder, "file").touch()
    found["a file"] = refusal(lambda: ep.save_pretrained(model, f"{folder}/file"))
    found["below a file"] = refusal(lambda: ep.save_pretrained(model, f"{folder}/file/model"))
    found["option"] = refusal(lambda: ep.save_pretrained(model, f"{folder}/option", state_dict=own))

    ep.detach()
    found["detached"] = equal(model.state_dict(), make_model("Qwen3Moe").state_dict())
    found["save detached"] = refusal(lambda: model.save_pretrained(f"{where}/detached/{rank}"))
    return found


def work(rank: int) -> dict[str, Any]:
    folders = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folders)
    (folder,) = folders
    found = {f"{case}, {wrapper}": save_family(rank, case, wrapper, folder) for case in ALL for wrapper in WRAPPERS}
    return found | {"report": report(rank, folder)}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_all_ranks(work)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", ALL)
def test_the_whole_state_is_that_of_the_unspread_model(
    found: list[dict[str, Any]], case: str, wrapper: str | None
) -> None:
    for rank, of in enumerate(found):
        result = of[f"{case}, {wrapper}"]
        assert result["state"] == "", rank
        assert result["logits"], "a fresh model that loads it strictly computes the same"
        assert result["rank 0"] == ("" if rank == 0 else 0)
        assert result["tied"] == result["tied, expected"]
        assert result["tied"] or case not in TIED


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", ALL)
def test_files_are_those_that_the_unspread_model_writes(
    found: list[dict[str, Any]], case: str, wrapper: str | None
) -> None:
    for rank, of in enumerate(found):
        result = of[f"{case}, {wrapper}"]
        assert result["files"] == "" and result["reloaded"] == "", rank


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", ALL)
def test_a_spread_model_takes_a_whole_state(found: list[dict[str, Any]], case: str, wrapper: str | None) -> None:
    for rank, of in enumerate(found):
        result = of[f"{case}, {wrapper}"]
        assert result["loaded"] == "", rank
        assert result["spread logits"] < (0.1 if "bfloat16" in case else 1e-3)


def test_families_with_a_routers_bias_have_it_in_their_state() -> None:
    for case in WITH_ROUTER_BIAS:
        assert any("bias" in name for name, _ in make_model(case).named_buffers()), case


@pytest.mark.parametrize("case", ["ddp", "save whole", "save detached"])
def test_whole_states_and_those_of_a_wrapper_are_accepted(found: list[dict[str, Any]], case: str) -> None:
    for of in found:
        assert of["report"][case] == "nothing"


@pytest.mark.parametrize("case", ["save", "save base", "save own"])
def test_save_pretrained_of_a_spread_model_names_the_one_that_saves_all(found: list[dict[str, Any]], case: str) -> None:
    for of in found:
        assert "ep.save_pretrained(model, folder)" in of["report"][case]
        assert of["report"]["nothing written"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other model", "InputError: model: it lacks 4 of the 4 expert parameters"),
        ("other model on rank 2", "model: it lacks 4 of the 4 expert parameters"),
        ("rank0_only on rank 0", "InputError: rank0_only: True on rank 0, False on ranks 1, 2, 3"),
        ("no module", "InputError: model: is a dict, expected a torch.nn.Module"),
        ("missing", "InputError: state: model.embed_tokens.weight is missing"),
        ("unexpected", "InputError: state: more is not an entry"),
        ("own part", "InputError: state: model.layers.0.mlp.experts.down_proj is (4, 32, 16), expected (16, 32, 16)"),
        ("own state", "InputError: state: model.layers.0.mlp.experts.gate_up_proj is (16, 32, 32) in parts, expected"),
        ("a file", "is not a folder"),
        ("below a file", "Not a directory"),
        ("option", "InputError: state_dict: is not an option of ExpertParallel.save_pretrained"),
    ],
)
def test_one_ranks_experts_and_other_mistakes_are_refused_on_all_ranks(
    found: list[dict[str, Any]], case: str, words: str
) -> None:
    for of in found:
        assert words in of["report"][case]


def test_detaching_gives_the_unspread_state_back(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["report"]["detached"] == "" and of["report"]["whole of ddp"] == ""

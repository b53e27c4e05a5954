"""Checkpoints of a spread model and its optimizer contain all experts. Code that would save fewer experts is rejected.

The oracle is an unspread model in the same process, with a plain AdamW.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import tempfile
from typing import Any

import accelerate
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import RANKS
from refusals import refusal
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import EXPERTS, draw_batches, draw_homes, loss_of, make_model, sorted_by_home, spread

ONE_RANKS = "RuntimeError: this would save the experts of one rank alone"
STEPS = 3
FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
EXPERT = "model.layers.0.mlp.experts.down_proj"


class Run:
    """A model, spread or unspread, and its optimizer."""

    def __init__(
        self, seed: int, wrapper: str | None = None, group: Any = None, is_spread: bool = True, homes: Any = None
    ) -> None:
        self.model = self.wrapped = make_model(torch.float64, seed)
        self.model.set_experts_implementation("eager")  # supports float64
        groups: list[Any] = [list(self.model.parameters())]
        if is_spread:
            self.ep = spread(self.model, group, ranks_per_node=1, homes=homes)
            self.wrapped = self.ep.wrap(self.model, wrapper)
            groups = [self.ep.dense_parameters(), self.ep.expert_parameters()]
        self.optimizer = torch.optim.AdamW([{"params": of} for of in groups], lr=1e-2, weight_decay=0.1)

    def step(self, step: int) -> None:
        """Take an optimizer step with random gradients of the whole model that are equal on all ranks."""
        for i, (name, p) in enumerate(self.model.named_parameters()):
            random = torch.Generator().manual_seed(1000 * step + i)
            whole = torch.randn(whole_shape(name, p), dtype=p.dtype, generator=random)
            p.grad = self.part(whole, p)
        self.optimizer.step()

    def part(self, whole: Any, weight: Any) -> Any:
        if isinstance(weight, DTensor):
            return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
        if whole.shape == weight.shape:
            return whole
        (layer,) = (i for i, of in enumerate(self.ep.layers) if any(w is weight for w in of.weights().values()))
        return whole[sorted_by_home(self.ep.arguments.homes, layer)].chunk(self.ep.num_ranks)[self.ep.rank].clone()

    def difference(self, expected: Run) -> str:
        """Return the first parameter or moment that is not bit-equal to the unspread model's, or "" if all are."""
        of_expected = dict(expected.model.named_parameters())
        for name, p in self.model.named_parameters():
            state, other = self.optimizer.state[p], expected.optimizer.state[of_expected[name]]
            pairs = {"value": (p, of_expected[name])} | {key: (state[key], other[key]) for key in other}
            for key, (own, whole) in pairs.items():
                part = self.part(whole.detach(), p) if whole.dim() else whole
                if not torch.equal(local(own), local(part)):
                    return f"{key} of {name}"
        return ""


def whole_shape(name: str, p: Any) -> Any:
    return (EXPERTS, *p.shape[1:]) if ".experts." in name else p.shape


def local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(steps: int, **options: Any) -> Run:
    run = Run(0, **options)
    for step in range(steps):
        run.step(step)
    return run


def difference_of(found: Any, expected: Any, name: str = "") -> str:
    """Return the path of the first entry in which two nested states differ, or ""."""
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return f"{name}: {sorted(found.keys() ^ expected.keys(), key=str)}"
        return next((at for key in expected if (at := difference_of(found[key], expected[key], f"{name}.{key}"))), "")
    same = torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected
    return "" if same else name


def load(run: Run, folder: str, **options: Any) -> None:
    weights, moments = get_state_dict(run.wrapped, run.optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder, **options)
    set_state_dict(run.wrapped, run.optimizer, model_state_dict=weights, optim_state_dict=moments)


@functools.cache
def folder() -> str:
    """Create a temporary folder and return its path on all ranks."""
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    return folders[0]


of_homes = pytest.mark.parametrize("homes", [None, draw_homes()], ids=["contiguous", "other homes"])
of_wrappers = pytest.mark.parametrize("wrapper", [None, "ddp", "fsdp2"])


@of_homes
@of_wrappers
def test_a_checkpoint_of_four_ranks_loads_completely_on_four_two_and_one(
    rank: int, wrapper: str | None, homes: Any
) -> None:
    """Uses torch.distributed.checkpoint, then takes one more step with each run."""
    pair = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    into = f"{folder()}/{wrapper} {homes is None}"
    saving = trained(STEPS, wrapper=wrapper, homes=homes)
    expected, unspread = trained(STEPS, is_spread=False), Run(1, is_spread=False)
    weights, moments = get_state_dict(saving.wrapped, saving.optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=into)
    of_pair = None if homes is None else draw_homes(2, 2)
    runs = {"4": Run(1, wrapper), "2": Run(1, wrapper, pair, homes=of_pair)}
    runs["4, from two replicas"] = Run(1, wrapper, homes=homes)
    replica = trained(STEPS, wrapper=wrapper, group=pair, homes=of_pair)
    weights, moments = get_state_dict(replica.wrapped, replica.optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{into} of replicas")
    load(runs["4, from two replicas"], f"{into} of replicas")
    load(runs["4"], into)
    load(runs["2"], into, process_group=pair)
    load(unspread, into, no_dist=True)
    runs["1"] = unspread
    for step in range(2):
        assert {ranks: run.difference(expected) for ranks, run in runs.items()} == dict.fromkeys(runs, "")
        if step == 0:
            for run in (expected, *runs.values()):
                run.step(STEPS)


@of_homes
@of_wrappers
def test_full_states_of_torch_match_the_unspread_model_and_can_be_loaded(
    rank: int, wrapper: str | None, homes: Any
) -> None:
    saving, expected = trained(STEPS, wrapper=wrapper, homes=homes), trained(STEPS, is_spread=False)
    whole = get_model_state_dict(saving.wrapped, options=FULL)
    moments = get_optimizer_state_dict(saving.wrapped, saving.optimizer, options=FULL)
    on_cpu = get_model_state_dict(saving.wrapped, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert difference_of(whole, expected.model.state_dict()) == ""
    assert difference_of(on_cpu, expected.model.state_dict() if rank == 0 else {}) == ""
    of_expected = get_optimizer_state_dict(expected.model, expected.optimizer)
    assert difference_of(moments["state"], of_expected["state"]) == ""
    assert [name for of in moments["param_groups"] for name in of["params"]] == [
        name for of in ("dense", "experts") for name in whole if (".experts." in name) == (of == "experts")
    ]
    for options in (FULL, FROM_RANK_0):
        run = Run(1, wrapper, homes=homes)
        has_state = rank == 0 or options is FULL
        set_model_state_dict(run.wrapped, dict(whole) if has_state else {}, options=options)
        of_run = copy.deepcopy(moments) if has_state else {}
        set_optimizer_state_dict(run.wrapped, run.optimizer, of_run, options=options)
        assert run.difference(expected) == ""


@of_homes
def test_a_spread_model_and_its_optimizer_load_sharded_and_whole_states(rank: int, homes: Any) -> None:
    expected, saving = trained(STEPS, is_spread=False), trained(STEPS, homes=homes)
    state = saving.model.state_dict()
    assert tuple(state[EXPERT].shape) == (EXPERTS, 32, 16) and isinstance(state[EXPERT], DTensor)
    run = Run(1, homes=homes)
    run.model.load_state_dict(state)
    run.optimizer.load_state_dict(copy.deepcopy(saving.optimizer.state_dict()))
    run.step(STEPS)  # also works with an optimizer that has not stepped before
    assert run.difference(trained(STEPS + 1, is_spread=False)) == ""
    run = trained(1, homes=homes)
    run.model.load_state_dict(expected.model.state_dict())
    kept = copy.deepcopy(saving.optimizer.state_dict())
    saving.step(STEPS)
    run.optimizer.load_state_dict(kept)
    assert run.difference(expected) == ""
    run.ep.detach()
    detached = run.model.state_dict()[EXPERT]
    assert type(detached) is torch.Tensor and torch.equal(detached, expected.model.state_dict()[EXPERT])


def test_states_that_may_belong_to_another_rank_are_rejected(rank: int) -> None:
    run = trained(1)
    state, own = run.model.state_dict(), dict(run.model.named_parameters())[EXPERT].detach()
    said = refusal(lambda: run.model.load_state_dict(state | {EXPERT: own}))
    assert f"state_dict: {EXPERT} holds 4 of 16 experts, perhaps of another rank" in said
    said = refusal(lambda: run.model.load_state_dict(state | {EXPERT: torch.zeros(3, 32, 16)}))
    assert f"size mismatch for {EXPERT}" in said
    moments = run.optimizer.state_dict()
    moments["state"][len(moments["state"]) - 1]["exp_avg"] = torch.zeros(EXPERTS // RANKS, 32, 16)
    said = refusal(lambda: run.optimizer.load_state_dict(moments))
    assert said.startswith("InputError: state_dict: exp_avg of parameter")
    factored = torch.optim.Adafactor(run.ep.expert_parameters())
    for p in run.ep.expert_parameters():
        p.grad = torch.ones_like(p)
    refusal(factored.step)  # step() is rejected too, but creates the state
    for way in (factored.state_dict, lambda: get_optimizer_state_dict(run.model, factored)):
        assert refusal(way).startswith("InputError: optimizer: row_var of parameter 0 is [4, 32, 1]")


@of_homes
def test_a_whole_state_does_not_change_when_training_continues(rank: int, homes: Any) -> None:
    run, expected = trained(1, homes=homes), trained(1, is_spread=False)
    best = run.ep.whole_state_dict(run.model, cpu_offload=True)
    shared = run.ep.whole_state_dict(run.model)
    moments = run.ep.whole_optimizer_state(run.optimizer, cpu_offload=True)["state"]
    of_expected = get_optimizer_state_dict(expected.model, expected.optimizer)["state"]
    run.step(1)
    kept = expected.model.state_dict()
    assert difference_of(best, kept) == difference_of(shared, kept) == difference_of(moments, of_expected) == ""


@of_homes
@pytest.mark.parametrize("is_exponential", [False, True])
def test_an_averaged_copy_can_be_saved_and_evaluated_in_the_spread_model(
    rank: int, is_exponential: bool, homes: Any
) -> None:
    options = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if is_exponential else {}
    run, expected = Run(0, homes=homes), Run(0, is_spread=False)
    averaged, of_expected = (AveragedModel(of.model, **options) for of in (run, expected))
    for step in range(STEPS):
        for of in (run, expected):
            of.step(step)
        averaged.update_parameters(run.model)
        of_expected.update_parameters(expected.model)
    (batch,) = draw_batches(rank, 1, 3)
    average = of_expected.module.state_dict()
    assert difference_of(get_model_state_dict(averaged.module, options=FULL), average) == ""
    assert difference_of(run.ep.whole_state_dict(averaged.module), average) == ""
    assert "this would save the experts of one rank alone" in refusal(lambda: save(averaged.state_dict()))
    assert "model.load_state_dict(copy.state_dict())" in refusal(lambda: averaged(batch))
    kept = copy.deepcopy(run.model.state_dict())
    run.model.load_state_dict(averaged.module.state_dict())
    with torch.no_grad(), run.ep.evaluate():
        assert float(loss_of(run.model, batch)) == pytest.approx(float(loss_of(of_expected.module, batch)), rel=1e-12)
    run.model.load_state_dict(kept)
    assert run.difference(expected) == ""


def save(what: Any) -> None:
    torch.save(what, io.BytesIO())


def test_saving_the_experts_of_one_rank_alone_is_rejected(rank: int) -> None:
    run = trained(1)
    model, state = run.model, run.model.state_dict()
    into = f"{folder()}/{rank}"
    with contextlib.redirect_stderr(io.StringIO()):
        accelerator = accelerate.Accelerator(cpu=True)
        prepared = accelerator.prepare(model)
    copies = {name: of.clone().to("cpu", torch.float32) for name, of in state.items()}
    for what in (
        state, copies, model.model.layers[0].mlp.state_dict(), model, model.model.layers[0],
        run.optimizer.state_dict(), run.optimizer, dict(model.named_parameters()), copy.deepcopy(model),
    ):  # fmt: skip
        assert refusal(lambda what=what: save(what)).startswith(ONE_RANKS), type(what)
    for way in (
        lambda: safetensors.torch.save_model(model, into),
        lambda: safetensors.torch.save_file(state, into),
        lambda: accelerator.save_model(prepared, f"{into} model"),
        lambda: accelerator.save_state(f"{into} state"),
    ):
        assert refusal(way).startswith(ONE_RANKS)
    for way in (
        lambda: accelerator.save_model(prepared, f"{into} model", safe_serialization=False),
        lambda: accelerator.save_state(f"{into} state", safe_serialization=False),
    ):
        assert refusal(way).startswith(ONE_RANKS if rank == 0 else "nothing")  # only rank 0 writes

"""What torch saves of a spread model, and of its optimizer, holds all experts; anything else refuses to save.

One spawn of four processes runs all checks. The oracle is an unspread model in the same process, with a plain AdamW.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
from training import EXPERTS, RANKS, draw_batches, loss_of, make_model, on_all_ranks, spread

WRAPPERS = (None, "ddp", "fsdp2")
STEPS = 3
FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
EXPERT = "model.layers.0.mlp.experts.down_proj"


class Run:
    """A model, spread or not, and its optimizer."""

    def __init__(self, seed: int, wrapper: str | None = None, group: Any = None, is_spread: bool = True) -> None:
        self.model = self.wrapped = make_model(torch.float64, seed)
        self.model.set_experts_implementation("eager")  # which has float64
        groups: list[Any] = [list(self.model.parameters())]
        if is_spread:
            self.ep = spread(self.model, group, ranks_per_node=1)
            self.wrapped = self.ep.wrap(self.model, wrapper)
            groups = [self.ep.dense_parameters(), self.ep.expert_parameters()]
        self.optimizer = torch.optim.AdamW([{"params": of} for of in groups], lr=1e-2, weight_decay=0.1)

    def step(self, step: int) -> None:
        """The same gradients of the whole model on all ranks, whatever holds them."""
        for i, (name, p) in enumerate(self.model.named_parameters()):
            random = torch.Generator().manual_seed(1000 * step + i)
            whole = torch.randn(whole_shape(name, p), dtype=p.dtype, generator=random)
            p.grad = self.part(whole, p)
        self.optimizer.step()

    def part(self, whole: Any, weight: Any) -> Any:
        if isinstance(weight, DTensor):
            return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
        return whole if whole.shape == weight.shape else whole.chunk(self.ep.num_ranks)[self.ep.rank].clone()

    def difference(self, expected: Run) -> str:
        """The first parameter, or moment, that is not bit-equal to that of the unspread model; empty where all are."""
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
    """The first entry of nested states that differs."""
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


def save_and_load(wrapper: str | None, folder: str, pair: Any) -> dict[str, str]:
    """Of torch.distributed.checkpoint on four ranks; on four, two and one afterwards. Then one more step of each."""
    saving = trained(STEPS, wrapper=wrapper)
    expected, unspread = trained(STEPS, is_spread=False), Run(1, is_spread=False)
    weights, moments = get_state_dict(saving.wrapped, saving.optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    runs = {"4": Run(1, wrapper), "2": Run(1, wrapper, pair), "4, from two replicas": Run(1, wrapper)}
    replica = trained(STEPS, wrapper=wrapper, group=pair)
    weights, moments = get_state_dict(replica.wrapped, replica.optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder} of replicas")
    load(runs["4, from two replicas"], f"{folder} of replicas")
    load(runs["4"], folder)
    load(runs["2"], folder, process_group=pair)
    load(unspread, folder, no_dist=True)
    found = {f"on {ranks}": run.difference(expected) for ranks, run in (runs | {"1": unspread}).items()}
    expected.step(STEPS)
    for ranks, run in (runs | {"1": unspread}).items():
        run.step(STEPS)
        found[f"on {ranks}, stepped"] = run.difference(expected)
    return found


def exchange_whole_states(wrapper: str | None, rank: int) -> dict[str, Any]:
    """By torch's own functions, with full_state_dict."""
    saving, expected = trained(STEPS, wrapper=wrapper), trained(STEPS, is_spread=False)
    whole = get_model_state_dict(saving.wrapped, options=FULL)
    moments = get_optimizer_state_dict(saving.wrapped, saving.optimizer, options=FULL)
    on_cpu = get_model_state_dict(saving.wrapped, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    found: dict[str, Any] = {"weights": difference_of(whole, expected.model.state_dict())}
    found["on rank 0"] = difference_of(on_cpu, expected.model.state_dict() if rank == 0 else {})
    of_expected = get_optimizer_state_dict(expected.model, expected.optimizer)
    found["moments"] = difference_of(moments["state"], of_expected["state"])
    found["names"] = [name for of in moments["param_groups"] for name in of["params"]] == [
        name for of in ("dense", "experts") for name in whole if (".experts." in name) == (of == "experts")
    ]
    for way, options in {"full": FULL, "broadcast": FROM_RANK_0}.items():
        run = Run(1, wrapper)
        has_state = rank == 0 or way == "full"
        set_model_state_dict(run.wrapped, dict(whole) if has_state else {}, options=options)
        of_run = copy.deepcopy(moments) if has_state else {}
        set_optimizer_state_dict(run.wrapped, run.optimizer, of_run, options=options)
        found[way] = run.difference(expected)
    return found


def load_states(rank: int) -> dict[str, Any]:
    """What load_state_dict() of model and optimizer takes."""
    expected, saving = trained(STEPS, is_spread=False), trained(STEPS)
    found: dict[str, Any] = {}
    state = saving.model.state_dict()
    found["shape"] = [tuple(state[EXPERT].shape), isinstance(state[EXPERT], DTensor)]
    run = Run(1)
    run.model.load_state_dict(state)
    kept = copy.deepcopy(saving.optimizer.state_dict())
    run.optimizer.load_state_dict(kept)
    run.step(STEPS)  # also follows an optimizer that has not stepped before
    again = trained(STEPS + 1, is_spread=False)
    found["own"] = run.difference(again)
    run = trained(1)
    run.model.load_state_dict(expected.model.state_dict())
    kept = copy.deepcopy(saving.optimizer.state_dict())
    saving.step(STEPS)
    run.optimizer.load_state_dict(kept)
    found["whole, and a deep copy"] = run.difference(expected)
    part = state | {EXPERT: dict(saving.model.named_parameters())[EXPERT].detach()}
    found["part"] = refusal(lambda: run.model.load_state_dict(part))
    found["other shape"] = refusal(lambda: run.model.load_state_dict(state | {EXPERT: torch.zeros(3, 32, 16)}))
    moments = run.optimizer.state_dict()
    number = len(moments["state"]) - 1
    moments["state"][number]["exp_avg"] = torch.zeros(EXPERTS // RANKS, 32, 16)
    found["part of moments"] = refusal(lambda: run.optimizer.load_state_dict(moments))
    factored = torch.optim.Adafactor(run.ep.expert_parameters())
    for p in run.ep.expert_parameters():
        p.grad = torch.ones_like(p)
    refusal(factored.step)  # is refused already
    found["factored"] = refusal(factored.state_dict)
    found["factored, by torch"] = refusal(lambda: get_optimizer_state_dict(run.model, factored))
    run.ep.detach()
    found["detached"] = [type(of) is torch.Tensor and len(of) == EXPERTS for of in [run.model.state_dict()[EXPERT]]]
    return found


def keep_best() -> list[bool]:
    """Whether what was kept before a step is as it was."""
    run, expected = trained(1), trained(1, is_spread=False)
    best = run.ep.whole_state_dict(run.model, cpu_offload=True)
    shared = run.ep.whole_state_dict(run.model)
    moments = run.ep.whole_optimizer_state(run.optimizer, cpu_offload=True)["state"]
    of_expected = get_optimizer_state_dict(expected.model, expected.optimizer)["state"]
    run.step(1)
    kept = expected.model.state_dict()
    return [not difference_of(best, kept), not difference_of(shared, kept), not difference_of(moments, of_expected)]


def average(rank: int) -> dict[str, Any]:
    """Copies for the average over steps, and for the exponential one."""
    run, expected = Run(0), Run(0, is_spread=False)
    ways: dict[str, Any] = {"swa": {}, "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}}
    copies = {way: [AveragedModel(of.model, **options) for of in (run, expected)] for way, options in ways.items()}
    for step in range(STEPS):
        for of in (run, expected):
            of.step(step)
        for averaged, of_expected in copies.values():
            averaged.update_parameters(run.model)
            of_expected.update_parameters(expected.model)
    found: dict[str, Any] = {}
    (batch,) = draw_batches(rank, 1, 3)
    for way, (averaged, of_expected) in copies.items():
        whole = get_model_state_dict(averaged.module, options=FULL)
        found[way] = difference_of(whole, of_expected.module.state_dict())
        found[f"{way}, whole"] = difference_of(
            run.ep.whole_state_dict(averaged.module), of_expected.module.state_dict()
        )
        found[f"{way}, saved by pickle"] = refusal(lambda averaged=averaged: save(averaged.state_dict()))
        found[f"{way}, run"] = refusal(lambda averaged=averaged: averaged(batch))
        kept = copy.deepcopy(run.model.state_dict())
        run.model.load_state_dict(averaged.module.state_dict())
        with torch.no_grad(), run.ep.evaluate():
            loss = float(loss_of(run.model, batch))
        found[f"{way}, loss"] = abs(loss / float(loss_of(of_expected.module, batch)) - 1)
        run.model.load_state_dict(kept)
        found[f"{way}, back"] = run.difference(expected)
    return found


def save(what: Any) -> None:
    torch.save(what, io.BytesIO())


def refuse_to_save(folder: str, rank: int) -> dict[str, str]:
    run = trained(1)
    model, state = run.model, run.model.state_dict()
    with contextlib.redirect_stderr(io.StringIO()):
        accelerator = accelerate.Accelerator(cpu=True)
        prepared = accelerator.prepare(model)
    ways: dict[str, Callable[[], Any]] = {
        "torch.save(state_dict)": lambda: save(state),
        "torch.save(copies)": lambda: save({name: of.clone().to("cpu", torch.float32) for name, of in state.items()}),
        "torch.save(part)": lambda: save(model.model.layers[0].mlp.state_dict()),
        "torch.save(model)": lambda: save(model),
        "torch.save(layer)": lambda: save(model.model.layers[0]),
        "torch.save(optimizer's state_dict)": lambda: save(run.optimizer.state_dict()),
        "torch.save(optimizer itself)": lambda: save(run.optimizer),
        "torch.save(parameters)": lambda: save(dict(model.named_parameters())),
        "torch.save(deep copy)": lambda: save(copy.deepcopy(model)),
        "safetensors.save_model": lambda: safetensors.torch.save_model(model, f"{folder}/{rank}"),
        "safetensors.save_file": lambda: safetensors.torch.save_file(state, f"{folder}/{rank}"),
        "accelerate.save_model": lambda: accelerator.save_model(prepared, f"{folder}/{rank} model"),
        "accelerate.save_model, pickle": lambda: accelerator.save_model(
            prepared, f"{folder}/{rank} model", safe_serialization=False
        ),
        "accelerate.save_state": lambda: accelerator.save_state(f"{folder}/{rank} state"),
        "accelerate.save_state, pickle": lambda: accelerator.save_state(
            f"{folder}/{rank} state", safe_serialization=False
        ),
    }
    return {name: refusal(way) for name, way in ways.items()}


def work(rank: int) -> dict[str, Any]:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    folders = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folders)
    pair = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    found: dict[str, Any] = {}
    for wrapper in WRAPPERS:
        found[f"checkpoint, {wrapper}"] = save_and_load(wrapper, f"{folders[0]}/{wrapper}", pair)
        found[f"whole, {wrapper}"] = exchange_whole_states(wrapper, rank)
    found["states"] = load_states(rank)
    found["best"] = keep_best()
    found["averages"] = average(rank)
    found["refused"] = refuse_to_save(folders[0], rank)
    return found


@pytest.fixture(scope="module")
def found() -> Iterator[list[dict[str, Any]]]:
    yield on_all_ranks(work)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("ranks", ["4", "2", "1", "4, from two replicas"])
def test_a_checkpoint_of_four_ranks_has_all_weights_and_moments_on_others(
    found: list[dict[str, Any]], wrapper: str | None, ranks: str
) -> None:
    for of in found:
        assert of[f"checkpoint, {wrapper}"][f"on {ranks}"] == ""
        assert of[f"checkpoint, {wrapper}"][f"on {ranks}, stepped"] == ""


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_torchs_full_states_are_those_of_the_unspread_model_and_load(
    found: list[dict[str, Any]], wrapper: str | None
) -> None:
    for of in found:
        result = of[f"whole, {wrapper}"]
        assert result["weights"] == result["on rank 0"] == result["moments"] == ""
        assert result["full"] == result["broadcast"] == ""
        assert result["names"]


def test_a_spread_model_and_its_optimizer_take_their_own_states_and_whole_ones(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["states"]["shape"] == [(EXPERTS, 32, 16), True]
        assert of["states"]["own"] == of["states"]["whole, and a deep copy"] == ""
        assert of["states"]["detached"] == [True]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("part", f"state_dict: {EXPERT} holds 4 of 16 experts, perhaps of another rank"),
        ("other shape", f"size mismatch for {EXPERT}"),
        ("part of moments", "InputError: state_dict: exp_avg of parameter"),
        ("factored", "InputError: optimizer: row_var of parameter 0 is [4, 32, 1]"),
        ("factored, by torch", "InputError: optimizer: row_var of parameter 0 is [4, 32, 1]"),
    ],
)
def test_states_that_may_be_another_ranks_are_refused(found: list[dict[str, Any]], case: str, words: str) -> None:
    for of in found:
        assert words in of["states"][case]


def test_a_whole_state_that_is_kept_does_not_change_with_the_model(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["best"] == [True, True, True]


@pytest.mark.parametrize("way", ["swa", "ema"])
def test_a_copy_averages_experts_saves_them_and_is_evaluated_in_the_spread_model(
    found: list[dict[str, Any]], way: str
) -> None:
    for of in found:
        result = of["averages"]
        assert result[way] == result[f"{way}, whole"] == result[f"{way}, back"] == ""
        assert result[f"{way}, loss"] <= 1e-12
        assert "this would save the experts of one rank alone" in result[f"{way}, saved by pickle"]
        assert "model.load_state_dict(copy.state_dict())" in result[f"{way}, run"]


def test_what_would_save_one_ranks_experts_refuses_when_it_saves(found: list[dict[str, Any]]) -> None:
    for rank, of in enumerate(found):
        for way, said in of["refused"].items():
            if rank > 0 and way.startswith("accelerate") and way.endswith("pickle"):
                assert said == "nothing"  # rank 0 alone writes
                continue
            assert said.startswith("RuntimeError: this would save the experts of one rank alone"), way

"""If arguments differ between ranks, all ranks raise an error within five seconds. It names the argument."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matrix import HIDDEN, Layer
from processes import RANKS
from refusals import ODD, OTHERS, input_error

from foremoe._engine.arguments import OPTIONS
from foremoe._engine.calls import Calls
from foremoe._engine.failures import Channel, Failures
from foremoe._engine.together import refused_together, shortened, spelled
from foremoe.torch import ExpertParallel, stand_by

input_error = functools.partial(input_error, within=5.0)
# Argument of ExpertParallel → (value on rank 2, value on the other ranks).
ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "guest_slots": (2, 1),
    "residency": ("shared", "resident"),
    "policy": ("static", "foremoe"),
    "cluster": ("h200", "h100"),
    "model": ("qwen3-30b-a3b", "mixtral-8x7b"),
    "depth": (3, 2),
    "path": ("auto", "peer"),
    "dispatch": ("token", "row"),
    "host_timeout": (31.0, 30.0),
    "ranks_per_node": (2, None),
    "prefer": ("links", "balance"),
    "copy_price": (1.0, 2.0),
    "free_copies": (1.0, None),
    "tolerance": (0.1, 0.2),
    "stages": ("BL", "BLP"),
    "max_copies_per_rank": (2, 3),
    "max_copies_per_source": (2, 3),
    "min_tokens_per_guest": (2, 3),
    "seed": (1, 2),
}
ELSEWHERE = {"layers", "group", "copy_group", "replicate_group", "homes"}  # below, test_replicas.py, test_homes.py
MAY_DIFFER = {"threads"}


class Named(Layer):
    """Layer whose weights have another name."""

    def weights(self) -> dict[str, Any]:
        return {"square": self.matrix}


def layers_of(**odd: Any) -> list[Any]:
    """Makes two layers and sets the attributes `odd` on the second."""
    layers = [Layer(), Layer()]
    for name, value in odd.items():
        setattr(layers[1], name, value)
    return layers


def layers_with_weight(change: Callable[[Any], Any]) -> list[Any]:
    layers = layers_of()
    for layer in layers:
        layer.matrix = torch.nn.Parameter(change(layer.matrix.detach()))
    return layers


def layers_with_a_frozen_weight() -> list[Any]:
    layers = layers_of()
    layers[1].matrix.requires_grad_(False)
    return layers


# Layers on rank 2, and the beginning of the error.
ODD_LAYERS: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "number": (lambda: [Layer()], f"layers: 1 on rank 2, 2 on {OTHERS}"),
    "name": (
        lambda: layers_of(name="other"),
        "layers[1]: other, top 1 of 4 experts, 8 wide, with matrix on rank 2, own",
    ),
    "hidden_size": (lambda: layers_of(hidden_size=HIDDEN + 1), "layers[1]: own, top 1 of 4 experts, 9 wide"),
    "top_k": (
        lambda: [layers_of(top_k=2)[1], layers_of(top_k=2)[1]],
        "layers[0]: own, top 2 of 4 experts, 8 wide, with matrix on rank 2, own, top 1 of 4 experts",
    ),
    "num_experts": (lambda: [Layer(8), Layer(8)], "layers[0]: own, top 1 of 8 experts"),
    "names of weights": (
        lambda: [Named(), Named()],
        "layers[0]: own, top 1 of 4 experts, 8 wide, with square on rank 2",
    ),
    "type": (
        lambda: layers_with_weight(lambda weight: weight.double()),
        f"layers[0].matrix: float64 [4, {HIDDEN}, {HIDDEN}], trained on rank 2",
    ),
    "shape": (
        lambda: layers_with_weight(lambda _: torch.zeros(4, 6, 6)),
        "layers[0].matrix: float32 [4, 6, 6], trained on rank 2, float32 [4, 8, 8], trained",
    ),
    "frozen": (layers_with_a_frozen_weight, f"layers[1].matrix: float32 [4, {HIDDEN}, {HIDDEN}], frozen on rank 2"),
}


def test_every_argument_is_compared() -> None:
    """Fails if a new argument is missing in this file."""
    arguments = set(inspect.signature(ExpertParallel).parameters) - {"options"} | OPTIONS
    assert arguments == set(ARGUMENTS) | ELSEWHERE | MAY_DIFFER


@pytest.mark.parametrize("name", ARGUMENTS)
def test_all_ranks_reject_an_argument_that_differs_on_one_rank(rank: int, name: str) -> None:
    odd, others = ARGUMENTS[name]
    needs = {"prefer": "time", "copy_price": 1.0} if name in ("copy_price", "free_copies") else {}
    said = input_error(lambda: ExpertParallel(layers_of(), **needs | {name: odd if rank == ODD else others}))
    assert said == f"{name}: {odd!r} on rank 2, {others!r} on {OTHERS}; expected the same on all ranks"


def test_an_option_given_on_one_rank_is_rejected_and_threads_may_differ(rank: int) -> None:
    given = {"tolerance": 0.1} if rank == ODD else {}
    said = input_error(lambda: ExpertParallel(layers_of(), **given))
    assert said == f"tolerance: 0.1 on rank 2, not given on {OTHERS}; expected the same on all ranks"
    ExpertParallel(layers_of(), threads=2 if rank == ODD else 1).detach()


@pytest.mark.parametrize("name", ODD_LAYERS)
def test_all_ranks_reject_layers_that_differ_on_one_rank(rank: int, name: str) -> None:
    layers = ODD_LAYERS[name][0]() if rank == ODD else layers_of()
    assert input_error(lambda: ExpertParallel(layers)).startswith(ODD_LAYERS[name][1])


def expect_error_on_all_ranks(rank: int, call: Callable[[], Any], words: str) -> None:
    assert input_error(call).startswith(words if rank == ODD else f"rank 2 refused: {words}")


def test_an_error_on_one_rank_is_raised_on_all_ranks(rank: int) -> None:
    odd = rank == ODD
    expect_error_on_all_ranks(rank, lambda: ExpertParallel([] if odd else layers_of()), "layers: there is no MoE layer")
    expect_error_on_all_ranks(
        rank, lambda: ExpertParallel(layers_of(), path="air" if odd else "peer"), "path: 'air', expected auto, host or "
    )
    ep = ExpertParallel([Layer()])
    routes = [torch.zeros(1, 1, 1 + odd, dtype=torch.long)]
    expect_error_on_all_ranks(
        rank, lambda: ep.plan(routes), "routes[0]: is torch.int64 [1, 1, 2]; expected integers [rows, 1, 1]"
    )


@pytest.mark.parametrize("package", ["foremoe", "torch"])
def test_different_package_versions_are_rejected_even_in_stand_by(rank: int, package: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == ODD:
            patch.setattr(f"{package}.__version__", "0.0.1")
        for call in (lambda: ExpertParallel(layers_of()), stand_by):
            assert input_error(call).startswith(f"{package}: 0.0.1 on rank 2, ")


@functools.cache
def groups() -> tuple[list[Any], list[Any]]:
    """Makes two groups of all ranks, and one group of each half."""
    return [dist.new_group(list(range(RANKS))) for _ in range(2)], [dist.new_group(of) for of in ([0, 1], [2, 3])]


def make(**options: Any) -> Any:
    return ExpertParallel(layers_of(), **{"replicate_group": None, **options})


def test_replicas_may_be_at_different_calls(rank: int) -> None:
    """The second replica has one micro-step more. In the first one, rank 0 looks for other calls while it waits."""
    cpu = torch.device("cpu")
    calls = Calls(Channel(groups()[1][rank // 2]), Failures("different calls", range(RANKS), rank, [], cpu), cpu)
    if rank >= 2:
        calls.passing("micro_step(0)")
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
    calls.expect("drain()")


def test_different_groups_are_rejected(rank: int) -> None:
    (world, same), halves = groups()
    half, odd = halves[rank // 2], rank == ODD
    whole = "[0, 1, 2, 3]"
    for words, options in (
        (f"group: [2, 3] on rank 2, {whole} on ranks 0, 1, 3; expected the same on all ranks of a group",
         {"group": half if odd else None}),
        (f"group: {whole} named ", {"group": same if odd else world}),
        (f"copy_group: {whole} named ", {"copy_group": world if odd else None}),
        (f"copy_group: {whole} named ", {"copy_group": same if odd else world}),
    ):  # fmt: skip
        said = input_error(lambda options=options: make(**options))
        assert said.startswith(words) and " on rank 2, " in said, said
    expect_error_on_all_ranks(
        rank, lambda: make(group="all" if odd else None), "group: is a str; expected a process group"
    )
    expect_error_on_all_ranks(rank, lambda: make(copy_group=half if odd else world), "copy_group: [2, 3] named ")
    said = input_error(lambda: stand_by() if odd else make(group=half))
    assert said.startswith("group: none on rank 2, [2, 3] on rank 3, [0, 1] on ranks 0, 1; expected")


def test_independent_groups_may_have_different_arguments(rank: int) -> None:
    half = groups()[1][rank // 2]
    make(group=half, depth=3 if rank > 1 else 2).detach()
    if rank < 2:
        make(group=half).detach()
    else:
        stand_by()
    said = input_error(lambda: make(group=half, depth=3 if rank == 3 else 2))
    assert said.startswith("depth: 2 on rank 2, 3 on rank 3; expected")


def test_arguments_of_plan_and_wrap_must_be_equal_on_all_ranks(rank: int) -> None:
    odd = rank == ODD
    ep = ExpertParallel([Layer()])
    good, model = [torch.tensor([[[rank]]])], torch.nn.Linear(2, 2)
    for name, value, other in (
        ("phase", "recompute", "policy_update"),
        ("unrouted", "home", "drop"),
        ("on_mismatch", "home", "refuse"),
    ):
        said = input_error(lambda name=name, value=value, other=other: ep.plan(good, **{name: value if odd else other}))
        assert said.startswith(f"{name}: {value!r} on rank 2, {other!r} on {OTHERS}; expected the same")
    said = input_error(lambda: ep.wrap(model, "ddp" if odd else None))
    assert said.startswith(f"wrapper: 'ddp' on rank 2, None on {OTHERS}; expected the same")
    said = input_error(lambda: ep.wrap(torch.nn.Linear(2, 3) if odd else model))
    assert said.startswith("model[weight]: float32 [3, 2], trained on rank 2, float32 [2, 2], trained on ranks")
    ep.wrap(model, "ddp")
    said = input_error(lambda: ep.plan(good * (1 + odd)))
    assert said.startswith(f"routes: 2 micro-steps on rank 2, 1 micro-steps on {OTHERS}; expected the same")
    ep.layers[0].weights()["matrix"].requires_grad_(not odd)
    said = input_error(lambda: ep.plan(good))
    assert said.startswith("layers[0].matrix: float32 [1, 8, 8], frozen on rank 2, float32 [1, 8, 8], trained on")


def test_a_shortened_long_value_is_still_compared() -> None:
    long, other = "x" * 1000, "x" * 999 + "y"
    assert len(shortened(long)) < 100
    assert shortened(long) != shortened(other)
    assert shortened("short") == "short"


def test_the_rarest_value_comes_first_and_few_ranks_are_listed() -> None:
    assert spelled({0: "2", 1: "2", 2: "3", 3: "2"}) == "3 on rank 2, 2 on ranks 0, 1, 3"
    assert spelled({0: "a", 1: "b"}) == "a on rank 0, b on rank 1"
    assert spelled({0: "1", 1: "2", 2: "1", 3: "2"}) == "1 on ranks 0, 2; 2 on ranks 1, 3"
    assert spelled(dict.fromkeys(range(20), "a") | {20: "b"}).endswith("a on ranks 0, 1, 2, 3, 4, 5, 6, 7, … (20)")


def test_one_process_without_groups_raises_its_own_error() -> None:
    with pytest.raises(KeyError), refused_together():
        raise KeyError("own")
    with refused_together() as given:
        given.expect_equal({"depth": "2"})

"""What one rank is given otherwise than the others is refused by all of them, by its name.

One spawn of four processes runs all checks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matrix import HIDDEN, Layer
from refusals import ODD, OTHERS, timed_refusal
from training import RANKS, on_all_ranks

import foremoe
from foremoe._engine.arguments import OPTIONS
from foremoe._engine.together import refused_together, shortened, spelled
from foremoe.torch import ExpertParallel, stand_by

# By argument of ExpertParallel: what rank 2 is given, and what all others are.
ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "guest_slots": (2, 1),
    "residency": ("shared", "resident"),
    "policy": ("static", "foremoe"),
    "depth": (3, 2),
    "path": ("auto", "peer"),
    "host_timeout": (31.0, 30.0),
    "ranks_per_node": (2, None),
    "prefer": ("links", "balance"),
    "tolerance": (0.1, 0.2),
    "stages": ("BL", "BLP"),
    "max_copies_per_rank": (2, 3),
    "max_copies_per_source": (2, 3),
    "min_tokens_per_guest": (2, 3),
    "seed": (1, 2),
}
ELSEWHERE = {"layers", "group", "copy_group", "replicate_group"}  # compared below, and in test_replicas.py
MAY_DIFFER = {"threads"}


class Named(Layer):
    """Its weights have another name."""

    def weights(self) -> dict[str, Any]:
        return {"square": self.matrix}


def layers_of(**odd: Any) -> list[Any]:
    """Two layers; the second with other attributes."""
    layers = [Layer(), Layer()]
    for name, value in odd.items():
        setattr(layers[1], name, value)
    return layers


def of_type(dtype: Any) -> list[Any]:
    layers = layers_of()
    for layer in layers:
        layer.matrix = torch.nn.Parameter(layer.matrix.detach().to(dtype))
    return layers


def of_frozen() -> list[Any]:
    layers = layers_of()
    layers[1].matrix.requires_grad_(False)
    return layers


def of_width(width: int) -> list[Any]:
    layers = layers_of()
    for layer in layers:
        layer.matrix = torch.nn.Parameter(torch.zeros(4, width, width))
    return layers


# What rank 2 has for layers, and how the error begins.
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
    "type": (lambda: of_type(torch.float64), f"layers[0].matrix: float64 [4, {HIDDEN}, {HIDDEN}], trained on rank 2"),
    "shape": (
        lambda: of_width(6),
        "layers[0].matrix: float32 [4, 6, 6], trained on rank 2, float32 [4, 8, 8], trained",
    ),
    "frozen": (of_frozen, f"layers[1].matrix: float32 [4, {HIDDEN}, {HIDDEN}], frozen on rank 2"),
}


def of_creation(rank: int) -> dict[str, Any]:
    """By argument."""
    found = {}
    for name, (odd, others) in ARGUMENTS.items():
        options = {name: odd if rank == ODD else others}
        found[name] = timed_refusal(lambda options=options: ExpertParallel(layers_of(), **options))
    not_given = {"tolerance": 0.1} if rank == ODD else {}
    found["an option that others are not given"] = timed_refusal(lambda: ExpertParallel(layers_of(), **not_given))
    threads = 2 if rank == ODD else 1
    found["threads"] = timed_refusal(lambda: ExpertParallel(layers_of(), threads=threads).detach())
    for name, (odd_layers, _) in ODD_LAYERS.items():
        layers = odd_layers() if rank == ODD else layers_of()
        found[f"layers: {name}"] = timed_refusal(lambda layers=layers: ExpertParallel(layers))
    found["a wrong layer"] = timed_refusal(lambda: ExpertParallel([] if rank == ODD else layers_of()))
    found["a wrong argument"] = timed_refusal(
        lambda: ExpertParallel(layers_of(), path="air" if rank == ODD else "peer")
    )
    for of in ("foremoe", "torch"):
        with pytest.MonkeyPatch.context() as patch:
            if rank == ODD:
                patch.setattr({"foremoe": foremoe, "torch": torch}[of], "__version__", "0.0.1")
            found[of] = timed_refusal(lambda: ExpertParallel(layers_of()))
            found[f"{of} where all stand by"] = timed_refusal(stand_by)
    return found


def of_groups(rank: int) -> dict[str, Any]:
    world = [dist.new_group(list(range(RANKS))) for _ in range(2)]
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[rank // 2]
    cases = {
        "group": {"group": half if rank == ODD else None},
        "group of the same ranks": {"group": world[rank == ODD]},
        "no group": {"group": "all" if rank == ODD else None},
        "copy_group": {"copy_group": world[0] if rank == ODD else None},
        "copy_group of the same ranks": {"copy_group": world[rank == ODD]},
        "copy_group of fewer ranks": {"copy_group": half if rank == ODD else world[0]},
        "of another half": {"group": half, "depth": 3 if rank == 3 else 2},
        "of both halves": {"group": half, "depth": 3 if rank > 1 else 2},
    }
    found = {
        name: timed_refusal(lambda options=options: ExpertParallel(layers_of(), replicate_group=None, **options))
        for name, options in cases.items()
    }
    alone: dict[str, Any] = {"group": half, "replicate_group": None}
    found["a rank that stands by"] = timed_refusal(
        lambda: stand_by() if rank == ODD else ExpertParallel(layers_of(), **alone)
    )
    found["a half stands by"] = timed_refusal(
        lambda: ExpertParallel(layers_of(), **alone).detach() if rank < 2 else stand_by()
    )
    return found


def of_plan(rank: int) -> dict[str, Any]:
    """By argument of plan() and of wrap(), which end before anything is planned, or wrapped."""
    ep = ExpertParallel([Layer()])
    good = [torch.tensor([[[rank]]])]
    cases = {
        "phase": {"phase": "recompute" if rank == ODD else "policy_update"},
        "unrouted": {"unrouted": "home" if rank == ODD else "drop"},
        "on_mismatch": {"on_mismatch": "home" if rank == ODD else "refuse"},
    }
    found = {name: timed_refusal(lambda options=options: ep.plan(good, **options)) for name, options in cases.items()}
    found["routes"] = timed_refusal(lambda: ep.plan([good[0].repeat(1, 1, 1 + (rank == ODD))]))
    model = torch.nn.Linear(2, 2)
    found["wrapper"] = timed_refusal(lambda: ep.wrap(model, "ddp" if rank == ODD else None))
    found["model"] = timed_refusal(lambda: ep.wrap(torch.nn.Linear(2, 3) if rank == ODD else model))
    ep.wrap(model, "ddp")
    found["micro-steps under ddp"] = timed_refusal(lambda: ep.plan(good * (1 + (rank == ODD))))
    ep.layers[0].weights()["matrix"].requires_grad_(rank != ODD)
    found["frozen since"] = timed_refusal(lambda: ep.plan(good))
    return found


def work(rank: int) -> dict[str, Any]:
    return of_creation(rank) | of_groups(rank) | of_plan(rank)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_all_ranks(work)


def test_every_argument_is_compared() -> None:
    """One that is new must be compared, and be put to the test here."""
    arguments = set(inspect.signature(ExpertParallel).parameters) - {"options"} | OPTIONS
    assert arguments == set(ARGUMENTS) | ELSEWHERE | MAY_DIFFER


@pytest.mark.parametrize("name", ARGUMENTS)
def test_all_ranks_refuse_an_argument_that_one_has_otherwise(found: list[dict[str, Any]], name: str) -> None:
    odd, others = ARGUMENTS[name]
    for of in found:
        expected = f"{name}: {odd!r} on rank 2, {others!r} on {OTHERS}; expected the same on all ranks"
        assert (of[name]["said"], of[name]["field"]) == (expected, name)


def test_an_option_of_one_rank_alone_is_named(found: list[dict[str, Any]]) -> None:
    for of in found:
        said = of["an option that others are not given"]["said"]
        assert said == f"tolerance: 0.1 on rank 2, not given on {OTHERS}; expected the same on all ranks"


def test_threads_may_differ(found: list[dict[str, Any]]) -> None:
    assert [of["threads"]["said"] for of in found] == ["nothing"] * RANKS


@pytest.mark.parametrize("name", ODD_LAYERS)
def test_all_ranks_refuse_layers_that_one_has_otherwise(found: list[dict[str, Any]], name: str) -> None:
    for of in found:
        assert of[f"layers: {name}"]["said"].startswith(ODD_LAYERS[name][1])
        assert of[f"layers: {name}"]["field"] == "layers"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("a wrong layer", "layers: there is no MoE layer"),
        ("a wrong argument", "path: 'air', expected auto, host or peer"),
        ("no group", "group: is a str; expected a process group"),
        ("copy_group of fewer ranks", "copy_group: [2, 3] named "),
    ],
)
def test_what_one_rank_refuses_is_told_by_all(found: list[dict[str, Any]], case: str, words: str) -> None:
    for rank, of in enumerate(found):
        assert of[case]["said"].startswith(words if rank == ODD else f"rank 2 refused: {words}")


@pytest.mark.parametrize("name", ["foremoe", "torch"])
def test_other_versions_are_refused(found: list[dict[str, Any]], name: str) -> None:
    for of in found:
        for case in (name, f"{name} where all stand by"):
            assert of[case]["said"].startswith(f"{name}: 0.0.1 on rank 2, ")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("group", "group: [2, 3] on rank 2, [0, 1, 2, 3] on ranks 0, 1, 3; expected the same on all ranks of a group"),
        ("group of the same ranks", "group: [0, 1, 2, 3] named "),
        ("copy_group", "copy_group: [0, 1, 2, 3] named "),
        ("copy_group of the same ranks", "copy_group: [0, 1, 2, 3] named "),
        ("a rank that stands by", "group: none on rank 2, [2, 3] on rank 3, [0, 1] on ranks 0, 1; expected"),
    ],
)
def test_other_groups_are_refused(found: list[dict[str, Any]], case: str, words: str) -> None:
    for of in found:
        assert of[case]["said"].startswith(words)
        assert " on rank 2, " in of[case]["said"]


def test_groups_that_know_nothing_of_each_other_may_have_other_arguments(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["of both halves"]["said"] == "nothing"
        assert of["a half stands by"]["said"] == "nothing"
        assert of["of another half"]["said"].startswith("depth: 2 on rank 2, 3 on rank 3; expected")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("phase", f"phase: 'recompute' on rank 2, 'policy_update' on {OTHERS}; expected the same"),
        ("unrouted", f"unrouted: 'home' on rank 2, 'drop' on {OTHERS}; expected the same"),
        ("on_mismatch", f"on_mismatch: 'home' on rank 2, 'refuse' on {OTHERS}; expected the same"),
        ("wrapper", f"wrapper: 'ddp' on rank 2, None on {OTHERS}; expected the same"),
        ("model", "model[weight]: float32 [3, 2], trained on rank 2, float32 [2, 2], trained on ranks"),
        ("micro-steps under ddp", f"routes: 2 micro-steps on rank 2, 1 micro-steps on {OTHERS}; expected the same"),
        ("frozen since", "layers[0].matrix: float32 [1, 8, 8], frozen on rank 2, float32 [1, 8, 8], trained on"),
    ],
)
def test_all_ranks_plan_and_wrap_alike(found: list[dict[str, Any]], case: str, words: str) -> None:
    for of in found:
        assert of[case]["said"].startswith(words)


def test_routes_that_one_rank_refuses_are_told_by_all(found: list[dict[str, Any]]) -> None:
    words = "routes[0]: is torch.int64 [1, 1, 2]; expected integers [rows, 1, 1]"
    assert [of["routes"]["said"] for of in found] == [
        words if rank == ODD else f"rank 2 refused: {words}" for rank in range(RANKS)
    ]


def test_ranks_refuse_within_five_seconds(found: list[dict[str, Any]]) -> None:
    assert max(case["seconds"] for of in found for case in of.values()) < 5


def test_a_long_value_is_shortened_and_yet_compared() -> None:
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
        given.expect_alike({"depth": "2"})

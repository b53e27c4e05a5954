"""What an engineer can get wrong, and what a rank that dies does to the others."""

from __future__ import annotations

import copy
import itertools
import pathlib
import tempfile
import time
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from matrix import EXPERTS, HIDDEN, RANKS, TOP_K, Layer, routes_of
from processes import begin_rank, rank_starter, run_ranks
from refusals import refusal

import foremoe
from foremoe._engine.arguments import PlanningArguments, expect_warm_start
from foremoe.torch import ExpertParallel, grouped_linear

# Whose plans are of residency shared, whatever is asked.
SHARING = ("feplb", "llep", "ultraep", "moonep", "echo", "fastermoe")


class Hides(torch.autograd.Function):
    """rows @ weight, which keeps its weight where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any) -> Any:
        ctx.rows, ctx.weight = rows, weight
        return rows @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] @ ctx.weight.T, ctx.rows.T @ grads[0]


class Hiding(Layer):
    def forward_rows(self, rows: Any, offsets: Any, weights: dict[str, Any]) -> Any:
        ends = [0, *offsets.tolist()]
        parts = zip(ends[:-1], ends[1:], weights["matrix"], strict=True)
        return torch.cat([Hides.apply(rows[begin:end], weight) for begin, end, weight in parts])


class Summed(Layer):
    """Its experts are sums of two weights, of which autograd gives both gradients in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Parameter(torch.zeros_like(self.matrix))

    def weights(self) -> dict[str, Any]:
        return {"matrix": self.matrix, "more": self.more}

    def set_weights(self, weights: dict[str, Any]) -> None:
        self.matrix, self.more = weights["matrix"], weights["more"]

    def forward_rows(self, rows: Any, offsets: Any, weights: dict[str, Any]) -> Any:
        return grouped_linear(rows, weights["matrix"] + weights["more"], offsets)


# An argument of ExpertParallel, a value that it cannot have, and what is said when it is made.
REFUSED: list[tuple[str, Any, str]] = [
    ("residency", "free", "InputError: residency: 'free', expected one of static, resident, shared"),
    ("residency", "auto", "InputError: residency: 'auto', expected one of static, resident, shared"),
    ("policy", "none", "InputError: policy: 'none', expected one of vanilla, static, "),
    ("policy", None, "InputError: policy: is a NoneType; expected a str"),
    (
        "policy",
        "eplb",
        "InputError: policy: eplb made a plan of residency free, 1 in flight, whose homes may have moved",
    ),
    ("policy", "finemoe-random", "PolicySkipped: policy finemoe-random cannot plan it: needs as many guest slots"),
    ("guest_slots", -1, "InputError: guest_slots: -1 is not in 0 … "),
    ("guest_slots", 0.5, "InputError: guest_slots: '0.5' is not a whole number"),
    ("depth", 0, "InputError: depth: 0 is less than 1"),
    ("depth", "2", "InputError: depth: is a str; expected an integer"),
    ("path", "air", "InputError: path: 'air', expected auto, host or peer"),
    ("host_timeout", 0, "InputError: host_timeout: 0, must be above 0"),
    ("host_timeout", "long", "InputError: host_timeout: is a str; expected a number"),
    ("ranks_per_node", 0, "InputError: ranks_per_node: 0, expected 1 to "),
    ("ranks_per_node", 1.5, "InputError: ranks_per_node: is a float; expected an integer"),
    ("threads", -1, "InputError: threads: -1; must be an integer from 0 to "),
    ("tolerance", 2, "InputError: tolerance: 2 is not in 0 … 1"),
    ("stages", "Z", "InputError: stages: 'Z', expected some of B, L, P, T and S"),
    ("rehome", 1, "InputError: rehome: is none of"),
    ("in_flight", 2, "InputError: in_flight: is none of"),
]


def make_parallel(layer: Layer) -> Any:
    """Of a model that has no other parameters."""
    ep = ExpertParallel([layer])
    ep.wrap(torch.nn.Module(), "own")
    return ep


def run_one(ep: Any, layer: Layer, rank: int, micro_steps: int = 1) -> int:
    """Returns the number of experts that were copied into this rank."""
    phase = ep.plan(routes_of(rank) * micro_steps)
    with phase:
        for m in phase.micro_steps:
            with phase.micro_step(m):
                rows = len(routes_of(rank)[0])
                out = layer.execute(torch.ones(rows, HIDDEN), layer.ids, torch.ones(rows, TOP_K))
                out.sum().backward()
        phase.drain()
    copies: int = phase.figures()["copies"]
    return copies


def work(rank: int, folder: str) -> None:
    begin_rank(rank, RANKS, folder)
    found: dict[str, Any] = {}
    found["no layers"] = refusal(lambda: ExpertParallel([]))
    found["experts"] = refusal(lambda: ExpertParallel([Layer(5)]))
    found["shapes"] = refusal(lambda: ExpertParallel([Layer(), Layer(8)]))

    for name, value, _ in REFUSED:
        found[f"{name}={value!r}"] = refusal(lambda name=name, value=value: ExpertParallel([Layer()], **{name: value}))
    for policy in SHARING:
        found[f"hiding, {policy}"] = refusal(lambda policy=policy: ExpertParallel([Hiding()], policy=policy))
    found["hiding, static"] = refusal(lambda: ExpertParallel([Hiding()], policy="static", residency="shared").detach())
    layer = Layer()
    whole = layer.matrix.detach().clone()
    ep = make_parallel(layer)
    found["own experts"] = torch.equal(layer.matrix, whole[2 * rank : 2 * rank + 2])
    run_one(ep, layer, rank)
    # Rows of ones: the gradient of an expert is its rows, over both ranks, in the mean.
    rows = {0: 4, 1: 1, 2: 0, 3: 1}
    found["gradients"] = [float(g.max()) for g in layer.matrix.grad] == [rows[2 * rank + e] / RANKS for e in range(2)]

    summed = Summed()
    copies = run_one(make_parallel(summed), summed, rank, micro_steps=2)
    gradients = [[float(g.min()) for g in weight.grad] for weight in summed.weights().values()]
    found["of one tensor"] = copies, gradients, [2 * rows[2 * rank + e] / RANKS for e in range(2)]

    norm = ep.clip_grad_norm_(1.0)
    found["norm"] = float(norm), float(sum((HIDDEN * n / RANKS) ** 2 for n in rows.values()) ** 0.5)
    clipped = torch.tensor(float(layer.matrix.grad.norm() ** 2))
    dist.all_reduce(clipped)
    found["clipped"] = float(clipped)

    state = ep.whole_state_dict(layer)
    found["state"] = state.keys() == {"matrix"} and torch.equal(state["matrix"], whole)
    ep.load_whole_state_dict(layer, {"matrix": whole + 1})
    found["loaded"] = torch.equal(layer.matrix, whole[2 * rank : 2 * rank + 2] + 1)
    unknown = ExpertParallel([Layer()])
    found["no model"] = refusal(lambda: unknown.whole_optimizer_state(torch.optim.SGD([layer.matrix])))
    found["missing"] = refusal(lambda: ep.load_whole_state_dict(layer, {}))

    good = routes_of(rank)
    for name, wrong in {
        "floats": [good[0].float()],
        "layers": [good[0].repeat(1, 2, 1)],
        "range": [good[0] + EXPERTS],
        "inner": [torch.tensor([[[[0]], [[-1]], [[-1]], [[1]]]])],
    }.items():
        found[name] = refusal(lambda wrong=wrong: ep.plan(wrong))
    found["unrouted"] = refusal(lambda: ep.plan(good, unrouted="away"))
    found["on_mismatch"] = refusal(lambda: ep.plan(good, on_mismatch="away"))
    found["one tensor"] = refusal(lambda: ep.plan(good[0]))
    of_two = Layer()
    of_two.top_k = 2
    found["repeated"] = refusal(lambda: ExpertParallel([of_two]).plan([torch.tensor([[[0, 1]], [[2, 2]]])]))
    warm_starts(found, ep, rank)
    lone = Layer()
    uneven = make_parallel(lone).plan(good * (2 - rank))
    with uneven:
        for m in uneven.micro_steps:
            if m == 1 and rank == 1:
                found["no batch"] = refusal(lambda: uneven.micro_step(1).__enter__())
                uneven.idle(m)
                continue
            with uneven.micro_step(m):
                of_rows = torch.ones(len(good[0]), HIDDEN), good[0].reshape(-1, 1), torch.ones(len(good[0]), 1)
                lone.execute(*of_rows).sum().backward()
        uneven.drain()
    found["no micro-steps"] = refusal(lambda: ep.plan([]))
    found["spread"] = refusal(lambda: ExpertParallel([Layer(), layer]))
    again = Layer()
    ExpertParallel([again]).detach()
    found["detached"] = refusal(lambda: ExpertParallel([again]))
    inside = Layer()
    left = ExpertParallel([inside])
    with left.unplanned():
        copied = copy.deepcopy(inside)  # as reference models are made
        left.detach()
    found["detached inside"] = "nothing" if inside.execute is None and copied.execute is not None else "executed"
    found["wrapper"] = refusal(lambda: ep.wrap(torch.nn.Linear(1, 1), "fsdp"))
    two = ExpertParallel([Layer(), Layer()])
    found["some layers"] = refusal(lambda: two.plan([torch.tensor([[[0], [1]], [[2], [-1]]])]))
    phase = ep.plan(good)
    found["not entered"] = refusal(lambda: phase.guests)
    with phase:
        found["order"] = refusal(lambda: phase.micro_step(1).__enter__())
        found["outside"] = refusal(lambda: layer.execute(torch.ones(1, HIDDEN), None, torch.ones(1, 1)))
        found["two phases"] = refusal(lambda: ep.plan(good).__enter__())
        found["too early"] = refusal(phase.drain)
        with phase.micro_step(0):
            rows_here = len(good[0])
            one = torch.ones(rows_here, HIDDEN), layer.ids, torch.ones(rows_here, 1)
            found["rows"] = refusal(lambda: layer.execute(torch.ones(9, HIDDEN), None, torch.ones(9, 1)))
            out = layer.execute(*one)
            found["twice"] = refusal(lambda: layer.execute(*one))
            out.sum().backward(retain_graph=True)
            found["backward twice"] = refusal(out.sum().backward)
        phase.drain()
        found["drained twice"] = refusal(phase.drain)
    frozen = Layer()
    frozen.matrix.requires_grad_(False)
    of_frozen = make_parallel(frozen)
    run_one(of_frozen, frozen, rank)
    found["frozen"] = frozen.matrix.grad is None
    before = layer.matrix.grad.clone()
    found["undrained"] = refusal(lambda: leave_undrained(ep, layer, rank))
    found["gradients kept"] = torch.equal(layer.matrix.grad, before)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def warm_starts(found: dict[str, Any], ep: Any, rank: int) -> None:
    """Plans from former plans: of one guest on rank 1, and of none."""

    def plan_of(source: list[int], **options: Any) -> foremoe.Plan:
        return foremoe.plan(foremoe.Load.from_array(np.array([[[source] * 2]]), top_k=1), **options)

    hot = [9, 1, 0, 0]
    skewed, even, static, of_eight = plan_of(hot), plan_of([1] * 4), plan_of(hot, residency="static"), plan_of([1] * 8)
    assert np.array_equal(static.slot_expert, skewed.slot_expert), "only their residencies differ"
    good = routes_of(rank)
    found["previous of rank 1"] = refusal(lambda: ep.plan(good, previous=(skewed, even)[rank]))
    found["previous residency of rank 1"] = refusal(lambda: ep.plan(good, previous=(skewed, static)[rank]))
    found["previous of more slots"] = refusal(lambda: ep.plan(good, previous=plan_of(hot, guest_slots=2)))
    found["previous path"] = refusal(lambda: ep.plan(good, previous="former.plan"))
    found["previous shape"] = refusal(lambda: ep.plan(good, previous=of_eight).__enter__())
    for name, arguments in {"shared": {"residency": "shared"}, "no slots": {"guest_slots": 0}}.items():
        cold = ExpertParallel([Layer()], policy="foremoe", **arguments)
        found[f"warm, {name}"] = refusal(cold.expect_warm_starts)
        found[f"previous, {name}"] = refusal(lambda cold=cold: cold.plan(good, previous=skewed))
        cold.detach()
    ep.expect_warm_starts()
    with mock.patch.object(ep._shares, "start_plan", wraps=ep._shares.start_plan) as planner:
        ep.plan(good, previous=skewed)
        ep.plan(good)
    found["planned from"] = [call.kwargs["previous"] is skewed for call in planner.call_args_list]


def leave_undrained(ep: Any, layer: Layer, rank: int) -> None:
    with ep.plan(routes_of(rank)) as phase, phase.micro_step(0):
        rows = len(routes_of(rank)[0])
        layer.execute(torch.ones(rows, HIDDEN), layer.ids, torch.ones(rows, 1)).sum().backward()


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(RANKS, work, folder)
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no layers", "InputError: layers: there is no MoE layer"),
        ("experts", "InputError: group: 2 ranks must divide 5 experts"),
        ("shapes", "InputError: layers[1]: is of another shape"),
        ("missing", "InputError: state: matrix is missing"),
        ("no model", "InputError: model: unknown; call ep.wrap(model) first"),
        ("floats", "InputError: routes[0]: is torch.float32"),
        ("layers", "expected integers [rows, 1, 1]"),
        ("range", "]: expert 4 of 4"),
        ("inner", "rows between rows with routes have none"),
        ("one tensor", "InputError: routes: is one tensor"),
        ("repeated", "InputError: routes[0][1, 0, 1]: expert 2 appears twice in a row"),
        ("unrouted", "InputError: unrouted: 'away', expected drop or home"),
        ("on_mismatch", "InputError: on_mismatch: 'away', expected refuse, replay or home"),
        ("previous of rank 1", "InputError: previous: "),
        ("previous residency of rank 1", "InputError: previous: "),
        ("previous of more slots", "nothing"),
        ("previous path", "InputError: previous: is a str"),
        ("previous shape", "InputError: previous: has 1 layers, 2 ranks and 8 experts, the load has 1, 2 and 4"),
        *(
            (f"{of}, shared", "InputError: previous: the former plan has no effect: under")
            for of in ("warm", "previous")
        ),
        *(
            (f"{of}, no slots", "InputError: previous: the former plan has no effect: there")
            for of in ("warm", "previous")
        ),
        ("no micro-steps", "InputError: routes: there is no micro-step, on any rank"),
        ("spread", "InputError: layers[1]: another ExpertParallel has spread its experts"),
        ("detached", "nothing"),
        ("detached inside", "nothing"),
        ("wrapper", "InputError: wrapper: 'fsdp', expected None, ddp, fsdp2 or own"),
        ("some layers", "InputError: routes[0]: a row has a route in some layers alone"),
        ("not entered", "the phase has not been entered"),
        ("order", "micro-step 1 was entered, but 0 comes next"),
        ("outside", "outside of micro_step()"),
        ("two phases", "another phase is running"),
        ("undrained", "without drain()"),
        *((f"{name}={value!r}", words) for name, value, words in REFUSED),
        *((f"hiding, {policy}", "InputError: residency: shared, but the experts of own read") for policy in SHARING),
        ("hiding, static", "nothing"),
        ("too early", "drain() comes once, after the backward of the last micro-step"),
        ("drained twice", "drain() comes once"),
        ("rows", "9 rows ran, but there are routes of"),
        ("twice", "its forward ran twice in one micro-step"),
        ("backward twice", "its backward of micro-step 0 ran out of order, or twice"),
    ],
)
def test_mistakes_are_named(found: list[dict[str, Any]], case: str, words: str) -> None:
    for of in found:
        assert words in of[case]


def test_a_former_plan_is_where_planning_starts(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["planned from"] == [True, False]


def test_a_rank_without_a_batch_is_told_to_idle(found: list[dict[str, Any]]) -> None:
    assert "this rank has no batch in micro-step 1: run idle(1)" in found[1]["no batch"]


def test_a_layer_of_ones_own_is_sharded_trained_clipped_and_saved(found: list[dict[str, Any]]) -> None:
    for of in found:
        for case in ("own experts", "gradients", "state", "loaded", "gradients kept", "frozen"):
            assert of[case], case
        norm, expected = of["norm"]
        assert norm == pytest.approx(expected)
        assert of["clipped"] == pytest.approx(1.0, rel=1e-4)


def test_weights_whose_gradients_are_one_tensor_have_their_own_sums(found: list[dict[str, Any]]) -> None:
    assert sum(of["of one tensor"][0] for of in found) > 0
    for of in found:
        _, gradients, expected = of["of one tensor"]
        assert gradients == [expected, expected]


def die(rank: int, folder: str) -> None:
    begin_rank(rank, RANKS, folder)
    layer = Layer()
    ep = ExpertParallel([layer])
    gradient = torch.ones_like(layer.matrix)
    layer.matrix.grad = gradient
    weights = layer.matrix.detach().clone()
    phase = ep.plan(routes_of(rank))
    try:
        with phase, phase.micro_step(0):
            if rank == 1:
                time.sleep(1)
                raise KeyboardInterrupt
            layer.execute(torch.ones(4, HIDDEN), layer.ids, torch.ones(4, 1)).sum().backward()
    except RuntimeError as error:
        kept = layer.matrix.grad is gradient and torch.equal(layer.matrix, weights)
        pathlib.Path(folder, "found").write_text(f"{'kept' if kept else 'changed'}: {error}")


def test_a_rank_that_dies_ends_the_others_soon_with_nothing_applied() -> None:
    with tempfile.TemporaryDirectory() as folder:
        processes = [rank_starter().Process(target=die, args=(rank, folder)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(180)
        alive = [process.is_alive() for process in processes]
        for process in processes:
            process.kill()
        assert not any(alive)
        assert pathlib.Path(folder, "found").read_text().startswith("kept: ")


def test_a_warm_start_is_refused_exactly_where_it_has_no_effect() -> None:
    """Against the planner: plans from a former plan and from none."""
    shape: Any = {"layers": 2, "experts": 32, "ranks": 8, "top_k": 2, "micro_steps": 4, "tokens_per_rank": 400}
    loads = [foremoe.synthesize_load(seed=seed, group_size=2, **shape) for seed in range(8)]
    cases: list[tuple[str, dict[str, Any]]] = [
        *((policy, {}) for policy in foremoe.policies()),
        ("foremoe", {"residency": "shared"}),
        ("foremoe", {"residency": "static"}),
        ("foremoe", {"guest_slots": 0}),
        ("foremoe", {"stages": "LPT"}),
        ("foremoe", {"max_copies_per_rank": 1}),
        ("foremoe", {"max_copies_per_rank": "none"}),
        ("foremoe", {"max_copies_per_source": 1}),
        ("flexmoe", {"stages": "LPT"}),
    ]
    for policy, options in cases:
        given: Any = {"guest_slots": 2} | options
        differs = False
        for former, load in itertools.pairwise(loads):
            try:
                previous = foremoe.plan(former, policy, **given)
                warm, cold = (foremoe.plan(load, policy, previous=p, **given) for p in (previous, None))
            except foremoe.PolicySkipped:
                continue
            differs |= not np.array_equal(warm.slot_expert, cold.slot_expert)
        arguments = PlanningArguments(
            policy=policy, guest_slots=given.pop("guest_slots"), residency=given.pop("residency", "resident"),
            depth=2, ranks_per_node=None, threads=1, options=given,
        )  # fmt: skip
        refused = refusal(lambda arguments=arguments: expect_warm_start(arguments)) != "nothing"
        # static takes a former plan once in a hundred steps, and finemoe with a former load alone.
        is_rare = policy in ("static", "finemoe") or options.get("residency") == "static"
        assert refused != differs or (is_rare and not refused), (policy, options, differs, refused)

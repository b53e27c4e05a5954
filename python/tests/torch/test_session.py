"""A session runs one thing at a time, and nothing after a failure. Votes name what differs between ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from refusals import refusal

from foremoe._engine.calls import Calls
from foremoe._engine.failures import Channel, Failures
from foremoe._engine.groups import make_groups
from foremoe._engine.session import Session
from foremoe._engine.shares import Shares
from foremoe._engine.votes import Votes

CPU = torch.device("cpu")
FAILING = 1


def make(by: str = "votes") -> Session:
    """Returns a session whose ranks learn of a failure by votes, as under Megatron-LM, or by calls."""
    groups, name = make_groups([(dist.group.WORLD, "gloo")] * 2)
    channels = [Channel(group, is_own=True) for group in groups]
    failures = Failures(name, range(dist.get_world_size()), dist.get_rank(), channels[:1], CPU)
    if by == "votes":
        return Session(Shares(None, {}), failures, channels, votes=Votes(channels[1:]))
    return Session(Shares(None, {}), failures, channels, calls=Calls(channels[0], failures, CPU))


def half_of(rank: int) -> Channel:
    """Returns a channel between ranks 0 and 1, or between ranks 2 and 3."""
    (group,), _ = make_groups([([rank // 2 * 2, rank // 2 * 2 + 1], "gloo")])
    return Channel(group, is_own=True)


def test_a_session_runs_one_thing_at_a_time(rank: int) -> None:
    session = make()
    with session.busy("a phase"):
        assert session.runs == "a phase"
        said = refusal(session.busy("evaluate()").__enter__)
        assert said == "RuntimeError: a phase is running: end it before evaluate() begins"
        assert refusal(session.close) == "RuntimeError: a phase is running: end it before detach()"
    assert session.runs == ""
    with session.busy("evaluate()"):
        assert session.runs == "evaluate()"
    session.close()
    assert refusal(session.busy("a phase").__enter__) == "RuntimeError: detached from the model"


def test_an_error_of_one_rank_ends_the_votes_of_the_others_and_nothing_runs_again(rank: int) -> None:
    session = make()

    def work() -> None:
        with session.busy("a step"), session.ending_all("do not use it"):
            if rank == FAILING:
                raise ValueError("the loss is no number")
            session.any(False)

    own = "ValueError: the loss is no number"
    told = f"RuntimeError: rank {FAILING} failed: {own}; do not use the gradients of this step"
    assert refusal(work) == (own if rank == FAILING else told)
    assert session.has_failed and session.runs == ""
    for act in (session.busy("a step").__enter__, lambda: session.any(False), lambda: session.agree({})):
        assert refusal(act).startswith("RuntimeError: a rank failed")
    with pytest.raises(RuntimeError, match="a rank failed"), session.ending_all("do not use it"):
        raise AssertionError("it runs")
    session.close()
    assert session.has_failed and session.is_closed


def test_an_error_of_one_rank_ends_the_calls_of_the_others_which_name_it(rank: int) -> None:
    session = make("calls")

    def work() -> None:
        with session.ending_all("do not use it"):
            if rank == FAILING:
                raise ValueError("the loss is no number")
            session.expect_call("plan()")

    own = "ValueError: the loss is no number"
    told = f"RuntimeError: rank {FAILING} failed: {own}; plan() needs all ranks of the group"
    assert refusal(work) == (own if rank == FAILING else told)
    assert session.has_failed
    session.expect_call("saving")  # waits for no rank
    assert refusal(session.expect_no_failure).startswith("RuntimeError: a rank failed")
    session.close()
    assert refusal(session.expect_no_failure) == "RuntimeError: detached from the model"


def test_a_rank_that_is_idle_learns_of_a_failure_before_it_plans(rank: int) -> None:
    session = make("calls")
    if rank == FAILING:
        assert refusal(lambda: session.fail(ValueError("no memory"), "")) == "nothing"
    dist.barrier()
    said = refusal(session.expect_no_failure)
    told = f"RuntimeError: rank {FAILING} failed: ValueError: no memory; begin anew after detach()"
    assert said.startswith("RuntimeError: a rank failed") if rank == FAILING else said == told
    session.close()


def test_ranks_that_make_other_calls_are_named_and_fail(rank: int) -> None:
    session = make("calls")
    said = refusal(lambda: session.expect_call("drain()" if rank == FAILING else "plan()"))
    assert f"ranks make different collective calls: drain() on rank {FAILING}, plan() on ranks 0, 2, 3" in said
    assert session.has_failed
    session.close()


def test_a_refusal_and_values_that_differ_reach_all_ranks_which_stay_usable(rank: int) -> None:
    session = make()
    error = ValueError("no routes") if rank == FAILING else None
    said = refusal(lambda: session.agree({"phase": "recompute"}, error))
    assert said == ("ValueError: no routes" if error else f"InputError: rank {FAILING} refused: ValueError: no routes")
    said = refusal(lambda: session.agree({"phase": "recompute", "micro_steps": str(rank // 3)}))
    assert said == "InputError: micro_steps: 1 on rank 3, 0 on ranks 0, 1, 2; expected the same on all ranks"
    session.agree({"phase": "recompute"})
    assert session.any(rank == FAILING) and not session.any(False)
    session.close()


@pytest.mark.parametrize("odd", [None, 3])
def test_some_ranks_vote_among_themselves(rank: int, odd: int | None) -> None:
    """Values may differ between the halves."""
    votes = Votes([half_of(rank)])
    value = "other" if rank == odd else f"of half {rank // 2}"
    said = refusal(lambda: votes.expect_equal({"plan": value}))
    words = "InputError: plan: of half 1 on rank 2, other on rank 3; expected the same on all ranks"
    assert said == (words if odd is not None and rank >= 2 else "nothing")


def test_maxima_over_rows_and_columns_reach_all_ranks(rank: int) -> None:
    """Channels between ranks 0 and 1, 2 and 3; then 0 and 2, 1 and 3."""
    (across,), _ = make_groups([([rank % 2, rank % 2 + 2], "gloo")])
    votes = Votes([half_of(rank), Channel(across, is_own=True)])
    assert votes.most([rank, -rank, 7]) == [3, 0, 7]

"""Distribution of imbalance and of traffic between machines.

ForeMoE, arXiv 2606.11867, figure 10.

The paper plots the distribution of the imbalance ratio and of the maximum traffic of a link between machines over ten
steps, without and with ForeMoE. We do not have the values.

We assume: Each of the ten steps has 16 micro-steps of the first configuration of figure 8. Steps are planned
separately, because guests are copied again after each optimizer step. Each input appears three times in the table: with
the smallest, the median and the largest of the ten steps' figures, column by column. Relative columns compare each step
with the same step of vanilla. *Links* trades the last percent of balance for less traffic (`--prefer links`). Traffic
between machines counts token-expert assignments of the busiest node in one direction, as in dispatch by row. *GiB*
gives the bytes of each dispatch.

Result: `foremoe` reduces the mean ρ of a step from at least {mixed, least | vanilla | rho_mean | 2} to at most {mixed,
largest | foremoe | rho_mean}, and the maximum number of rows that the busiest node exchanges with others to at most
{mixed, largest | foremoe | node_link_of_first | 2} of vanilla's. Without *links*, the bytes on the busiest link, which
include copies and gradients, decrease by 6 to 11 % with math and hardly with mixed.
"""

from typing import Any

from kit import FIRST, Aim, Column, System, drawn, modelled

RHO_P99 = Column("rho_p99", "ρ p99", 4, "99th percentile of ρ", lambda m: m.figures["rho"]["p99"])
NODE_LINK = Column(
    "node_link", "node link", 0, "tokens of the busiest node's link to others, mean over pairs",
    lambda m: m.figures["node_link_tokens"]["mean"],
)
NODE_LINK_MAX = Column(
    "node_link_max", "node link max", 0, "maximum of the same", lambda m: m.figures["node_link_tokens"]["max"],
    largest=True,
)
NODE_LINK_OF_FIRST = Column(
    "node_link_of_first", "node link max ÷ first", 3, "maximum of node link ÷ the first system's",
    lambda m, first: m.figures["node_link_tokens"]["max"] / max(1.0, first.figures["node_link_tokens"]["max"]),
    versus=FIRST, largest=True,
)


def busiest_link(phase: dict[str, Any]) -> int:
    return max((sent for row in phase["between_nodes"] for sent in row), default=0)


LINK_GIB = modelled(
    "link_gib", "busiest node link, GiB", 3, "largest number of bytes from one node to another in a step",
    lambda m: (busiest_link(m.recompute) + busiest_link(m.update)) / (1 << 30), largest=True,
)
EVERY = dict(
    cluster="h100", dispatch=("token", "row"), model="Qwen3-30B-A3B", ranks=64, layers=2, micro_steps=160, steps=10,
    plan_each_step=True, sequences_per_rank=1, tokens_per_rank=4096, group_size=16, guest_slots=2,
)
inputs = [
    drawn(f"{name}, {over_steps}", over_steps=over_steps, step_spread=step_spread, group_spread=group_spread, **EVERY)
    for name, step_spread, group_spread in (("math", 0.9, 0.5), ("mixed", 0.6, 1.0))
    for over_steps in ("least", "median", "largest")
]
systems = [
    System("vanilla"),
    System("foremoe"),
    System("foremoe, links", "foremoe", prefer="links"),
]
columns = ["rho_mean", RHO_P99, "rho_max", "copies", NODE_LINK, NODE_LINK_MAX, NODE_LINK_OF_FIRST, LINK_GIB]
aims = [
    Aim("node_link_of_first", system="foremoe", at_most=1),
]

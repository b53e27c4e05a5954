"""Homes by co-activation.

Our own question, asked by no paper for training.

`foremoe homes` chooses, once per run, the rank that owns each expert, so that the experts of a token lie on few nodes.

We assume: The recorded rollout `mixed` on 64 H100 in nodes of 8, with 2,048 tokens per rank and micro-step, dispatched
by token with rows by token: one micro-step. Sequences are batched in five random orders. *Other homes* are chosen on the routes of
another recorded rollout of the same model, `math`; *own homes* are chosen on the routes that they then serve, which no
run can do, so they bound the gain. Vanilla gains from homes too: the first system has contiguous homes, so a speedup
contains the homes' part, which vanilla's own rows show. The model behind the routes has 30 million parameters, but the
sizes of the simulated one are those of Qwen3-30B-A3B.

Result: Homes alone gain {mixed | vanilla, other homes | speedup | 3 ±}, and with the default plan {mixed | foremoe, other
homes | speedup | 3 ±} instead of {mixed | foremoe | speedup | 3 ±}; the bound is {mixed | foremoe, own homes | speedup |
3 ±}.
"""

from __future__ import annotations

import functools

import foremoe
from foremoe import Homes
from kit import System, recorded
from kit.inputs import ROOT

RANKS, TOKENS = 64, 2048
OTHER, OWN = "data/rollout-math-full.safetensors", "data/rollout-mixed.safetensors"


@functools.cache
def homes_of(file: str) -> Homes:
    return foremoe.choose_homes(foremoe.read_trace(ROOT / file), ranks=RANKS, tokens_per_rank=TOKENS)[0]


class Homed(System):
    """Plans with homes that are chosen on the routes of a file."""

    def __init__(self, label: str, policy: str, file: str) -> None:
        super().__init__(label, policy)
        self.file = file

    def homes(self) -> Homes:
        return homes_of(self.file)


inputs = [
    recorded(
        "mixed", OWN, shuffled=True, draws=5, batching={"ranks": RANKS, "tokens_per_rank": TOKENS}, cluster="h100",
        model="Qwen3-30B-A3B", rows="token",
    )
]
systems = [
    System("vanilla"),
    Homed("vanilla, other homes", "vanilla", OTHER),
    Homed("vanilla, own homes", "vanilla", OWN),
    System("static"),
    Homed("static, other homes", "static", OTHER),
    System("foremoe"),
    Homed("foremoe, other homes", "foremoe", OTHER),
    Homed("foremoe, own homes", "foremoe", OWN),
]
columns = ["speedup", "step_ms", "pairs", "busiest_nic", "rho_mean", "copies"]

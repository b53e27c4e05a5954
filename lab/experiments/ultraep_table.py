"""Quota search on 64 ranks at three degrees of imbalance.

UltraEP, arXiv 2606.04101.

The table has EP 64, 256 experts and two guest slots per rank. For loads with ρ of 1.51, 2.01 and 3.03, the search
reaches 1.01 with 38, 46 and 51 replicas.

We assume: We do not know how those loads were made. Here they have 8,192 tokens per rank and three distributions, each
fitted so that the unbalanced ρ is about 1.51, 2.01 and 3.03. *Fixed*: popularity follows Zipf's law and is the same in
all micro-steps, which differ only by sampling, like micro-batches of pre-training. *Lognormal*: fixed as well, but
lognormal. *Permuted*: a Zipf popularity whose order is redrawn in every micro-step, the hardest case for resident
guests. All aims refer to the *fixed* rows. *Copies, warm* excludes the first micro-step, in which every guest is new.
UltraEP fetches every guest at every use.

Result: With Zipf popularity, the search reaches the published ρ with about the published number of replicas. With
lognormal popularity of the same ρ, it uses more. The ρ of `foremoe` is below 1.005. Once warm, `foremoe` needs 0.6 to
2.8 % of the search's copies with fixed popularity, and 20 to 30 % if popularity is permuted in every micro-step.
"""

from kit import Aim, Published, System, drawn

EVERY = dict(
    ranks=64, ranks_per_node=64, experts=256, top_k=8, layers=4, micro_steps=8, tokens_per_rank=8192, guest_slots=2,
)
inputs = [
    *(
        drawn(f"fixed, {rho}", routing="zipf", skew=skew, **EVERY)
        for rho, skew in ((1.51, 0.265), (2.01, 0.395), (3.03, 0.55))
    ),
    *(
        drawn(f"lognormal, {rho}", step_spread=spread, group_spread=0, **EVERY)
        for rho, spread in ((1.51, 0.375), (2.01, 0.62), (3.03, 0.965))
    ),
    *(
        drawn(f"permuted, {rho}", routing="zipf", skew=skew, permute_probability=1, **EVERY)
        for rho, skew in ((1.51, 0.25), (2.01, 0.37), (3.03, 0.525))
    ),
]
systems = [
    System("none", "vanilla"),
    System("UltraEP", "ultraep", whole_group=1),
    System("foremoe", tolerance=0.004),
    System("foremoe, shared", "foremoe", residency="shared"),
]
columns = ["rho_mean", "rho_max", "guests", "copies", "copies_warm"]
REPLICAS = {1.51: 38, 2.01: 46, 3.03: 51}
published = [
    published
    for kind in ("fixed", "permuted", "lognormal")
    for rho, replicas in REPLICAS.items()
    for published in (
        Published("rho_mean", rho, f"{kind}, {rho}", "none"),
        Published("rho_mean", 1.01, f"{kind}, {rho}", "UltraEP"),
        Published("guests", replicas, f"{kind}, {rho}", "UltraEP"),
    )
]
aims = [
    aim
    for rho, replicas in REPLICAS.items()
    for aim in (
        Aim("guests", f"fixed, {rho}", "UltraEP", at_least=0.85 * replicas, at_most=1.15 * replicas),
        Aim("rho_mean", f"fixed, {rho}", "foremoe", at_most=1.005),
        Aim("copies_warm", f"fixed, {rho}", "foremoe", relative_to="UltraEP", at_most=0.3333),
    )
]

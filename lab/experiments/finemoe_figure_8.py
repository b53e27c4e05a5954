"""Largest load by skew, 8 GPUs and 32 experts.

FineMoE, arXiv 2511.16947, figure 8.

Expert loads follow Zipf's law: the i-th most popular expert has i^−s of the tokens. The figure plots the largest GPU
load ÷ mean over s for SmartMoE, FlexMoE and FineMoE with random, symmetric (*w/o AR*) and asymmetric placement.
According to the text, symmetric placement is perfect for s < 1, random placement is slightly worse, and asymmetric
placement is always perfect. SmartMoE's load grows with s, and FlexMoE is in between.

We assume: Each order of popularity is a layer with 32 drawn micro-steps of 8 sequences of 2,048 tokens per GPU, top-2.
Every system plans the first 16 micro-steps and retains its final placement and their loads. The table shows the last 16
micro-steps. FlexMoE, with at most ten exchanges per micro-step, has converged by then. *vanilla* and *smartmoe* are two
expert-parallel groups of four GPUs, as in the paper: each has all experts, eight on a GPU, and serves its own tokens.
The others plan over all eight GPUs, where two replicas of every expert need four guest slots per rank. The experiment
has fewer orders, to run within a minute, than `build/release/bin/finemoe_figure8`, which uses a thousand with expected
loads (lab/policies.md). Popularity is constant, so SmartMoE and FlexMoE know everything from history except sampling
noise. The paper does not specify how much its loads drift.

Result: As published, asymmetric placement is perfect at every s, random placement is slightly worse than symmetric
placement, and SmartMoE's load grows with s. Symmetric placement is perfect only below s ≈ 0.7, as eq. 3 predicts
(lab/policies.md). Unlike in the paper, FlexMoE is between SmartMoE and FineMoE only above s = 1.
"""

from kit import Aim, Arranged, Published, System, drawn

EVERY = dict(
    routing="zipf", ranks=8, experts=32, top_k=2, layers=300, micro_steps=16, former_step=True, former_plan=True,
    tokens_per_rank=16384, guest_slots=4,
)
inputs = [drawn(f"s = {skew}", skew=skew, **EVERY) for skew in (0.0, 0.4, 0.8, 1.0, 1.2, 1.6, 2.0)]
systems = [
    Arranged("vanilla", groups=2),
    Arranged("smartmoe", groups=2),
    System("flexmoe"),
    System("finemoe-random"),
    System("finemoe-symmetric"),
    System("finemoe"),
    System("foremoe, tolerance 0", "foremoe", tolerance=0),
]
columns = ["rho_mean", "rho_max"]
published = [
    Published(
        "rho_mean", "1 for s < 1", system="finemoe-symmetric", note="from the text; we do not have the plot's values",
    ),
    Published("rho_mean", "1 for all s", system="finemoe", note="from the text; we do not have the plot's values"),
]
aims = [
    Aim("rho_mean", input="s = 0.8", system="finemoe-symmetric", at_most=1.005),
    Aim("rho_mean", system="finemoe", at_most=1.005),
    Aim("rho_mean", system="foremoe, tolerance 0", relative_to="finemoe", at_most=1),
]
across = True

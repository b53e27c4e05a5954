"""Token stragglers at EP 2, 4 and 8.

FEPLB, arXiv 2604.19654, figures 5 and 6.

The paper runs GLM-5 with 18 layers, 128 experts and no auxiliary loss on up to 16 H100. It reports by how many tokens
the busiest device exceeds the mean, before and after balancing within the node.

We assume: The routing model is fitted to unbalanced figures alone: 18.6 % waste at EP 8, read as the mean of (max −
mean) ÷ max of rank loads. 4,096 tokens per rank choose 8 experts each. The straggler before balancing at EP 8 is then a
fifth above the 6,700 tokens that the published stragglers and percentages imply, so percentages are comparable and
token counts less so. The same model serves EP 2 and 4. *FEPLB* is the reading of `feplb.h`, chosen by the published
percentages: the `dyn` busiest experts of a rank may move, and the greedy stops at the first that does not help.
FasterMoE and `foremoe` have four guest slots, because FEPLB's dyn = 4 uses at most four on average. FasterMoE knows the
exact loads here, while the paper's predicts them. Its cost model uses this expert size and NVLink at 450 GB/s.
lab/policies.md explains its three rules; whole ranks have as many slots as they could use.

Result: FEPLB's greedy removes 63, 69 and 70 % (published 51, 63 and 70). Agreement at EP 8 confirms nothing: the
description leaves open which experts may move and when the greedy stops, and we chose our reading by these percentages.
The other readings remove 79 and 83 % at EP 8 (feplb-dyn). The greedy algorithm removes a larger part than published at
EP 2 and 4, where our routing model has a smaller straggler to begin with and 64 and 32 experts per rank to choose from.
FasterMoE removes 64, 53 and 51 % (published 55, 47 and 39), 12 points more than published at EP 8. The paper says that
FasterMoE predicts loads; here it knows them, as in both of its public implementations. We do not know which code the
paper ran. These figures are of our reading, which shadows single experts of the busiest rank by the artifact's model.
We chose it because it balances best of three, here and on all load tables; it is also closest to the published figures.
Read literally, the artifact shadows all 64, 32 or 16 experts of a rank, which almost never pays off: 0, 0 and 8 %. Its
authors' later code compares experts instead of ranks: 4, 7 and 14 %. `foremoe` removes more than 99 %, and more than 90
% with one guest slot.
"""

from feplb_inputs import inputs_of
from kit import Aim, Column, Published, System

WASTE = Column(
    "waste", "waste, %", 1, "(max − mean) ÷ max rank load, mean over pairs", lambda m: 100 * m.pairs["waste"]
)
STRAGGLER = Column(
    "straggler", "straggler", 0, "tokens of the busiest rank above the mean, mean over pairs",
    lambda m: m.pairs["straggler"],
)
inputs = inputs_of()
systems = [
    System("before", "vanilla"),
    System("FasterMoE", "fastermoe", intermediate=2048),
    System("FasterMoE, whole ranks", "fastermoe", rule="whole", intermediate=2048, guest_slots=112),
    System("FasterMoE, by experts", "fastermoe", rule="expert", intermediate=2048),
    System("FEPLB", "feplb", dyn=4, guest_slots=8),
    System("foremoe, G = 1", "foremoe", guest_slots=1),
    System("foremoe, G = 4", "foremoe"),
]
columns = [WASTE, STRAGGLER, "straggler_less", "rho_mean", "copies"]
published = [
    *Published.table("straggler_less", {
        "EP 2": {"FEPLB": 51, "FasterMoE": 55}, "EP 4": {"FEPLB": 63, "FasterMoE": 47},
        "EP 8": {"FEPLB": 70, "FasterMoE": 39},
    }),
    *Published.table("straggler", {"EP 8": {"FasterMoE": 4036, "FEPLB": 2021}}),
    *Published.table("waste", {"EP 8": {"before": 18.6}}),
]
aims = [
    Aim("straggler_less", system="foremoe, G = 4", at_least=90),
]

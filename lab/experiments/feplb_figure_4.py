"""What balancing does to the exchange.

FEPLB, arXiv 2604.19654, figure 4.

The paper measures dispatch and combine with DeepEP. Compared with no balancing, FEPLB adds less than 1 % and FasterMoE
without pipelining about nothing. A two-stage pipeline adds 46.8 % to dispatch and 40.2 % to combine.

We assume: Input and cluster are those of feplb-table-2. Dispatch and combine cost the same in our model, so one column
shows both: the time of the slowest rank in all exchanges of the step. The text does not give the EP degree. FEPLB
dispatches to homes by design; weights and rows of guests travel afterwards. The paper does not specify how results
return before combine. *FEPLB* pays for the return in full, in the last column; *free return* does not pay. FasterMoE's
rows for a shadowed expert stay on their rank; here a row is 12 KiB times the number of its experts. We leave out the
two-stage pipeline, because the paper does not say how much more DeepEP sends for it.

Result: FEPLB matches the paper by construction, since its exchange is that of no balancing. Its later transfers overlap
with a rank's own experts, except the return of results. In full, the return takes 0.05, 0.17 and 0.32 ms per layer and
pass at EP 2, 4 and 8. Counted as exchange, this would be 17, 21 and 22 % more by token, and 5, 9 and 13 % by row, far
above the published 1 %, so the paper either hides it or does not count it. The exchange of FasterMoE without a pipeline
does not stay the same: it is 0 to 7 % shorter by token and 7 to 13 % by row, since fewer rows leave their rank and the
busiest rank receives fewer. Its broadcasts count as exposed time, not as exchange. Unlike the paper's figure, ours also
shows that balancing can shorten the exchange: `foremoe` needs 0 to 10 % less by token and 5 to 18 % by row, as no rank
receives more than its share. The two-stage pipeline is not reproduced.
"""

from feplb_inputs import inputs_of
from kit import FIRST, Published, System, modelled, percent_less

EXCHANGE_MORE = modelled(
    "exchange_more", "exchange, % more", 1, "time of dispatch and combine compared with the first system's",
    lambda m, first: -percent_less(first.of_both("dispatch", "combine"), m.of_both("dispatch", "combine")),
    versus=FIRST,
)
inputs = inputs_of(keep_activations=True, cluster="h100", dispatch=("token", "row"))
systems = [
    System("before", "vanilla"),
    System("FasterMoE, pipe 1", "fastermoe", intermediate=2048),
    System("FEPLB", "feplb", dyn=4, guest_slots=8),
    System("FEPLB, free return", "feplb", dyn=4, guest_slots=8, charge_return=0),
    System("foremoe, G = 4", "foremoe"),
]
columns = [EXCHANGE_MORE, "dispatch_ms", "exposed_ms"]
published = [
    Published("exchange_more", "under 1", system="FEPLB"),
    Published("exchange_more", "about 0", system="FasterMoE, pipe 1"),
    Published("exchange_more", 46.8, note="dispatch of FasterMoE with pipe 2"),
    Published("exchange_more", 40.2, note="combine of FasterMoE with pipe 2"),
]

"""What balancing does to the exchange.

FEPLB, arXiv 2604.19654, figure 4.

The paper measures dispatch and combine with DeepEP: FEPLB adds less than 1 % to the exchange before balancing,
FasterMoE without pipelining about nothing, and with a pipeline of two stages 46.8 % to dispatch and 40.2 % to combine.

We assume: Input and cluster are those of feplb-table-2. Both sweeps of an exchange cost the same in our model, so one
column stands for both: seconds of the slowest rank, of all exchanges of the step. The text has no EP degree. FEPLB's
exchange is that of homes by its design; weights and rows of guests travel afterwards. How results come back before
combine is not specified: *FEPLB* pays for it in full, in the last column, *free return* not at all. FasterMoE's rows
for a shadowed expert stay on their rank; here a row is 12 KiB times each expert that it goes to. A pipeline of two
stages is absent: how much more DeepEP sends for it is not told.

Result: As published for FEPLB, by construction: its exchange is the one before balancing. What it moves afterwards
hides behind own experts; the way back of results does not. In full it takes 0.05, 0.17 and 0.32 ms per layer and pass
at EP 2, 4 and 8. Counted as exchange that would be 17, 21 and 22 % more by token, and 5, 9 and 13 % by row, far above
the published 1 %, so the paper either hides it or does not count it. FasterMoE without a pipeline has 0 to 7 % less by
token and 7 to 13 % by row, and not the same, since fewer rows leave their rank and the busiest rank receives fewer;
what its broadcasts take is no exchange, and stands in the last column. That balancing may also shorten the exchange,
which the paper's figure does not ask, ours shows: 0 to 10 % less by token, 5 to 18 % by row, as no rank receives more
than its part. The pipeline of two stages is not repeated.
"""

from feplb_inputs import inputs_of
from kit import FIRST, Published, System, modelled, percent_less

EXCHANGE_MORE = modelled(
    "exchange_more", "exchange, % more", 1, "seconds of dispatch and combine above the first system's",
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

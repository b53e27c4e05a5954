"""What balancing does to the exchange.

FEPLB, arXiv 2604.19654, figure 4.

The paper measures dispatch and combine with DeepEP. Compared with no balancing, FEPLB adds less than 1 % and FasterMoE
without pipelining about nothing. A two-stage pipeline adds 46.8 % to dispatch and 40.2 % to combine.

We assume: Input and cluster are those of feplb-table-2. Dispatch and combine cost the same in our model, so one column
shows the slowest rank's time in all exchanges of the step. The description does not give the EP degree. FEPLB
dispatches to homes by design; weights and rows of guests are sent afterwards. The paper does not specify how guests'
results return before combine. *FEPLB* is charged for the return in full, in the last column; *free return* is not
charged. FasterMoE does not send rows of shadowed experts. A row has 12 KiB times the number of its experts here. We
omit the two-stage pipeline, because the paper does not specify how much more DeepEP sends for it.

Result: By construction, FEPLB's exchange takes as long as without balancing, which matches the paper. The return of
results is not part of it: a step would wait 46 to 281 ms for it (*exposed*). So the paper either hides the return or
does not count it. FasterMoE and `foremoe` shorten the exchange, because the busiest rank receives fewer rows.
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

"""Routes of a micro-batch that verl replays, and row counts per expert.

verl replays the routes of every token except a sequence's last. For that token and for padding, the router chooses
(build_r3_replay_mask). Rows that are not replayed do not affect the loss: no token attends to them and their logits are
not used. So they get predictable routes: all experts in turn (foremoe.megatron.with_filler_routes()).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foremoe._errors import refuse
from foremoe.megatron.rows import Place, counts_from_routes


def counts_of(
    routes: Sequence[Tensor],
    responses: Sequence[int],
    lengths: Sequence[int],
    *,
    layers: Sequence[int],
    num_experts: int,
    top_k: int,
    first: int,
    names: Sequence[int] | None = None,
    place: Place | None = None,
) -> npt.NDArray[np.int64]:
    """Counts this rank's rows of one micro-batch per expert. Returns int64 [layers, experts].

    routes: Per sequence, integers [tokens, recorded layers, top_k], with or without the last token.
    responses, lengths: Generated tokens, and all tokens, of each sequence; one without a response is not replayed.
    layers: Recorded layers to count. first, place: See counts_from_routes(). names: Indices of the sequences, for
    messages.

    Raises InputError for other shapes, and for expert ids out of range among replayed routes.
    """
    replayed = []
    for i, (of_sequence, length) in enumerate(zip(routes, lengths, strict=True)):
        index = f"[{i if names is None else names[i]}]"
        shape = list(of_sequence.shape)
        if of_sequence.dim() != 3 or shape[0] not in (length, length - 1) or shape[2] != top_k:
            refuse("routed_experts", f"is {shape}; expected [{length} or {length - 1}, layers, {top_k}]", index)
        if max(layers) >= shape[1]:
            refuse("routed_experts", f"has {shape[1]} layers; expected layer {max(layers)} too, counted from 0", index)
        used = torch.full((length, len(layers), top_k), -1, dtype=torch.int32)
        if responses[i] > 0 and length > 1:
            known = of_sequence[: length - 1, list(layers)]
            least, most = int(known.min()), int(known.max())
            if not 0 <= least <= most < num_experts:
                refuse("routed_experts", f"has ids from {least} to {most}; expected 0 to {num_experts - 1}", index)
            used[: length - 1] = known
        replayed.append(used)
    return counts_from_routes(replayed, num_experts=num_experts, first=first, place=place)

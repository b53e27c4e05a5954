"""Which rows of a micro-batch verl gives this rank, where each row is routed, and how many each expert gets.

verl packs the sequences of a micro-batch, each padded to a multiple, and splits them over the ranks of context and
tensor (sequence) parallelism: verl.models.mcore.util.preprocess_thd_engine, then scatter_to_sequence_parallel_region.
It replays the routes of every token but the last of a sequence, and lets the router choose for that one and for padding
(build_r3_replay_mask). None of these rows reaches a loss: no token attends to them and their logits are not used. So
here they get routes that are known beforehand, over all experts in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foremoe import InputError, _core


def refuse(field: str, problem: str, index: str = "") -> NoReturn:
    raise InputError(f"{field}{index}: {problem}", field=field, index=index)


@dataclass(frozen=True)
class Place:
    """This rank among those that share a micro-batch."""

    tp_size: int = 1
    tp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0


def local_tokens(lengths: Sequence[int], place: Place) -> npt.NDArray[np.int64]:
    """int64 [rows]: for each row of this rank the token, counted over all sequences of the micro-batch; −1: padding.

    lengths: tokens of each sequence.
    """
    halves = 2 if place.cp_size > 1 else 1  # of a sequence each rank has one piece from its front, one from its back
    multiple = place.tp_size * place.cp_size * halves
    parts = []
    begin = 0
    for length in lengths:
        tokens = np.full(-(-length // multiple) * multiple, -1, np.int64)
        tokens[:length] = np.arange(begin, begin + length)
        begin += length
        if place.cp_size > 1:
            pieces = tokens.reshape(2 * place.cp_size, -1)
            tokens = np.concatenate([pieces[place.cp_rank], pieces[-1 - place.cp_rank]])
        parts.append(tokens)
    return np.split(np.concatenate(parts), place.tp_size)[place.tp_rank]


def replayed_tokens(lengths: Sequence[int], responses: Sequence[int]) -> npt.NDArray[np.bool_]:
    """bool [tokens]: whose routes are replayed: of each sequence with a response, all but the last.

    responses: tokens of each sequence that were generated.
    """
    replayed = np.repeat(np.asarray(responses) > 0, lengths)
    replayed[np.cumsum(lengths) - 1] = False
    return replayed


def filled(routes: Tensor, replayed: Tensor, *, num_experts: int, first: int) -> Tensor:
    """int64 [rows, top_k]: the routes that are replayed; the other rows' are all experts in turn, from `first` on.

    routes: integers [rows, top_k]. replayed: bool [rows]. first: an expert of this rank, so that those rows stay here.
    """
    top_k = routes.shape[1]
    nth = (~replayed).cumsum(0) - 1
    in_turn = (first + nth[:, None] * top_k + torch.arange(top_k, device=routes.device)) % num_experts
    return torch.where(replayed[:, None], routes.long(), in_turn)


def counts_of(
    routes: Sequence[Tensor],
    responses: Sequence[int],
    lengths: Sequence[int],
    place: Place,
    *,
    layers: Sequence[int],
    num_experts: int,
    top_k: int,
    first: int,
    names: Sequence[int] | None = None,
) -> npt.NDArray[np.int64]:
    """int64 [layers, experts]: rows of this rank that each expert gets in one micro-batch.

    routes: of each sequence, integers [tokens, recorded layers, top_k], or one token less: the last.
    responses, lengths: tokens of each sequence, generated and all. layers: of the recorded ones, those to count.
    first: as filled() takes it. names: of the sequences in messages.

    Raises InputError for other shapes, and for experts that there are not among routes that are replayed.
    """
    parts = []
    for i, (of_sequence, length) in enumerate(zip(routes, lengths, strict=True)):
        index = f"[{i if names is None else names[i]}]"
        shape = list(of_sequence.shape)
        if of_sequence.dim() != 3 or shape[0] not in (length, length - 1) or shape[2] != top_k:
            refuse("routed_experts", f"is {shape}; expected [{length} or {length - 1}, layers, {top_k}]", index)
        if max(layers) >= shape[1]:
            refuse("routed_experts", f"has {shape[1]} layers; expected layer {max(layers)} too, counted from 0", index)
        if responses[i] > 0 and length > 1:
            used = of_sequence[: length - 1]
            used = used if len(layers) == shape[1] else used[:, list(layers)]
            least, most = int(used.min()), int(used.max())
            if not 0 <= least <= most < num_experts:
                refuse("routed_experts", f"has ids from {least} to {most}; expected 0 to {num_experts - 1}", index)
        parts.append(of_sequence)
        if shape[0] < length:
            parts.append(of_sequence.new_zeros(1, *shape[1:]))
    tokens = local_tokens(lengths, place)
    replayed = np.append(replayed_tokens(lengths, responses), False)[tokens]  # padding is −1
    packed = torch.cat(parts)
    rows = packed.cpu().int().numpy()[np.maximum(tokens, 0)[:, None], np.asarray(layers)]  # [rows, layers, top_k]
    others = torch.full((int((~replayed).sum()), top_k), -1)
    in_turn = filled(others, torch.zeros(len(others), dtype=torch.bool), num_experts=num_experts, first=first)
    rows[~replayed] = in_turn[:, None]
    counts: npt.NDArray[np.int64] = _core._count_routes(rows, num_experts, distinct=True)[1]
    return counts

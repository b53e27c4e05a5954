"""Rows of a micro-batch that verl assigns to this rank, their routes, and row counts per expert.

verl packs the sequences of a micro-batch, each padded to a multiple, and splits them over the ranks of context and
tensor (sequence) parallelism: verl.models.mcore.util.preprocess_thd_engine, then scatter_to_sequence_parallel_region.
verl replays the routes of every token except a sequence's last. For that token and for padding, the router chooses
(build_r3_replay_mask). Rows that are not replayed do not affect the loss: no token attends to them and their logits are
not used. So this module gives them predictable routes: all experts in turn.
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
    """Coordinates of this rank among the ranks that share a micro-batch."""

    tp_size: int = 1
    tp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0


def local_tokens(lengths: Sequence[int], place: Place) -> npt.NDArray[np.int64]:
    """Returns the token of each row of this rank, int64 [rows], counted over all sequences; −1: padding.

    lengths: Tokens of each sequence of the micro-batch.
    """
    halves = 2 if place.cp_size > 1 else 1  # pieces of a sequence per rank: one from its front, one from its back
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
    """Returns bool [tokens]: all tokens of sequences with a response, except each sequence's last one.

    responses: Number of generated tokens of each sequence.
    """
    replayed = np.repeat(np.asarray(responses) > 0, lengths)
    replayed[np.cumsum(lengths) - 1] = False
    return replayed


def with_filler_routes(routes: Tensor, replayed: Tensor, *, num_experts: int, first: int) -> Tensor:
    """Returns int64 [rows, top_k]: replayed routes, and for other rows all experts in turn, starting at `first`.

    routes: Integers [rows, top_k]. replayed: bool [rows]. first: An expert of this rank; the first rows stay local.
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
    """Counts this rank's rows of one micro-batch per expert. Returns int64 [layers, experts].

    routes: Per sequence, integers [tokens, recorded layers, top_k], with or without the last token.
    responses, lengths: Generated tokens, and all tokens, of each sequence. layers: Recorded layers to count.
    first: See with_filler_routes(). names: Indices of the sequences, for messages.

    Raises InputError for other shapes, and for expert ids out of range among replayed routes.
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
    in_turn = with_filler_routes(
        others, torch.zeros(len(others), dtype=torch.bool), num_experts=num_experts, first=first
    )
    rows[~replayed] = in_turn[:, None]
    counts: npt.NDArray[np.int64] = _core._count_routes(rows, num_experts, distinct=True)[1]
    return counts

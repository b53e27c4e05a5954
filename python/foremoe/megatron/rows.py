"""The rows of a micro-batch that Megatron-LM gives one rank, and their number per expert.

Context parallelism cuts each padded sequence into two pieces per rank: rank c has pieces c and 2 · size − 1 − c. Tensor
(sequence) parallelism divides the rows of a rank into contiguous runs: packed sequences one after the other, padded
ones position by position. verl packs alike: verl.models.mcore.util.preprocess_thd_engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foremoe import _core
from foremoe._errors import refuse


@dataclass(frozen=True)
class Place:
    """Coordinates of this rank among the ranks that share a micro-batch."""

    tp_size: int = 1
    tp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0

    @classmethod
    def of_this_rank(cls) -> Place:
        from megatron.core import parallel_state as groups

        return cls(
            groups.get_tensor_model_parallel_world_size(),
            groups.get_tensor_model_parallel_rank(),
            groups.get_context_parallel_world_size(),
            groups.get_context_parallel_rank(),
        )

    @property
    def multiple(self) -> int:
        """The number of tokens that a padded sequence must be a multiple of."""
        return self.tp_size * self.cp_size * (2 if self.cp_size > 1 else 1)


def local_tokens(lengths: Sequence[int], place: Place, padded_to: int | None = None) -> npt.NDArray[np.int64]:
    """Returns the token of each row of this rank, int64 [rows], counted over all sequences; −1: padding.

    lengths: Tokens of each sequence of the micro-batch. padded_to: See counts_from_routes().
    """
    parts = []
    begin = 0
    for length in lengths:
        tokens = np.full(padded_to or -(-length // place.multiple) * place.multiple, -1, np.int64)
        tokens[:length] = np.arange(begin, begin + length)
        begin += length
        if place.cp_size > 1:
            pieces = tokens.reshape(2 * place.cp_size, -1)
            tokens = np.concatenate([pieces[place.cp_rank], pieces[-1 - place.cp_rank]])
        parts.append(tokens)
    rows = np.concatenate(parts) if padded_to is None else np.stack(parts, 1).reshape(-1)
    return np.split(rows, place.tp_size)[place.tp_rank]


def with_filler_routes(routes: Tensor, replayed: Tensor, *, num_experts: int, first: int) -> Tensor:
    """Returns int64 [rows, top_k]: replayed routes, and for other rows all experts in turn, starting at `first`.

    routes: Integers [rows, top_k]. replayed: bool [rows]. first: An expert of this rank; the first rows stay local.
    """
    top_k = routes.shape[1]
    nth = (~replayed).cumsum(0) - 1
    in_turn = (first + nth[:, None] * top_k + torch.arange(top_k, device=routes.device)) % num_experts
    return torch.where(replayed[:, None], routes.long(), in_turn)


def counts_from_routes(
    routes: Sequence[Tensor],
    *,
    num_experts: int,
    padded_to: int | None = None,
    first: int | None = None,
    place: Place | None = None,
) -> npt.NDArray[np.int64]:
    """Counts this rank's rows of one micro-batch per expert, under tensor and context parallelism.

    Args:
        routes: Per sequence of the micro-batch, integers [tokens, layers, top_k]: recorded experts in the MoE layers of
            this pipeline stage. A token without a route, which is not replayed, has negative ids in all layers.
        num_experts: Experts of a layer.
        padded_to: Tokens to which every sequence is padded, in a micro-batch [batch, tokens]. None: sequences are
            packed, each padded to a multiple of tp_size · cp_size, with context parallelism twice that.
        first: Rows of padding and tokens without a route take all experts in turn, starting at this one. The router
            must replay the same: with_filler_routes(). None: such rows are errors, since the router would choose.
        place: This rank among the ranks that share the micro-batch. None: as in megatron.core.parallel_state.

    Returns:
        int64 [layers, experts]. Stacked over micro-batches they are the counts of Replicas.plan().

    Raises:
        InputError: for other shapes, ids out of range, a token with routes in some layers only, sequences that do not
            fit padded_to, and, without `first`, for rows of this rank without a route.
    """
    place = place or Place.of_this_rank()
    _check(routes, num_experts, padded_to, place)
    tokens = local_tokens([len(of) for of in routes], place, padded_to)
    rows = torch.cat([of.cpu().int() for of in routes]).numpy()[np.maximum(tokens, 0)]  # [rows, layers, top_k]
    missing = (tokens < 0) | (rows.reshape(len(rows), -1) < 0).any(1)
    if missing.any():
        if first is None:
            refuse(
                "routes",
                f"have none for {missing.sum()} of this rank's rows ({(tokens < 0).sum()} of padding), where the "
                "router would choose; give `first`, and replay with_filler_routes()",
            )
        nothing = torch.full((int(missing.sum()), rows.shape[2]), -1)
        rows[missing] = with_filler_routes(nothing, nothing[:, 0] >= 0, num_experts=num_experts, first=first)[:, None]
    counts: npt.NDArray[np.int64] = _core._count_routes(rows, num_experts, distinct=True)[1]
    return counts


def _check(routes: Sequence[Tensor], num_experts: int, padded_to: int | None, place: Place) -> None:
    if not routes:
        refuse("routes", "has no sequence")
    for i, of in enumerate(routes):
        index, shape = f"[{i}]", list(of.shape)
        if of.is_floating_point() or of.dim() != 3 or shape[1:] != list(routes[0].shape[1:]):
            expected = list(routes[0].shape[1:]) if i and routes[0].dim() == 3 else ["layers", "top_k"]
            refuse(
                "routes", f"is {of.dtype} {shape}; expected integers [tokens, {', '.join(map(str, expected))}]", index
            )
        if padded_to is not None and len(of) > padded_to:
            refuse("routes", f"has {len(of)} tokens; expected at most padded_to = {padded_to}", index)
        if of.numel() and int(of.max()) >= num_experts:
            refuse("routes", f"has id {int(of.max())}; expected at most {num_experts - 1}", index)
        is_missing = (of < 0).flatten(1)
        some = is_missing.any(1) & ~is_missing.all(1)
        if some.any():
            refuse(
                "routes", "has ids below 0 in some of its layers or entries only", f"[{i}][{int(some.nonzero()[0])}]"
            )
    if padded_to is not None and padded_to % place.multiple:
        refuse("padded_to", f"{padded_to}; expected a multiple of {place.multiple}, for {place}")

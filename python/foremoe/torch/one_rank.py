"""While a model is spread, its state_dict() and save_pretrained() report that they hold one rank's experts alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

ONE_RANK_OF = "foremoe.one_rank_of"
"""Key of a state dict that holds one rank's experts: int64 [2], the rank and the number of ranks.

The spread model accepts it on the same rank. Strict loading elsewhere refuses an unexpected key.
"""


class OneRankReports:
    """The reports of the modules that hold a spread model's experts, until they are removed.

    A module reports what any ancestor of its experts saves, so that a part of the model reports it too. What a hook
    holds can be copied and pickled with the model.
    """

    def __init__(self, experts: Iterable[torch.nn.Parameter], rank: int, ranks: int) -> None:
        self._experts = {id(weight) for weight in experts}
        self._rank, self._ranks = rank, ranks
        self._reporting: set[torch.nn.Module] = set()
        self._undo: list[Callable[[], None]] = []

    def add(self, model: torch.nn.Module) -> None:
        """Lets the modules of a model report, unless they do."""
        report = functools.partial(_report, rank=self._rank, ranks=self._ranks)
        accept = functools.partial(_accept, rank=self._rank, ranks=self._ranks)
        for module in model.modules():
            parameters = dict(module.named_parameters(remove_duplicate=False))
            experts = {n: len(p) * self._ranks for n, p in parameters.items() if id(p) in self._experts}
            if not experts or module in self._reporting:
                continue
            self._reporting.add(module)
            self._undo.append(module.register_state_dict_post_hook(report).remove)  # type: ignore[no-untyped-call]
            self._undo.append(module.register_load_state_dict_pre_hook(accept).remove)  # type: ignore[no-untyped-call]
            if hasattr(module, "save_pretrained"):
                vars(module)["save_pretrained"] = functools.partial(_save_whole_only, module, experts)
                self._undo.append(functools.partial(delattr, module, "save_pretrained"))

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._reporting.clear()


def _report(
    module: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any, *, rank: int, ranks: int
) -> None:
    for name, _ in module.named_children():  # reported before
        state.pop(f"{prefix}{name}.{ONE_RANK_OF}", None)
    state[prefix + ONE_RANK_OF] = torch.tensor([rank, ranks])


def _accept(
    _module: torch.nn.Module, state: dict[str, Any], prefix: str, *arguments: Any, rank: int, ranks: int
) -> None:
    given = state.pop(prefix + ONE_RANK_OF, None)
    if isinstance(given, Tensor) and given.tolist() != [rank, ranks]:
        there, of = given.tolist()
        errors: list[str] = arguments[-1]
        errors.append(
            f"{prefix}{ONE_RANK_OF}: it holds the experts of rank {there} of {of}, and the model those of rank {rank} "
            f"of {ranks}. Save ExpertParallel.whole_state_dict(model) to resume on other ranks."
        )


def _save_whole_only(
    module: Any, experts: dict[str, int], save_directory: Any, *arguments: Any, **keywords: Any
) -> Any:
    """In place of save_pretrained(). Saves a state dict that is given and has all experts, as trainers gather one."""
    state = arguments[1] if len(arguments) > 1 else keywords.get("state_dict")
    if state is None or any(len(state.get(name, ())) != num_experts for name, num_experts in experts.items()):
        raise RuntimeError(
            "this model holds one rank's experts, since an ExpertParallel spreads it: call its "
            "ep.save_pretrained(model, folder) on all ranks instead"
        )
    return type(module).save_pretrained(module, save_directory, *arguments, **keywords)

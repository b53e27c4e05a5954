"""Experts of a spread model as DTensors in state dicts of models and optimizers.

While a model is spread, hooks convert this rank's experts in its state_dict(), and their moments in the optimizer's,
to DTensors sharded over the expert-parallel group. torch.distributed.checkpoint therefore saves all experts, and loads
them on any number of ranks. load_state_dict() takes this rank's part of DTensors and of whole tensors.

Any other way of saving would lose the other ranks' experts, so these DTensors and the model refuse pickling.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import foremoe
from foremoe._engine.homes import exchanged
from foremoe._engine.ranks import Ranks
from foremoe._engine.session import Session
from foremoe._engine.sharded import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

State = dict[str, Any]

_EXPECTED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_FOLLOWED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class ExpertShards:
    """This rank's part of a model's experts, and hooks on the model until remove(). Copies of the model share both.

    Registers no hooks if a rank has all experts, or if the experts are DTensors already. A DTensor needs contiguous
    parts. If homes are not contiguous, ranks exchange experts to make them, and after loading.
    """

    def __init__(self, layers: Sequence[Sequence[torch.nn.Parameter]], ranks: Ranks, session: Session) -> None:
        """layers: This rank's experts of each layer."""
        experts = [weight for layer in layers for weight in layer]
        self.group, self.num_ranks = ranks.group, ranks.num_ranks
        self.rank = ranks.rank
        self.everyone = ranks.trainers  # the ranks of all replicas of these experts
        self.keeps = dist.get_rank() == ranks.grid[0][0]  # this rank returns results under rank0_only
        self.num_weights = len(experts)
        self.came_sharded = is_dtensor(experts[0])
        self._device = experts[0].device.type
        self._session = session
        self._ranks = ranks
        self._by_position = False
        self._experts = {id(weight): layer for layer, of in enumerate(layers) for weight in of}
        self._undo: dict[torch.nn.Module, list[Callable[[], None]]] = {}
        self._is_hooked = self.num_ranks > 1 and not self.came_sharded
        if self._is_hooked:
            for weight in experts:
                vars(weight)["foremoe_shards"] = self  # pickling the parameter pickles this, which raises
            _watch_optimizers()

    def __deepcopy__(self, _: Any) -> ExpertShards:
        return self

    def __reduce__(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f"this would save the experts of one rank alone, since ExpertParallel spreads the model over "
            f"{self.num_ranks} ranks. On all ranks, call torch.distributed.checkpoint.save() with state_dict(), or "
            "ep.checkpoints.save_pretrained(model, folder); or save what ep.checkpoints.whole_state_dict(model) and "
            "ep.checkpoints.whole_optimizer_state(optimizer) return"
        )

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """Mesh of the expert-parallel group. All DTensors derived from those of state dicts refer to this mesh."""
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh.from_group(self.group, self._device, mesh_dim_names=("foremoe_experts",))
        vars(mesh)["foremoe"] = self  # pickling the mesh pickles this, which raises
        return mesh

    def add(self, model: torch.nn.Module) -> None:
        """Hooks modules whose direct parameters are experts, and save_pretrained() of modules that contain any."""
        for module in model.modules() if self._is_hooked else ():
            named = module.named_parameters(remove_duplicate=False)
            held = {name: self._experts[id(p)] for name, p in named if id(p) in self._experts}
            if module in self._undo or not held:
                continue
            undo = self._undo[module] = []
            if own := {name: layer for name, layer in held.items() if "." not in name}:
                shard, take = functools.partial(self._shard_entries, own), functools.partial(self._take_entries, own)
                undo.append(module.register_state_dict_post_hook(shard).remove)  # type: ignore[no-untyped-call]
                undo.append(module.register_load_state_dict_pre_hook(take).remove)  # type: ignore[no-untyped-call]
            if hasattr(module, "save_pretrained"):
                vars(module)["save_pretrained"] = functools.partial(_save_whole_only, self, module, list(held))
                undo.append(functools.partial(delattr, module, "save_pretrained"))

    def remove(self) -> None:
        while self._undo:
            for undo in self._undo.popitem()[1]:
                undo()

    def holds(self, value: Any) -> bool:
        """Returns whether an entry of state_dict(keep_vars=True) is an expert of the model or of a copy of it."""
        return id(value) in self._experts or (self._is_hooked and is_dtensor(value) and value.device_mesh is self.mesh)

    def layer_of(self, weight: Tensor) -> int:
        """Returns the layer of a parameter."""
        return self._experts[id(weight)]

    @contextlib.contextmanager
    def by_position(self) -> Iterator[None]:
        """Inside, sharded() neither copies nor exchanges: DTensors have experts by position, as whole() expects."""
        self._by_position = True
        try:
            yield
        finally:
            self._by_position = False

    def sharded(self, part: Tensor, layer: int) -> Tensor:
        """Wraps this rank's part of a layer's tensor as a DTensor, without a copy if homes are contiguous. Collective
        otherwise."""
        from torch.distributed.tensor import DTensor, Shard

        if not self._by_position:
            part = self._exchanged(part, layer, to_blocks=True)
        found = DTensor.from_local(part, self.mesh, [Shard(0)])
        found.storage = self._refuse  # type: ignore[method-assign]  # safetensors and accelerate call it
        if self._by_position:
            vars(found)["foremoe_layer"] = layer
        return found

    @torch.no_grad()
    def whole(self, value: Any) -> Any:
        """Returns the whole tensor of a DTensor; any other value unchanged. Collective."""
        if not is_dtensor(value):
            return value.detach() if isinstance(value, Tensor) else value
        found = value.full_tensor()
        layer = vars(value).get("foremoe_layer")
        table = self._ranks.table
        if layer is None or table.is_contiguous:
            return found
        return found.index_select(0, torch.from_numpy(table.position[layer]).to(found.device))

    def _exchanged(self, part: Tensor, layer: int, *, to_blocks: bool) -> Tensor:
        if self._ranks.table.is_contiguous:
            return part
        self._session.expect_call("state_dict() or load_state_dict() of experts")
        return exchanged(part, self._ranks.table, layer, self.group, to_blocks=to_blocks)

    def part(self, value: Tensor, like: Tensor, name: str, layer: int) -> Tensor:
        """Returns this rank's part of a layer's DTensor or whole tensor. like: Tensor of the part's shape.

        Raises InputError for a plain tensor with the shape of a part, since any rank may have saved it.
        """
        if is_dtensor(value):
            if value.device_mesh == self.mesh and value.placements[0].is_shard(0):
                return self._exchanged(value.to_local().to(like.device), layer, to_blocks=False)
            value = value.full_tensor()
        if value.shape == like.shape:
            raise foremoe.InputError(
                f"state_dict: {name} holds {len(value)} of {len(like) * self.num_ranks} experts, perhaps of another "
                "rank; expected all of them, or the DTensor of a spread model's state_dict()",
                field="state_dict",
            )
        if value.dim() and len(value) == len(like) * self.num_ranks:
            return value[torch.from_numpy(self._ranks.table.of_rank(layer, self.rank)).to(value.device)]
        return value  # torch reports the mismatched shapes

    def _shard_entries(self, names: dict[str, int], _module: Any, state: State, prefix: str, _metadata: Any) -> None:
        for name, layer in names.items():
            if prefix + name in state:
                state[prefix + name] = self.sharded(state[prefix + name], layer)

    def _take_entries(self, names: dict[str, int], module: Any, state: State, prefix: str, *arguments: Any) -> None:
        errors: list[str] = arguments[-1]
        for name, layer in names.items():
            value = state.get(prefix + name)
            if isinstance(value, Tensor):
                try:
                    state[prefix + name] = self.part(value, getattr(module, name), prefix + name, layer)
                except foremoe.InputError as error:
                    errors.append(str(error))


def _save_whole_only(
    shards: ExpertShards, module: Any, experts: list[str], save_directory: Any, *arguments: Any, **keywords: Any
) -> Any:
    """Replaces save_pretrained(). Saves only if the caller passes a state dict with all experts, as trainers do."""
    state = (arguments[1] if len(arguments) > 1 else keywords.get("state_dict")) or {}
    with shards.by_position():  # this may be the only rank that saves
        own = module.state_dict()
    if any(name not in state or is_dtensor(state[name]) or state[name].shape != own[name].shape for name in experts):
        raise RuntimeError(
            "this model holds one rank's experts, since an ExpertParallel spreads it: call its "
            "ep.checkpoints.save_pretrained(model, folder) on all ranks instead"
        )
    return type(module).save_pretrained(module, save_directory, *arguments, **keywords)


@functools.cache
def _watch_optimizers() -> None:
    """Registers global hooks. torch steps an optimizer without state before it saves or loads its state by names."""
    register_optimizer_step_pre_hook(lambda optimizer, *_: hook_optimizer(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: _expect_state_of_experts(optimizer))


def hook_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Hooks an optimizer: its state_dict() has DTensors for spread experts, and load_state_dict() accepts them."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner  # accelerate wraps optimizers
    if optimizer in _FOLLOWED:
        return
    _FOLLOWED.add(optimizer)
    optimizer.register_state_dict_post_hook(_shard_optimizer)
    optimizer.register_load_state_dict_pre_hook(_load_optimizer)
    for weight, state in optimizer.state.items():  # loaded before the hooks
        shards = _shards_of(weight)
        for key, value in state.items() if shards else ():
            if _is_array(value) and (is_dtensor(value) or value.shape != weight.shape):
                state[key] = shards.part(value, weight, key, shards.layer_of(weight)).clone()


def _expect_state_of_experts(optimizer: torch.optim.Optimizer) -> None:
    """Raises InputError, once, for state that is not per expert, such as Adafactor's: ranks would then step differently
    from one process with all experts."""
    if optimizer in _EXPECTED:
        return
    _EXPECTED.add(optimizer)
    for weight, state in optimizer.state.items():
        for name, value in state.items() if _shards_of(weight) else ():
            expect_of_experts(name, value, weight)


def _shards_of(weight: Any) -> Any:
    """Returns the ExpertShards of a parameter; None if the parameter is on all ranks."""
    return getattr(weight, "foremoe_shards", None)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _changed(
    optimizer: torch.optim.Optimizer, saved: State, change: Callable[[ExpertShards, Any, Tensor, str], Any]
) -> State:
    """Returns the state with change(shards, value, parameter, name) applied to the values of experts.

    The state refers to parameters by number or name, in the optimizer's order.
    """
    state = dict(saved["state"])
    held, names = (
        itertools.chain.from_iterable(group["params"] for group in groups)
        for groups in (optimizer.param_groups, saved["param_groups"])
    )
    for weight, name in zip(held, names, strict=False):
        if (shards := _shards_of(weight)) and name in state:
            of = state[name]
            state[name] = {
                key: change(shards, value, weight, f"{key} of parameter {name}") for key, value in of.items()
            }
    return saved | {"state": state}


def expect_of_experts(name: str, value: Any, weight: Tensor) -> None:
    """Raises InputError if optimizer state of a parameter is not known to be per expert."""
    shape = list(value.shape) if _is_array(value) else []
    if (_is_array(value) and shape != list(weight.shape)) or isinstance(value, dict | list | tuple):
        raise foremoe.InputError(
            f"optimizer: {name} is {shape or type(value).__name__}, but the rank's experts are {list(weight.shape)}; "
            "expected scalars and tensors of that shape, as Adam and SGD keep them",
            field="optimizer",
        )


def _shard_optimizer(optimizer: torch.optim.Optimizer, saved: State) -> State:
    def shard(shards: ExpertShards, value: Any, weight: Tensor, name: str) -> Any:
        expect_of_experts(name, value, weight)
        return shards.sharded(value, shards.layer_of(weight)) if _is_array(value) else value

    return _changed(optimizer, saved, shard)


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: State) -> State:
    def take(shards: ExpertShards, value: Any, weight: Tensor, name: str) -> Any:
        return shards.part(value, weight, name, shards.layer_of(weight)).clone() if _is_array(value) else value

    return _changed(optimizer, saved, take)

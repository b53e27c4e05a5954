"""Where it begins: a model of Megatron-LM is prepared for planned steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foremoe._engine.together import refused_together, versions

from .arguments import AttachArguments
from .replicas import Replicas
from .supported import expect_version


def attach(
    model_chunks: Any,
    guest_slots: int = 1,
    residency: str | None = None,
    mode: str = "active",
    *,
    policy: str = "foremoe",
    depth: int = 2,
    ranks_per_node: int | None = None,
    threads: int = 1,
    cluster: str | None = "h100",
    model: str | Mapping[str, Any] | None = None,
    **options: Any,
) -> Replicas:
    """Prepares a model of Megatron-LM for planned steps. The model stays as it is outside of step().

    Collective over all ranks of the default process group, those of dense pipeline stages too.

    model_chunks: a module, or a list of them, with or without Megatron's DistributedDataParallel; call it after that.
    guest_slots: copies of experts that a rank has room for in one layer; 0: nothing is copied, but sizes are known.
    residency: static, resident or shared, as foremoe.plan() takes it. None: resident, but static where mode is static.
        Under shared, guests of all layers lie in `depth` sets of guest_slots, and are copied for every pass of a layer.
    mode: active: step() executes plans. static: the same with residency static. shadow: step() counts and plans what
        balancing would give, and changes nothing.
    policy, options: as foremoe.plan() takes them: prefer, tolerance, stages, max_copies_per_rank,
        max_copies_per_source, min_tokens_per_guest, seed.
    depth: turns (a layer of a pass) ahead of which copies start; under shared one less, so that 1 hides none.
    ranks_per_node: of the expert-parallel group, that share a fast interconnect; None: 8, or all if fewer.
    threads: of each rank, for planning its share of the layers.
    cluster, model: on which modelled cluster, with which model, shadow mode says the seconds of a step, as
        foremoe.evaluate() takes them. model None: as the configuration says. cluster None: seconds are not modelled.

    Raises ImportError for another version of megatron-core, and InputError that names the argument, or the field of the
    configuration that cannot be served and what it must be. Where one rank refuses, or ranks have other arguments than
    each other (threads may differ), other versions, or other layers in one pipeline stage, all ranks raise, and no
    process group is made. Raises RuntimeError, on all ranks, where torch could not make the groups.
    """
    arguments = AttachArguments(
        guest_slots=guest_slots, residency=residency, mode=mode, policy=policy, depth=depth,
        ranks_per_node=ranks_per_node, threads=threads, cluster=cluster, model=model, options=options,
    )  # fmt: skip
    with refused_together() as given:
        version = expect_version()
        given.expect_alike(versions() | {"megatron-core": version} | arguments.compared())
        chunks = list(model_chunks) if isinstance(model_chunks, (list, tuple)) else [model_chunks]
        replicas = Replicas(chunks, arguments.executed())
        replicas.expect_alike_in(given)
    replicas.make_groups()
    return replicas

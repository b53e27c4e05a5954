"""Entry point: prepares a Megatron-LM model for planned steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foremoe._engine.together import refused_together, versions
from foremoe._variable import REFUSE
from foremoe.options import AnyHomes

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
    homes: AnyHomes = None,
    on_mismatch: str = REFUSE,
    cluster: str | None = None,
    model: str | Mapping[str, Any] | None = None,
    **options: Any,
) -> Replicas:
    """Prepares a Megatron-LM model for planned steps. Outside of step() the model is unchanged.

    Collective over all ranks of the default process group, including those of dense pipeline stages.

    Args:
        model_chunks: A module or a list of modules. If Megatron's DistributedDataParallel is used, wrap them first.
        guest_slots: Guest slots per rank and layer. 0: copies no experts, but takes all sizes from the plan.
        residency: static, resident, shared or auto; see foremoe.plan(). None: resident, or static if mode is
            static; with a known cluster, a phase that is modelled to be faster without a plan then runs without
            one. auto: needs a known cluster, and chooses among no plan, static and resident, each with prefer
            balance, links and time, at the first plan. shared: guests of all layers use the same `depth` sets of
            guest_slots and are copied for every pass of a layer.
        mode: active: step() executes plans. static: active with residency static. shadow: step() counts rows, and plans
            to estimate the benefit of balancing, but changes nothing.
        policy: See foremoe.plan().
        depth: Number of turns (passes of a layer) that copies start ahead; one fewer under shared, where 1 hides no
            copies.
        ranks_per_node: Ranks of the expert-parallel group that share a fast interconnect. None: 8, or all if fewer.
        threads: Threads with which each rank plans its share of the layers.
        homes: Homes to which permute_experts() has moved the experts of this pipeline stage. Counts and routes then
            have the experts' numbers from before; renumbered() converts routes for router replay. None: they have the
            model's own numbers.
        on_mismatch: If rows go to other experts than the planned counts say. refuse: the step raises an error. home:
            each expert's rows beyond those planned are computed at its home, for routers that choose anew or are
            replayed in part. Layers then exchange counts and wait for the device, as without a plan; not for the flex
            dispatcher. Metric foremoe/mismatched: their share of the planned rows. Shadow mode ignores it.
        cluster: Cluster for which seconds of a step are modelled, to choose plans and in shadow mode; see
            foremoe.evaluate(). None: detected by the name of the CUDA device. If none is found, it is not known.
        model: Model of these seconds. None: derived from the configuration.
        options: prefer, copy_price, free_copies, tolerance, stages, max_copies_per_rank, max_copies_per_source,
            min_tokens_per_guest, seed; see foremoe.plan().

    Raises:
        ImportError: for an unsupported version of megatron-core.
        InputError: for an invalid argument or an unsupported field of the configuration, with its name and allowed
            values, and for homes by which the model is not permuted. All ranks raise, and create no process group, if
            one rank refuses, or if ranks differ in arguments (except threads), in versions, or in the layers of a
            pipeline stage.
        RuntimeError: on all ranks, if torch cannot create the groups.
    """
    arguments = AttachArguments(
        guest_slots=guest_slots, residency=residency, mode=mode, policy=policy, depth=depth,
        ranks_per_node=ranks_per_node, threads=threads, on_mismatch=on_mismatch, cluster=cluster, model=model,
        options=options,
    )  # fmt: skip
    with refused_together() as given:
        version = expect_version(mode)
        given.expect_equal(versions() | {"megatron-core": version} | arguments.compared())
        chunks = list(model_chunks) if isinstance(model_chunks, (list, tuple)) else [model_chunks]
        replicas = Replicas(chunks, arguments.executed(), homes)
        replicas.check_agreement(given)
    replicas.make_groups()
    return replicas

"""Planned steps with Megatron-LM's own schedule and optimizers, and with the code of docs/users/adopting.md."""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Callable
from typing import Any

import megatron_on_cpu
import pytest
import torch
import torch.distributed as dist
from megatron_training import (
    MICRO_STEPS,
    TOKENS,
    Case,
    batch,
    begin_groups,
    counts_of,
    expect_equal,
    make_config,
    make_net,
    replay,
    run_step,
    wrap,
)

import foremoe.megatron

DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs" / "users" / "adopting.md"
OVERLAP = {"overlap_grad_reduce": True}
SHARDED = {"use_distributed_optimizer": True}


def test_the_documented_snippet_runs_with_megatrons_own_schedule(rank: int) -> None:
    """Compares the results with those of the same schedule without the snippet."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    begin_groups(2)
    snippet = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[0]
    case = Case(ep=2, ddp=OVERLAP)

    def run(planned: bool) -> dict[str, Any]:
        model = wrap(case, config := make_config(case), net := make_net(config))
        config.no_sync_func = model.no_sync
        config.finalize_model_grads_func = lambda models, *_, **__: [m.finish_grad_sync() for m in models]
        model.zero_grad_buffer()
        inputs: list[Any] = []

        def forward_step(data: Any, of: Any) -> Any:
            replay(net, 0, m := next(data))
            inputs.append(batch(0, m))
            return of(inputs[-1]), lambda y: ((loss := y.square().mean()), {"loss": loss.detach().clone()})

        names: dict[str, Any] = {
            "model": [model], "counts": counts_of(0, dist.get_rank()),
            "forward_backward_func": get_forward_backward_func(), "forward_step": forward_step,
            "data_iterator": iter(range(MICRO_STEPS)), "seq_length": TOKENS, "micro_batch_size": 1,
        }  # fmt: skip
        code = snippet
        if not planned:
            code = (
                "metrics = {}\nif True:"
                + snippet[snippet.index("with replicas") :].split(":", 1)[1].split("metrics =")[0]
            )
        exec(code, names)
        return {
            "losses": [float(of["loss"]) for of in names["losses"]],
            "inputs": [x.grad for x in inputs],
            "weights": [{name: p.main_grad for name, p in net.named_parameters()}],
            "metrics": names["metrics"],
        }

    expected, found = run(False), run(True)
    expect_equal(found, expected)
    assert found["metrics"]["foremoe/rho_computed"] < 1.05


def optimize(case: Case, attach: Callable[[Any], Any] | None = None) -> tuple[dict[str, Any], list[float]]:
    """Runs three clipped steps of Megatron-LM's Adam. Returns weights by name, and gradient norms."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = make_config(case)
    net = make_net(config)
    model = wrap(case, config, net)
    sharded = bool((case.ddp or {}).get("use_distributed_optimizer"))
    options = OptimizerConfig(
        optimizer="adam", lr=0.01, clip_grad=0.5, params_dtype=case.dtype, use_distributed_optimizer=sharded
    )
    norms = []
    with megatron_on_cpu.types_of_cuda():
        optimizer = get_megatron_optimizer(options, [model])
        replicas = attach(model) if attach is not None else None
        for step in range(3):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            planned = replicas.plan(counts_of(step, dist.get_rank())) if replicas is not None else None
            with replicas.step(planned) if replicas is not None else contextlib.nullcontext():
                run_step(case, model, net, step)
            model.finish_grad_sync()
            norms.append(float(optimizer.step()[1]))
    if case.ddp is not None and case.ddp.get("overlap_param_gather"):
        model.start_param_sync(force_sync=True)
    return {name: p.detach().clone() for name, p in net.named_parameters()}, norms


@pytest.mark.parametrize("ddp", [OVERLAP, SHARDED, SHARDED | OVERLAP | {"overlap_param_gather": True}])
def test_steps_of_megatrons_optimizers_give_the_same_weights_under_a_plan(rank: int, ddp: dict[str, Any]) -> None:
    begin_groups(2)
    case = Case(ep=2, dtype=torch.float32, config={"moe_router_dtype": "fp32"}, ddp=ddp)
    expected, norms = optimize(case)
    found, norms_found = optimize(case, lambda model: foremoe.megatron.attach(model, ranks_per_node=2))
    assert max(float((found[name] - of).abs().max() / of.abs().max()) for name, of in expected.items()) <= 1e-6
    assert norms_found == pytest.approx(norms, rel=1e-6) and min(norms) > 0.1

"""Planned steps, or shadow mode, in SkyRL with the Megatron strategy (a9564572).

    export RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 RAY_RUNTIME_ENV_HOOK=foremoe.ray.uv_hook
    export FOREMOE_ATTACH=mode=active,guest_slots=1

before `uv run --with WHEEL … -m skyrl.train.entrypoints.main_base …`, where WHEEL is ForeMoE's file: Ray starts workers
by the same `uv run`, so they have it too. Planned steps need
trainer.policy.megatron_config.moe_enable_routing_replay=true and
generator.inference_engine.enable_return_routed_experts=true. Without FOREMOE_ATTACH, training runs in shadow mode.

Each mini-batch is one planned step, with its padding, which SkyRL routes too. Old log-probabilities are planned from
the second step on. The reference model has processes of its own, which never train and run as without ForeMoE.
"""

from __future__ import annotations

from .megatron.schedule import Adapter, Schedule, install

ADAPTER = Adapter("SkyRL", ("skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper",))
schedule: Schedule | None = None


def init() -> Schedule:
    """Wraps the schedule in this process."""
    global schedule
    schedule = install(ADAPTER)
    return schedule

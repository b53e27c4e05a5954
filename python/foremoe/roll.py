"""ForeMoE in ROLL's Megatron-LM strategies.

    export RAY_RUNTIME_ENV_HOOK=foremoe.ray.hook FOREMOE_ATTACH=mode=active,guest_slots=1

in the environment of the driver, which calls ray.init() with a runtime environment of its own (foremoe.ray). Each
worker that imports roll.distributed.strategy.megatron_strategy then gets the planned schedule, before a strategy stores
it. Active mode requires router_replay.mode R3 in actor_train, whose old log-probabilities are planned too, from the
second step on. Critics are trained as without ForeMoE.

Tested with ROLL 8eb27cc2: its MegatronTrainStrategy on CPU (lab/engines/roll_schedule.py).
"""

from __future__ import annotations

from foremoe.megatron.rehearsal import Call
from foremoe.megatron.schedule import Adapter, Schedule, install


def is_policy(call: Call) -> bool:
    """Whether the strategy, whose inner_forward_step the call runs, is not that of a critic."""
    strategy = call.keywords["forward_step_func"].func.__self__
    return bool(strategy.worker_config.name != "critic")


ADAPTER = Adapter("ROLL", ("roll.distributed.strategy.megatron_strategy",), is_policy=is_policy)
schedule: Schedule | None = None


def init() -> Schedule:
    """Wraps the schedule in this process."""
    global schedule
    schedule = install(ADAPTER)
    return schedule

"""ForeMoE in RLinf's Megatron-LM workers, in shadow mode only, since RLinf replays no routes.

    export RAY_RUNTIME_ENV_HOOK=foremoe.ray.hook

in the environment of the driver, which calls ray.init() (foremoe.ray). RLinf looks up the schedule in two modules, of
which the second is for agents only: init() wraps those that are imported.

Tested with RLinf a3816b59: MegatronWorker.run_forward_backward() on CPU (lab/engines/rlinf_schedule.py).
"""

from __future__ import annotations

import sys

from foremoe.megatron.schedule import LOOK_UP, Adapter, Schedule, install

MODULES = ("rlinf.workers.megatron_worker", "rlinf.workers.actor.ma_megatron_actor_worker")
schedules: dict[str, Schedule] = {}


def init() -> Schedule:
    """Wraps the schedule of each module in this process. Returns that of the first."""
    for name in MODULES:
        if name == MODULES[0] or hasattr(sys.modules.get(name), LOOK_UP):
            schedules[name] = install(Adapter("RLinf", (name,), replays=False))
    return schedules[MODULES[0]]

"""ForeMoE in AReaL's Megatron-LM engine, in shadow mode only, since AReaL replays no routes.

    python3 … --config … "actor.scheduling_spec.0.cmd=python3 -m foremoe.areal"

AReaL's local and Slurm schedulers start each worker with this command, which runs AReaL's own server.
With AReaL's Ray scheduler, set RAY_RUNTIME_ENV_HOOK=foremoe.ray.hook (foremoe.ray) instead. Critics pass through.

Tested with AReaL 4aef98d8: MegatronEngine.train_batch() on CPU (lab/engines/areal_schedule.py).
"""

from __future__ import annotations

import inspect
import runpy

from foremoe._import_hook import WhenImported
from foremoe.megatron.rehearsal import Call
from foremoe.megatron.schedule import Adapter, Schedule, install

MODULE = "areal.engine.megatron_engine"


def is_policy(call: Call) -> bool:
    """Whether the engine, in a method of which the forward step is defined, is not that of a critic."""
    engine = inspect.getclosurevars(call.keywords["forward_step_func"]).nonlocals["self"]
    return not engine.config.is_critic


ADAPTER = Adapter("AReaL", (MODULE,), is_policy=is_policy, replays=False)
schedule: Schedule | None = None


def init() -> Schedule:
    """Wraps the schedule in this process."""
    global schedule
    schedule = install(ADAPTER)
    return schedule


if __name__ == "__main__":
    import foremoe.areal  # this module runs as __main__

    WhenImported({MODULE: foremoe.areal.init}).install()
    runpy.run_module("areal.infra.rpc.rpc_server", run_name="__main__", alter_sys=True)

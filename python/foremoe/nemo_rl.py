"""Planned steps, or shadow mode, in NeMo-RL with the Megatron policy (7ea279ab).

    export PYTHONPATH=FOLDER RAY_RUNTIME_ENV_HOOK=foremoe.ray.hook FOREMOE_ATTACH=mode=active,guest_slots=1

before `uv run examples/run_grpo.py …`. FOLDER is one that all nodes can read, filled by `pip install --no-deps --target
FOLDER WHEEL` with ForeMoE's file: NeMo-RL gives these variables to all its actors, but makes a Python environment for
each type of actor, which its lock file determines. Planned steps need policy.router_replay.enabled=true. Without
FOREMOE_ATTACH, training runs in shadow mode.

Each call of the schedule is one planned step: of all micro-batches of a global batch, or, with NeMo-RL's
SingleController, of one group, several of which precede an optimizer step. Before it, the micro-batches of the call are
taken from NeMo-RL's generator, so they are all on the device at once, with their routes. Tokens without a route (−1)
are computed at the homes of the experts that the router chooses. Old log-probabilities are planned from the second step
on; those of the reference replay no routes and run as without ForeMoE, as does the value model.
"""

from __future__ import annotations

from .megatron.rehearsal import Call
from .megatron.schedule import Adapter, Schedule, install


def _is_policy(call: Call) -> bool:
    """Whether the call is not of the value model, which alone prepares the input of its loss by itself."""
    given = getattr(call.keywords["forward_step_func"], "keywords", {})
    return getattr(given.get("post_processing_fn"), "prepare_fn", None) is None


ADAPTER = Adapter("NeMo-RL", ("nemo_rl.models.megatron.train",), is_policy=_is_policy)
schedule: Schedule | None = None


def init() -> Schedule:
    """Wraps the schedule in this process."""
    global schedule
    schedule = install(ADAPTER)
    return schedule

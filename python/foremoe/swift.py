"""ForeMoE in ms-swift's Megatron-LM trainers (`megatron rlhf`).

    export FOREMOE_ATTACH=mode=active,guest_slots=1
    megatron rlhf … --external_plugins "$(python -m foremoe.swift)"

ms-swift imports this file in each training process. With --use_ray, set RAY_RUNTIME_ENV_HOOK (foremoe.ray) instead of
--external_plugins. Without FOREMOE_ATTACH, training runs in shadow mode. Active mode requires GRPO with
--router_replay_mode R2 or R3. Old and reference log-probabilities run as without ForeMoE, since ms-swift computes them
by calling the model, outside the schedule.

Tested with ms-swift 3602360a: its train_step() and forward_step() on CPU (lab/engines/swift_schedule.py).
"""

from __future__ import annotations

from pathlib import Path

from foremoe.megatron.schedule import Adapter, Schedule, install

ADAPTER = Adapter("ms-swift", ("swift.megatron.trainers.base",))
schedule: Schedule | None = None


def init() -> Schedule:
    """Wraps the schedule in this process."""
    global schedule
    schedule = install(ADAPTER)
    return schedule


if __name__ == "__main__":  # ms-swift puts the folder of the plugin first on sys.path, so it has one of its own
    print(Path(__file__).parent / "swift_plugin" / "foremoe_swift_plugin.py")

"""The Expert Transfer Engine in PyTorch: executes plans on the device of the weights.

    ep = ExpertParallel(expert_layers(model), guest_slots=1)  # before the optimizer is made
    ep.wrap(model)
    phase = ep.plan([routes_of_micro_step_0, ...])            # collective
    with phase:
        for m, batch in enumerate(micro_batches):
            with phase.micro_step(m):                         # replays its routes; backward inside
                loss(model(**batch)).backward()
        phase.drain()

Tested on CPU with gloo, and on one GPU that all ranks share, with NCCL.
"""

import torch

from foremoe._engine.groups import stand_by
from foremoe._engine.layers import ExpertLayer, grouped_linear
from foremoe.supported import TORCH

from .checkpoints import Checkpoints
from .parallel import ExpertParallel
from .phase import Phase

TORCH.expect("foremoe.torch", torch.__version__)

__all__ = ["Checkpoints", "ExpertLayer", "ExpertParallel", "Phase", "grouped_linear", "stand_by"]

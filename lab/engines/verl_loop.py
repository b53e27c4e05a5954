"""SGLang's routes through verl's AgentLoopOutput to counts. Usage: verl_loop.py RESPONSES, of sglang_routes.py"""

import base64
import json
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state
from models import EXPERTS, LAYERS, TOP_K
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from foremoe.verl.routes import counts_of

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
routes, answers, lengths, expected = [], [], [], np.zeros((LAYERS, EXPERTS), int)
for ids, response in zip(*json.loads(Path(sys.argv[1]).read_text()), strict=True):
    rows = np.frombuffer(base64.b64decode(response["meta_info"]["routed_experts"]), np.int32)
    rows = rows.reshape(-1, LAYERS, TOP_K)
    answer = response["output_ids"]
    output = AgentLoopOutput(
        prompt_ids=ids, response_ids=answer, response_mask=[1] * len(answer), routed_experts=rows,
        metrics=AgentLoopMetrics(),
    )  # fmt: skip
    routes.append(output.as_dict()["routed_experts"])
    answers.append(len(answer))
    lengths.append(len(ids) + len(answer))
    for layer in range(LAYERS):
        expected[layer] += np.bincount(rows[:, layer].ravel(), minlength=EXPERTS)
counts = counts_of(routes, answers, lengths, layers=range(LAYERS), num_experts=EXPERTS, top_k=TOP_K, first=0)
filler = np.abs(counts - expected).sum(1)
print(f"verl: {expected.sum() // LAYERS // TOP_K} tokens with routes; filler of {len(routes)} last tokens: {filler}")
assert (counts >= expected).all() and (filler == TOP_K * len(routes)).all()
dist.destroy_process_group()

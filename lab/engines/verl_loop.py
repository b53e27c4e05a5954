"""SGLang's routes through verl's AgentLoopOutput to counts. Usage: verl_loop.py RESPONSES, of sglang_routes.py"""

import base64
import json
import sys
from pathlib import Path

import numpy as np
import torch
from models import EXPERTS, LAYERS, TOP_K
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.megatron.router_replay_utils import align_r3_router_replay_data, build_r3_replay_mask

from foremoe.megatron import with_filler_routes
from foremoe.megatron.rehearsal import count


def nested(parts):
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


routes, answers, tokens, expected = [], [], [], np.zeros((LAYERS, EXPERTS), int)
for ids, response in zip(*json.loads(Path(sys.argv[1]).read_text()), strict=True):
    rows = np.frombuffer(base64.b64decode(response["meta_info"]["routed_experts"]), np.int32)
    rows = rows.reshape(-1, LAYERS, TOP_K)
    answer = response["output_ids"]
    output = AgentLoopOutput(
        prompt_ids=ids, response_ids=answer, response_mask=[1] * len(answer), routed_experts=rows,
        metrics=AgentLoopMetrics(),
    )  # fmt: skip
    routes.append(torch.tensor(output.as_dict()["routed_experts"]))
    answers.append(torch.ones(len(answer), dtype=torch.int64))
    tokens.append(torch.tensor(ids + answer))
    for layer in range(LAYERS):
        expected[layer] += np.bincount(rows[:, layer].ravel(), minlength=EXPERTS)
replayed = build_r3_replay_mask(nested(tokens), nested(answers)).values()
of_layers = align_r3_router_replay_data(nested(routes), nested(tokens)).values().unbind(1)
filled = [with_filler_routes(of, replayed, num_experts=EXPERTS, first=0) for of in of_layers]
counts = count([filled], EXPERTS)[0][0]
filler = np.abs(counts - expected).sum(1)
print(f"verl: {expected.sum() // LAYERS // TOP_K} tokens with routes; filler of {len(routes)} last tokens: {filler}")
assert (counts >= expected).all() and (filler == TOP_K * len(routes)).all()

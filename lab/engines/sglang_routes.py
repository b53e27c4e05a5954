"""Routes of SGLang's Engine, also of one that starts from a file of `foremoe maps`. Usage: sglang_routes.py RESPONSES

Writes the responses of the first engine into the file RESPONSES. SGLang runs with torch in place of its compiled
kernels (stand_ins/sgl_kernel). Its reader of placement files also runs as each of four expert-parallel ranks.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace as Namespace

import numpy as np
import sglang
import sglang.srt.eplb.expert_location as location
import sglang.srt.mem_cache.pool_host.common as host_memory
from models import EXPERTS, LAYERS, Comparison, converse, make_model, prompts

import foremoe
from foremoe.recorders import from_sglang

# SGLang's processes import this module again. There is no CUDA with which to register host memory.
host_memory._cuda_host_register = host_memory._cuda_host_unregister = lambda *_: None
SAMPLING = {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True}
RANKS, GUESTS = 4, 8


def run_engine(folder, what, **options):
    """Returns the responses to four prompts. Compares them, and a conversation of three turns."""
    engine = sglang.Engine(
        model_path=folder, device="cpu", attention_backend="torch_native", skip_tokenizer_init=True, dtype="float32",
        enable_return_routed_experts=True, disable_cuda_graph=True, mem_fraction_static=0.1, max_total_tokens=2048,
        max_running_requests=4, sampling_backend="pytorch", grammar_backend="none", chunked_prefill_size=32,
        log_level="error", **options,
    )  # fmt: skip
    ask = {"sampling_params": SAMPLING, "return_routed_experts": True}
    responses = engine.generate(input_ids=prompts(), **ask)
    comparison = Comparison(folder)
    for ids, response in zip(prompts(), responses, strict=True):
        comparison.add(from_sglang(response, prompt_token_ids=ids))
    comparison.report(f"SGLang, {what}")

    def turn(ids, held, _):
        response = engine.generate(input_ids=ids, routed_experts_start_len=held, **ask)
        return from_sglang(response, start_len=held, prompt_token_ids=ids), response["output_ids"]

    segments = converse(turn)
    engine.shutdown()
    turns = Comparison(folder)
    turns.add(segments)
    turns.report(f"SGLang, {what}, three turns")
    return responses, comparison.recorder.trace()


def write_maps(trace, folder):
    """Returns the file of `foremoe maps` for four ranks, and its map."""
    load, out = f"{folder}/load.safetensors", f"{folder}/experts.json"
    foremoe.collect(trace, ranks=RANKS).save(load)
    command = [sys.executable, "-m", "foremoe", "maps", load, "--to", "sglang", "-G", str(GUESTS // RANKS), "-o", out]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return out, np.array(json.loads(Path(out).read_text())["physical_to_logical_map"])


def read_as(path, rank):
    """Returns SGLang's metadata of one of four ranks."""
    moe = Namespace(init_expert_location=path, ep_num_redundant_experts=GUESTS, ep_join_mode=None,
                    moe_a2a_backend="deepep", ep_dispatch_algorithm="static")  # fmt: skip
    location.get_exec = lambda: Namespace(moe=moe)
    location.get_parallel = lambda: Namespace(ep_size=RANKS, elastic_ep_initial_size=None, nnodes=1, tp_size=RANKS)
    location.get_device = lambda: Namespace(device="cpu")
    location._prefer_same_node_experts = lambda: False
    shape = location.ModelConfigForExpertLocation(num_layers=LAYERS, num_logical_experts=EXPERTS)
    location.ModelConfigForExpertLocation.from_model_config = staticmethod(lambda _: shape)
    return location.compute_initial_expert_location_metadata(None, rank)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        responses, trace = run_engine(folder, "Engine")
        Path(sys.argv[1]).write_text(json.dumps([prompts(), responses]))
        path, maps = write_maps(trace, folder)
        run_engine(folder, "Engine from `foremoe maps`", init_expert_location=path, ep_num_redundant_experts=GUESTS)
        for rank in range(RANKS):
            read = read_as(path, rank)
            assert (read.physical_to_logical_map.numpy() == maps).all()
            for layer, expert in np.ndindex(LAYERS, EXPERTS):
                assert (maps[layer, read.logical_to_all_physical(layer, expert)] == expert).all()
        print(f"SGLang, reader of placements: {maps.shape[1]} slots of {EXPERTS} experts, read as each of 4 ranks")

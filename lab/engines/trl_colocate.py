"""Trains with foremoe.trl.GRPOTrainer and with trl's own trainer, both with vLLM itself in colocate mode, on CPUs.

    torchrun --nproc-per-node 2 lab/engines/trl_colocate.py [--tensor-parallel 2]

Each rank has half of the experts (EP 2) of a small Qwen3-MoE, and an engine or half of one. The plugin
vllm_cpu_capture lets vLLM's CPU kernels report the experts that they choose. These names are replaced:

- vllm_generation.LLM: creates the engine in float32 without compilation; trl has no arguments for this.
- LinearBase._cpu_skip_gemm_dispatch: vLLM keeps dense weights, which it otherwise packs and drops. Without this trl's
  own sync_weights() ends in "'Parameter' object has no attribute 'weight_loader'".
- UnquantizedFusedMoEMethod.process_weights_after_loading: vLLM 0.29 packs experts for CPUs when it first loads them,
  but not in reload_weights(). Therefore foremoe.trl refuses CPUs in _expect_vllm(), which is replaced too.
- VLLMGeneration.sync_weights: trl's trainer uses reload(), until the last line, which shows what its own does.
"""

import argparse
import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

os.environ |= {
    "ACCELERATE_USE_CPU": "true",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "tests" / "torch"))
import torch
import torch.distributed as dist
import transformers
import trl
from grpo import make_model, make_tokenizer, make_trainer
from trl.generation import vllm_generation
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Method
from vllm.model_executor.layers.linear import LinearBase

import foremoe.trl
from foremoe import _trl_vllm

SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 32, "num_key_value_heads": 2}
LOGGED = ("loss", "grad_norm", "reward", "sampling/sampling_logp_difference/max")


def pack(method: Any, layer: Any, own: Any = Method.process_weights_after_loading) -> None:
    again = method.moe_kernel is not None
    own(method, layer)
    if again:
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def reload(vllm: Any) -> None:
    vllm.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": vllm._iter_named_params()})
    vllm.llm.reset_prefix_cache()


def train(trainer: Any) -> dict[str, list[float]]:
    trainer.remove_callback(transformers.PrinterCallback)
    torch.manual_seed(dist.get_rank() // trainer.args.vllm_tensor_parallel_size)  # vLLM samples with this generator
    trainer.train()
    *steps, _ = trainer.state.log_history
    return {name: [step[name] for step in steps] for name in steps[0]}


def weights_of(llm: Any) -> dict[str, torch.Tensor]:
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def synchronised(vllm: Any) -> list[dict[str, torch.Tensor]]:
    before = weights_of(vllm.llm)
    vllm.sync_weights()
    return [before, weights_of(vllm.llm)]


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in one if not torch.equal(one[name], other[name])]


def main(folder: str, say: Any, **of_engine: Any) -> None:
    of_vllm = {"use_vllm": True, "vllm_mode": "colocate"} | {f"vllm_{name}": of for name, of in of_engine.items()}
    make = functools.partial(make_trainer, folder=f"{folder}/out", model=f"{folder}/model", max_steps=3, **of_vllm)
    planned = make(foremoe.trl.GRPOTrainer)
    logged = train(planned)
    mismatch, gap = max(logged["foremoe/mismatch"]), max(logged[LOGGED[-1]])
    say(f"foremoe: {mismatch:.2%} of vLLM's routes are not the routers' choice; log-probabilities differ by {gap:.1e}")
    assert mismatch == 0 and gap < 1e-4

    before, given = synchronised(planned.vllm_generation)
    planned.save_model(f"{folder}/trained")
    new = vllm_generation.LLM(f"{folder}/trained", distributed_executor_backend="external_launcher", **of_engine)
    changed, wrong = differing(before, given), differing(given, weights_of(new))
    say(
        f"foremoe: the last step changed {len(changed)} of vLLM's {len(given)} weights; a new engine, with the saved "
        f"model, has {len(wrong)} other weights"
    )
    assert len(changed) == len(given) and not wrong

    with mock.patch.object(vllm_generation.VLLMGeneration, "sync_weights", reload):
        plain = make(trl.GRPOTrainer)
        of_trl = train(plain)
        synchronised(plain.vllm_generation)
    for name in LOGGED:
        values = (" ".join(f"{value:.6g}" for value in of[name]) for of in (logged, of_trl))
        say("{}: foremoe {}, trl {}".format(name, *values))
        assert torch.tensor(logged[name]).allclose(torch.tensor(of_trl[name]), rtol=1e-4, atol=1e-5)

    changed = differing(*synchronised(plain.vllm_generation))
    gap = max(train(plain)[LOGGED[-1]])
    say(f"trl: its own sync_weights() of equal weights changed {len(changed)}; log-probabilities differ by {gap:.1e}")
    assert changed and all(".experts." in name for name in changed) and gap > 0.1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of one engine")
    ranks = parser.parse_args().tensor_parallel
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype="float32", enforce_eager=True)
    LinearBase._cpu_skip_gemm_dispatch = True
    Method.process_weights_after_loading = pack
    _trl_vllm._expect_vllm = lambda: None
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as made:
        if dist.get_rank() == 0:
            make_model(num_hidden_layers=3, mlp_only_layers=[0], **SIZES).save_pretrained(f"{made}/model")
            make_tokenizer().save_pretrained(f"{made}/model")
        shared = [made]
        dist.broadcast_object_list(shared)
        say = print if dist.get_rank() == 0 else lambda *_: None
        main(shared[0], say, tensor_parallel_size=ranks, gpu_memory_utilization=0.05)
        dist.barrier()

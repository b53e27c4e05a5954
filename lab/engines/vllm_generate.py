"""Routes of vLLM's LLM.generate. Usage: vllm_generate.py float32|bfloat16"""

import os
import sys
import tempfile

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from models import Comparison, make_model, prompts
from vllm import LLM, SamplingParams

from foremoe.recorders import from_vllm

DENSE = (0,)
dtype = sys.argv[1]
with tempfile.TemporaryDirectory() as folder:
    make_model(folder, DENSE)
    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=256,
        seed=0,
        enable_return_routed_experts=True,
    )
    sampling = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True, n=2, detokenize=False)
    comparison = Comparison(folder, DENSE, dtype)
    for output in engine.generate([{"prompt_token_ids": ids} for ids in prompts()], sampling):
        for segment in from_vllm(output):
            comparison.add([segment])
    assert comparison.sequences == 8
    # In bfloat16, the two programs round differently before they choose.
    comparison.report(f"vLLM, LLM.generate, {dtype}", allowed=0.0 if dtype == "float32" else 0.05)

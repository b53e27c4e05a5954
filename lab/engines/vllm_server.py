"""Routes of vLLM's server: completions, several choices, and turns of which each returns only new rows."""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

from models import Comparison, converse, make_model, prompts

from foremoe.recorders import from_vllm

DENSE = (0,)


class Server:
    """vLLM's server in a process of its own."""

    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "m",
             "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
             "--enable-return-routed-experts", "--host", "127.0.0.1", "--port", str(port)],
            stdout=sys.stderr,
        )  # fmt: skip

    def wait(self):
        while not self.answers():
            assert self.process.poll() is None, "the server ended"
            time.sleep(1)

    def answers(self):
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(self.address + "/health", timeout=10).status == 200

    def post(self, path, **body):
        data = json.dumps({"model": "m"} | body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request).read()

    def stop(self):
        self.process.terminate()
        self.process.wait()


SAMPLING = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True, "detokenize": False}


def complete(server, ids, start=0, **options):
    return server.post(
        "/v1/completions", prompt=ids, return_token_ids=True, routed_experts_prompt_start=start, **SAMPLING, **options
    )


def generate(server, ids, start=0, **options):
    sampling = SAMPLING | {"routed_experts_prompt_start": start} | options
    return server.post("/inference/v1/generate", token_ids=ids, sampling_params=sampling)


def turn_of(server, ask):
    """Returns the function that converse() calls."""

    def turn(ids, held, seed):
        body = ask(server, ids, held, seed=seed)
        segments = from_vllm(body, prompt_start=held, prompt_token_ids=ids)
        return segments, json.loads(body)["choices"][0]["token_ids"]

    return turn


with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
    make_model(folder, DENSE)
    server = Server(folder)
    stack.callback(server.stop)
    server.wait()
    comparison = Comparison(folder, DENSE)
    for ids in prompts():
        for segment in from_vllm(complete(server, ids, n=3, seed=9)):
            comparison.add([segment])
    assert comparison.sequences == 12
    comparison.report("vLLM, server, three choices")
    for ask in (complete, generate):
        comparison = Comparison(folder, DENSE)
        comparison.add(converse(turn_of(server, ask)))
        comparison.report(f"vLLM, server, three turns of {ask.__name__}()")

"""Makes responses in the formats of vLLM, SGLang, SkyRL and prime-rl."""

from __future__ import annotations

import base64
import struct
from typing import Any

import numpy as np

SHAPE = {"num_layers": 3, "num_experts": 8, "top_k": 2}


def draw_rows(
    tokens: int, seed: int = 0, *, layers: int = 3, experts: int = 8, top_k: int = 2, dtype: type = np.uint8
) -> np.ndarray:
    """Draws rows [tokens, layers, top_k], of distinct experts. Row 0 of layer 0 has the last experts."""
    random = np.random.default_rng(seed)
    rows = random.random((tokens, layers, experts)).argsort(-1)[..., :top_k]
    rows[0, 0] = range(experts - top_k, experts)
    return np.ascontiguousarray(rows.astype(dtype))


def npy(rows: np.ndarray) -> str:
    """vLLM's format: base64 of an .npy file, built without numpy's writer."""
    header = f"{{'descr': '{rows.dtype.str}', 'fortran_order': False, 'shape': {rows.shape}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    file = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + rows.tobytes()
    return base64.b64encode(file).decode()


def flat(rows: np.ndarray) -> str:
    """SGLang's format: base64 of int32 without a header."""
    return base64.b64encode(struct.pack(f"<{rows.size}i", *rows.ravel().tolist())).decode()


def described(rows: np.ndarray, **more: Any) -> dict[str, Any]:
    """SkyRL's format, and with start prime-rl's: base64 of a C-ordered array, its shape and dtype."""
    code = {"uint8": "B", "int16": "h", "uint16": "H", "int32": "i"}[rows.dtype.name]
    data = base64.b64encode(struct.pack(f"<{rows.size}{code}", *rows.ravel().tolist())).decode()
    return {"data": data, "shape": list(rows.shape), "dtype": rows.dtype.name} | more


def with_weights(rows: np.ndarray) -> np.ndarray:
    """prime-rl's int32 rows with routing weights: top_k ids, then the bits of top_k float32."""
    top_k = rows.shape[-1]
    bits = [struct.unpack("<i", struct.pack("<f", (k + 1) / 10))[0] for k in range(top_k)]
    weights = np.broadcast_to(np.array(bits, np.int32), rows.shape)
    return np.concatenate([rows.astype(np.int32), weights], axis=2)


def vllm_body(rows: Any, prompt: list[int], generated: list[int], **more: Any) -> dict[str, Any]:
    """Response of /v1/completions with return_token_ids."""
    routes = npy(rows) if isinstance(rows, np.ndarray) else rows
    choice = {"index": 0, "text": "…", "prompt_token_ids": prompt, "token_ids": generated, "routed_experts": routes}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(generated)}
    return {"object": "text_completion", "choices": [choice | more], "usage": usage}


def sglang_body(rows: Any, prompt: int, generated: list[int], **more: Any) -> dict[str, Any]:
    """Response of /generate."""
    routes = flat(rows) if isinstance(rows, np.ndarray) else rows
    info = {"prompt_tokens": prompt, "completion_tokens": len(generated), "routed_experts": routes}
    return {"text": "…", "output_ids": generated, "meta_info": info | more}


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


def expect_routes(routes: np.ndarray, rows: np.ndarray) -> None:
    """Asserts that routes are `rows`, followed by the last token without a route."""
    assert len(routes) == len(rows) + 1
    np.testing.assert_array_equal(routes[:-1], rows)
    assert (routes[-1] == np.iinfo(routes.dtype).max).all()

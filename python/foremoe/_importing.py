"""Decodes routes in formats of Python programs, for foremoe.import_files() and foremoe.recorders.

npz         zip of .npy members, one sequence each, in archive order; all members if none is named routed_experts…
npy-base64  base64 of .npy, one sequence per line
nrlre1      NeMo-RL's envelope, "nrlre1:<dtype>:<tokens>x<layers>x<top_k>:<base64 of the C-ordered array>", one per line
sglang      int32 without a header, raw (one sequence) or one base64 per line. Layers without experts and tokens without
            routes contain zeros. Repeated ids mark a row as missing
torch       rollouts of slime and miles: see _import_torch
json        server responses, one JSON document or one per line:
    vLLM ≥ 0.22  choices[i].routed_experts = base64 of .npy, prompt and generation. The last generated token has no
                 row; if the response contains the number of tokens, the report counts it
    vLLM 0.21    prompt_routed_experts and choices[i].routed_experts = nested lists, −1 where prefix-cached
    SGLang       meta_info.routed_experts or choices[i].sgl_ext.routed_experts = base64 of int32; sglext.routed_experts
                 beside the choices belongs to the first choice. Routing weights beside them are ignored (expert_logits:
                 togethercomputer/xorl-sglang, 7d380d5)
    NeMo-RL      routed_experts = nrlre1 envelope
    SkyRL        choices[i].routed_experts = {data: base64, shape, dtype} (NovaSky-AI/SkyRL, a956457: generate_wire.py)
    prime-rl     the same with start, the first token that has a row (PrimeIntellect-ai/prime-rl, 559b447:
                 inference/vllm/routed_experts.py). int32, which it sends only with routing weights (prime-rl#3523),
                 contains top_k ids followed by the bits of top_k float32 weights

C++ (TraceAssembler) applies the rules for rows (missing rows, repeated ids, ids out of range) to all formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _core
from ._decoding import (
    Decoded,
    SourcePlace,
    base64_bytes,
    decode_routes,
    int32,
    is_base64,
    member,
    nested,
    nrlre1,
    parse_json,
    read_members,
    type_name,
    versions_of,
)
from ._import_torch import read_rollout


def decoder(options: Mapping[str, Any]) -> Callable[[str, str, bytes], list[Decoded]]:
    """Returns a decoder of (format, name, bytes of a source). options: layers and top_k of headerless arrays."""

    def decode(format: str, file: str, data: bytes) -> list[Decoded]:
        if format == "npz":
            return list(_members(file, data))
        if format == "torch":
            return list(read_rollout(file, data, options))
        if format == "json":
            return list(_responses(file, data, options))
        read: dict[str, Callable[[bytes, SourcePlace], bytes | npt.NDArray[Any]]] = {
            "npy-base64": base64_bytes,
            "nrlre1": nrlre1,
            "sglang": lambda text, place: int32(base64_bytes(text, place), place, options),
        }
        if format == "sglang" and not is_base64(data.split(b"\n", 1)[0].strip()):
            place = SourcePlace(file, "routed_experts")
            return [place.decoded(int32(data, place, options))]
        return [place.decoded(read[format](line, place)) for line, place in _lines(file, data)]

    return decode


def _lines(file: str, data: bytes) -> Iterator[tuple[bytes, SourcePlace]]:
    """Yields non-blank lines with their places; line numbers start at 1."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield line.strip(), SourcePlace(file, f"line {number}")


def _members(file: str, data: bytes) -> Iterator[Decoded]:
    for place, content in read_members(file, data, "routed_experts"):
        yield place.decoded(content)


def _responses(file: str, data: bytes, options: Mapping[str, Any]) -> Iterator[Decoded]:
    first, _, rest = data.strip().partition(b"\n")
    one_per_line = False
    if rest:
        try:
            json.loads(first)
            one_per_line = True
        except (ValueError, RecursionError):
            pass
    documents = _lines(file, data) if one_per_line else [(data.strip(), SourcePlace(file, ""))]
    for text, place in documents:
        yield from _of_document(parse_json(text, place), place, options)


def _of_document(document: Any, place: SourcePlace, options: Mapping[str, Any]) -> Iterator[Decoded]:
    if isinstance(document, list):
        for i, one in enumerate(document):
            yield from _of_document(one, place.at(f"[{i}]"), options)
        return
    if not isinstance(document, dict):
        place.refuse(f"should be an object, not {type_name(document)}")
    prompt = document.get("prompt_routed_experts")
    if prompt is not None and not isinstance(prompt, list):
        place.at("prompt_routed_experts").refuse(f"should be a list, not {type_name(prompt)}")
    key = next((key for key in ("choices", "outputs") if document.get(key) is not None), None)
    choices = [document] if key is None else document[key]
    if not isinstance(choices, list):
        place.at(str(key)).refuse(f"should be a list, not {type_name(choices)}")
    shared = member(document.get("sglext"), "routed_experts") if key else None  # routes beside the choices
    if shared is not None and len(choices) > 1:
        place.at("sglext.routed_experts").refuse(f"belongs to the first of {len(choices)} choices only")
    for i, choice in enumerate(choices):
        of_choice = place if key is None else place.at(f"{key}[{i}]")
        at = of_choice.at("routed_experts")
        holders = (choice, member(choice, "meta_info"), member(choice, "sgl_ext"))
        routes = next((r for holder in holders if (r := member(holder, "routed_experts")) is not None), shared)
        if routes is None:
            at.refuse("is missing")
        if not isinstance(routes, str | list | dict):
            at.refuse(f"should be a string, a list or an object, not {type_name(routes)}")
        if start := member(routes, "start"):
            problem = "earlier rows are in other responses, which foremoe.recorders joins"
            at.at("start").refuse(f"is token {start!r:.20}: {problem}")
        if isinstance(routes, list):
            before = nested(prompt, place.at("prompt_routed_experts")) if prompt else None
            generated = nested(routes, at, before)
            decoded = at.decoded(generated if before is None else np.concatenate([before, generated]))
            decoded = decoded._replace(prompt_length=-1 if prompt is None else len(prompt))
        else:
            decoded = decode_routes(routes, at, options)
        yield decoded._replace(
            num_tokens=_num_tokens(document, choice, len(choices) == 1),
            weight_versions=versions_of(choice, document, of_choice),
        )


def _num_tokens(document: dict[str, Any], choice: Any, only_choice: bool) -> int | None:
    """Returns the number of prompt and generated tokens, if the response contains it."""
    prompt = member(choice, "prompt_token_ids") or document.get("prompt_token_ids")
    generated = member(choice, "token_ids")
    if isinstance(prompt, list) and isinstance(generated, list):
        return len(prompt) + len(generated)
    counts = [member(document.get("usage"), name) for name in ("prompt_tokens", "completion_tokens")]
    known = only_choice and all(type(count) is int and 0 <= count < 2**53 for count in counts)
    return sum(counts) if known else None


def main(arguments: Sequence[str]) -> int:
    """Continues `foremoe import`. arguments: A JSON request, then the files."""
    from ._command_line import OK, printable, reporting

    request, *files = arguments
    asked = json.loads(request)

    def run() -> int:
        lines, as_json = _core._import_to_file(files, asked["options"], asked["out"], decoder(asked["options"]))
        print(as_json if asked["json"] else "\n".join(map(printable, lines)))
        return OK

    names = [option["name"] for option in _core._option_tables()["import"]]
    return reporting("foremoe import", {name: f"--{name.replace('_', '-')}" for name in names}, run)

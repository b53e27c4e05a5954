"""Decodes routes in formats of Python programs, for foremoe.import_files() and foremoe.recorders.

npz         zip of .npy members, one sequence each, in archive order; all members if none is named routed_experts…
npy-base64  base64 of .npy, one sequence per line
nrlre1      NeMo-RL's envelope, "nrlre1:<dtype>:<tokens>x<layers>x<top_k>:<base64 of the C-ordered array>", one per line
sglang      int32 without a header, raw (one sequence) or one base64 per line. Layers without experts and tokens without
            routes contain zeros. Repeated ids mark a row as missing
torch       rollouts of slime and miles: see _import_torch
counts      tokens per expert: see _counts
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

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _core
from ._counts import read_counts
from ._decoding import (
    Decoded,
    SourcePlace,
    attempt,
    base64_bytes,
    decode_routes,
    expect_memory_of_json,
    int32,
    is_base64,
    member,
    nested,
    nrlre1,
    parse_json,
    prompt_key,
    read_members,
    type_name,
    unreadable,
    versions_of,
    with_counts,
)
from ._errors import InputError
from ._import_torch import read_rollout

MISSING = "is missing"
REMEDY = (
    "no response has routes. Start vLLM or SGLang with --enable-return-routed-experts; requests to SGLang also need "
    "return_routed_experts=true"
)
PROMPT_IDS = ("prompt_token_ids", "prompt_ids")
GENERATED_IDS = (
    "token_ids", "output_ids", "output_token_ids", "generation_token_ids", "response_token_ids", "response_ids",
    "completion_token_ids", "completion_ids",
)  # fmt: skip
CACHED = ("cached_tokens", "num_cached_tokens")


def decoder(options: Mapping[str, Any]) -> Callable[[str, str, bytes], list[Decoded]]:
    """Returns a decoder of (format, name, bytes of a source). options: layers and top_k of headerless arrays."""

    whole_files = {"counts": read_counts, "torch": read_rollout, "json": _responses}

    def decode(format: str, file: str, data: bytes) -> list[Decoded]:
        if format == "npz":
            return [place.decoded(content) for place, content in read_members(file, data, "routed_experts")]
        if format in whole_files:
            return list(whole_files[format](file, data, options))
        read: dict[str, Callable[[bytes, SourcePlace], bytes | npt.NDArray[Any]]] = {
            "npy-base64": base64_bytes,
            "nrlre1": nrlre1,
            "sglang": lambda text, place: int32(base64_bytes(text, place), place, options),
        }
        if format == "sglang" and not is_base64(data.split(b"\n", 1)[0].strip()):
            place = SourcePlace(file, "routed_experts")
            return [place.decoded(int32(data, place, options))]

        def of_line(line: bytes, place: SourcePlace) -> Decoded:
            return place.decoded(read[format](line, place))

        return [attempt(functools.partial(of_line, line, place)) for line, place in _lines(file, data)]

    return decode


def _lines(file: str, data: bytes) -> Iterator[tuple[bytes, SourcePlace]]:
    """Yields non-blank lines with their places; line numbers start at 1."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield line.strip(), SourcePlace(file, f"line {number}")


def _responses(file: str, data: bytes, options: Mapping[str, Any]) -> Iterator[Decoded]:
    lines = list(_lines(file, data))
    one_per_line = len(lines) > 1 and (
        _is_json(lines[0][0], file)
        or (not _is_json(data, file) and any(_is_json(line, file) for line, _ in lines if line[:1] == b"{"))
    )  # the first line may be the damaged one
    documents = lines if one_per_line else [(data.strip(), SourcePlace(file, ""))]
    samples: list[Decoded] = []
    for text, place in documents:
        try:
            samples += _of_document(parse_json(text, place), place, options)
        except InputError as error:
            samples.append(unreadable(error))
    if all(sample.problem for sample in samples) and any(MISSING in sample.problem for sample in samples):
        samples[0] = samples[0]._replace(problem=f"{samples[0].problem}: {REMEDY}")
    return iter(samples)


def _is_json(text: bytes, file: str) -> bool:
    expect_memory_of_json(text, file)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _choices_of(document: dict[str, Any], place: SourcePlace) -> tuple[str | None, list[Any]]:
    """Returns the choices of a response and their key; None if the response is its only choice."""
    key = next((key for key in ("choices", "outputs") if document.get(key) is not None), None)
    choices = [document] if key is None else document[key]
    if not isinstance(choices, list):
        place.at(str(key)).refuse(f"should be a list, not {type_name(choices)}")
    if not choices:
        place.at(str(key)).refuse("is empty")
    return key, choices


def _of_document(document: Any, place: SourcePlace, options: Mapping[str, Any]) -> Iterator[Decoded]:
    """Yields the samples of a response, or of a list of responses."""
    if isinstance(document, list):
        for i, one in enumerate(document):
            try:
                yield from list(_of_document(one, place.at(f"[{i}]"), options))
            except InputError as error:
                yield unreadable(error)
        return
    if not isinstance(document, dict):
        counts = ". If these are tokens per expert, give `counts`" if type(document) in (int, float) else ""
        place.refuse(f"should be an object, not {type_name(document)}{counts}")
    if failure := document.get("error") or (document.get("object") == "error" and document.get("message")):
        place.refuse(f"is an error of the server: {member(failure, 'message') or failure!s:.200}")
    prompt = document.get("prompt_routed_experts")
    if prompt is not None and not isinstance(prompt, list):
        place.at("prompt_routed_experts").refuse(f"should be a list, not {type_name(prompt)}")
    key, choices = _choices_of(document, place)
    shared = member(document.get("sglext"), "routed_experts") if key else None  # routes beside the choices
    if shared is not None and len(choices) > 1:
        place.at("sglext.routed_experts").refuse(f"belongs to the first of {len(choices)} choices only")

    def read(choice: Any, of_choice: SourcePlace) -> Decoded:
        at = of_choice.at("routed_experts")
        info = member(choice, "meta_info")
        holders = (choice, info, member(choice, "sgl_ext"))
        routes = next((r for holder in holders if (r := member(holder, "routed_experts")) is not None), shared)
        if routes is None or routes == "":
            reason = member(choice, "finish_reason") or member(info, "finish_reason")
            reason = member(reason, "type") or reason
            at.refuse(MISSING + (f" (finish_reason {reason!s:.20})" if reason else ""))
        if not isinstance(routes, str | list | dict):
            at.refuse(f"should be a string, a list or an object, not {type_name(routes)}")
        before = None
        if isinstance(routes, list):
            before = nested(prompt, place.at("prompt_routed_experts")) if prompt else None
            generated = nested(routes, at, before)
            decoded = at.decoded(generated if before is None else np.concatenate([before, generated]))
        else:
            decoded = decode_routes(routes, at, options)
        decoded = _with_tokens(decoded, document, choice, len(choices) == 1)
        start = member(routes, "start")
        if start and start != decoded.omitted_rows:
            problem = "earlier rows are in other responses, which foremoe.recorders joins"
            at.at("start").refuse(f"is token {start!r:.20}: {problem}")
        if isinstance(routes, list) and prompt is not None:
            decoded = decoded._replace(prompt_length=len(prompt))
        return decoded._replace(weight_versions=versions_of(choice, document, of_choice))

    for i, choice in enumerate(choices):
        yield attempt(functools.partial(read, choice, place if key is None else place.at(f"{key}[{i}]")))


def _with_tokens(decoded: Decoded, document: dict[str, Any], choice: Any, only_choice: bool) -> Decoded:
    """Adds what the response says about its tokens. The prompt in its usage is that of all choices."""
    message, info, usage = member(choice, "message"), member(choice, "meta_info"), document.get("usage")
    routes = member(choice, "routed_experts")

    def ids(holders: Sequence[Any], names: Sequence[str]) -> tuple[list[Any] | None, str]:
        found = ((member(holder, name), name) for name in names for holder in holders)
        return next(((of, name) for of, name in found if isinstance(of, list)), (None, ""))

    prompt, in_prompt = ids((choice, document, message), PROMPT_IDS)
    generated, in_generated = ids((choice, message), GENERATED_IDS)
    whole, in_whole = ids((choice,), ("tokens",))
    counts = []
    if prompt is not None and generated is not None:
        counts.append((len(prompt) + len(generated), f"{in_prompt} and {in_generated}"))
    if whole is not None and all(type(token) is int for token in whole):
        counts.append((len(whole), in_whole))
    prompt_length = -1 if prompt is None else len(prompt)
    for holder, name in ((choice, "counts"), (info, "meta_info"), (usage if only_choice else None, "usage")):
        numbers = [member(holder, of) for of in ("prompt_tokens", "completion_tokens")]
        if all(type(number) is int and 0 <= number < 2**53 for number in numbers):
            counts.append((sum(numbers), name))
            prompt_length = numbers[0] if prompt_length < 0 else prompt_length
    details = member(usage, "prompt_tokens_details")
    cached = [member(holder, name) for holder in (choice, info, details, usage) for name in CACHED]
    decoded = with_counts(decoded, counts, [member(routes, "start"), *cached])
    key = prompt_key(prompt, document.get("prompt") or document.get("messages"), document.get("group_id"))
    return decoded._replace(prompt=key, prompt_length=prompt_length)


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

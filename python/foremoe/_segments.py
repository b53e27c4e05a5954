"""Segments of sequences, extracted from responses of vLLM and SGLang. See foremoe.recorders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._decoding import SourcePlace, member, parse_json, versions_of
from ._errors import refuse


@dataclass(frozen=True, eq=False)
class Segment:
    """The part of a sequence that one request returned. from_vllm() and from_sglang() create it.

    Raises InputError if attributes contradict each other.

    Attributes:
        routed_experts: As the server returned it: base64 text, an object of SkyRL or prime-rl, nested lists, integers
            [rows, layers, top_k], or None.
        num_tokens: Tokens of prompt and generation. None: unknown, and assumed to be one more than the rows.
        num_prompt_tokens: Tokens of the prompt. None: unknown.
        token_ids: Prompt and generation, int64 [num_tokens]. None: unknown.
        start: First token whose row was requested.
        weight_versions: Distinct labels of the weights that generated the tokens, in order. Empty: unknown.
    """

    routed_experts: Any
    num_tokens: int | None = None
    num_prompt_tokens: int | None = None
    token_ids: npt.NDArray[np.int64] | None = None
    start: int = 0
    weight_versions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("num_tokens", 1), ("num_prompt_tokens", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | np.integer) or value < least):
                refuse(name, f"is {value!r}; expected an integer from {least} on")
        if self.token_ids is not None and len(self.token_ids) != self.num_tokens:
            refuse("token_ids", f"has {len(self.token_ids)} entries, but num_tokens is {self.num_tokens}")
        if self.num_tokens is None:
            if self.start > 0:
                refuse("start", f"is token {self.start}, but the response does not tell its number of tokens")
            return
        prompt = self.num_tokens if self.num_prompt_tokens is None else self.num_prompt_tokens
        if prompt > self.num_tokens:
            refuse("num_prompt_tokens", f"is {prompt}, but there are {self.num_tokens} tokens")
        if self.start > prompt:
            refuse("start", f"is token {self.start}, but the prompt has {prompt}")


def from_vllm(response: Any, *, prompt_start: int = 0, prompt_token_ids: Sequence[int] | None = None) -> list[Segment]:
    """Returns a segment for each completion of a response of vLLM 0.22 to 0.33, or of a server like it, in order.

    These are SkyRL, prime-rl and LLM.generate() of TensorRT-LLM, which records only layers with experts
    (NVIDIA/TensorRT-LLM, 06a976c: executor/result.py).

    Request return_token_ids and return_weight_versions. Without the first, only the number of tokens is known, and only
    for a single choice. Without the second, versions are unknown.

    Args:
        response: A RequestOutput of LLM.generate(); the body of /v1/completions, /v1/chat/completions or
            /inference/v1/generate as bytes, text or dict; an object of the openai client; or a list of these.
        prompt_start: routed_experts_prompt_start of the request. Responses of prime-rl contain it; 0: unknown or 0.
        prompt_token_ids: Token ids of the prompt, if the response does not have them.

    Raises:
        InputError: for any other response.
    """
    segments = []
    for whole in _responses(response):
        key = "outputs" if member(whole, "choices") is None else "choices"
        choices = _list_in(whole, key)
        if choices is None:
            _refuse_error(whole)
            refuse("response", "has neither choices nor outputs")
        if member(whole, "prompt_routed_experts") is not None:
            refuse("prompt_routed_experts", "comes from vLLM before 0.22: read its files with foremoe.import_files()")
        for i, choice in enumerate(choices):
            place = f"{key}[{i}]."
            routes = member(choice, "routed_experts")
            start = routes.get("start", prompt_start) if isinstance(routes, Mapping) else prompt_start
            if prompt_start not in (0, start):
                refuse("prompt_start", f"is {prompt_start}, but the rows of {place[:-1]} start at token {start!r:.20}")
            segments.append(
                _segment(
                    place,
                    routes,
                    prompt=[member(choice, "prompt_token_ids"), member(whole, "prompt_token_ids"), prompt_token_ids],
                    generated=member(choice, "token_ids"),
                    counts=member(whole, "usage") if len(choices) == 1 else None,
                    start=start,
                    weight_versions=versions_of(choice, whole, SourcePlace("", place[:-1])),
                )
            )
    return segments


def from_sglang(response: Any, *, start_len: int = 0, prompt_token_ids: Sequence[int] | None = None) -> list[Segment]:
    """Returns a segment for each completion of a response of SGLang, in order.

    Request return_routed_experts. OpenAI-compatible endpoints return the routes of the first choice only, except chat
    completions with return_meta_info. Such a response with several choices is refused.

    Args:
        response: The body of /generate, /v1/completions or /v1/chat/completions as bytes, text or dict; an object of
            Engine.generate() or of the openai client; or a list of these.
        start_len: routed_experts_start_len of the request.
        prompt_token_ids: Token ids of the prompt, if the response does not have them.

    Raises:
        InputError: for any other response.
    """
    segments = []
    for whole in _responses(response):
        choices = _list_in(whole, "choices")
        if choices is None and member(whole, "meta_info") is None:
            _refuse_error(whole)
            refuse("response", "has neither meta_info nor choices")
        shared = member(member(whole, "sglext"), "routed_experts")  # of the response, beside its choices
        if shared is not None and choices is not None and len(choices) > 1:
            refuse(
                "sglext.routed_experts", "belongs to the first of several choices: ask for one, or for return_meta_info"
            )
        for i, choice in enumerate([whole] if choices is None else choices):
            place = "" if choices is None else f"choices[{i}]."
            info = member(choice, "meta_info")
            routes = member(member(choice, "sgl_ext") if info is None else info, "routed_experts")
            only_usage = info is None and choices is not None and len(choices) == 1
            segments.append(
                _segment(
                    place,
                    shared if routes is None else routes,
                    prompt=[member(choice, "prompt_token_ids"), member(whole, "prompt_token_ids"), prompt_token_ids],
                    generated=member(choice, "output_ids" if choices is None else "token_ids"),
                    counts=member(whole, "usage") if only_usage else info,
                    start=start_len,
                    weight_versions=versions_of(choice, whole, SourcePlace("", place[:-1])),
                )
            )
    return segments


def _responses(response: Any) -> list[Any]:
    if isinstance(response, str | bytes | bytearray):
        body = response.encode("utf-8", "surrogatepass") if isinstance(response, str) else bytes(response)
        response = parse_json(body, SourcePlace("", "response"))
    return response if isinstance(response, list) else [response]


def _refuse_error(response: Any) -> None:
    """Raises InputError if a server answered with an error."""
    error = member(response, "error")
    if error is not None:
        refuse("response", f"is an error: {member(error, 'message') or error!s:.200}")


def _list_in(holder: Any, key: str) -> list[Any] | None:
    value = member(holder, key)
    if value is not None and not isinstance(value, list | tuple):
        refuse(key, f"is a {type(value).__name__}; expected a list")
    return value if value is None else list(value)


def _ids(value: Any, field: str) -> npt.NDArray[np.int64] | None:
    if value is None:
        return None
    ids = np.asarray(value)
    if ids.ndim != 1 or (len(ids) > 0 and ids.dtype.kind not in "iu"):
        refuse(field, "should be a list of token ids")
    return ids.astype(np.int64)


def _segment(
    place: str,
    routed_experts: Any,
    *,
    prompt: Sequence[Any],
    generated: Any,
    counts: Any,
    start: int,
    weight_versions: tuple[str, ...],
) -> Segment:
    """Returns the segment of a completion.

    Args:
        place: Place of the completion in the response, for errors.
        routed_experts: Its routes.
        prompt: Token ids of the prompt from each place that may have them.
        generated: Token ids of the completion.
        counts: Object with prompt_tokens and completion_tokens, used if token ids are unknown.
        start: First token whose row was requested.
        weight_versions: See Segment.
    """
    known = [ids for ids in (_ids(value, f"{place}prompt_token_ids") for value in prompt) if ids is not None]
    if any(not np.array_equal(ids, known[0]) for ids in known):
        refuse("prompt_token_ids", f"are not those of {place.rstrip('.') or 'the response'}")
    new = _ids(generated, f"{place}token_ids")
    num_prompt = len(known[0]) if known else member(counts, "prompt_tokens")
    num_new = len(new) if new is not None else member(counts, "completion_tokens")
    for name, count in (("prompt_tokens", num_prompt), ("completion_tokens", num_new)):
        if count is not None and not isinstance(count, int):
            refuse(f"{place}{name}", f"is {count!r}; expected an integer")
    return Segment(
        routed_experts,
        num_tokens=None if num_prompt is None or num_new is None else num_prompt + num_new,
        num_prompt_tokens=num_prompt,
        token_ids=np.concatenate([known[0], new]) if known and new is not None else None,
        start=start,
        weight_versions=weight_versions,
    )

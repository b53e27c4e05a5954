"""Decodes routes in formats of Python programs, for foremoe.import_files() and foremoe.recorders.

npz         zip of .npy members, one sequence each, in archive order; all members if none is named routed_experts…
npy-base64  base64 of .npy, one sequence per line
nrlre1      NeMo-RL's envelope, "nrlre1:<dtype>:<tokens>x<layers>x<top_k>:<base64 of the C-ordered array>", one per line
sglang      int32 without a header, raw (one sequence) or one base64 per line. Layers without experts and tokens without
            routes contain zeros. Repeated ids mark a row as missing
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

import base64
import binascii
import functools
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from . import _core
from ._errors import refuse

NPY = b"\x93NUMPY"
DTYPES = {name: np.dtype(name) for name in ("int8", "int16", "int32", "uint8", "uint16")}
NORMAL_FLOAT_BITS = (0x00800000, 0x7F7FFFFF)  # of positive float32; as an id, even the smallest is impossible
MOST_DEFLATION = 100  # ratio; int64 ids of 128 experts deflate to a ninth
FREE_BYTES = 64 << 20  # archives up to this size may exceed the ratio
READ_BYTES = 1 << 20  # per read; reading stops early if a member is larger than its claimed size


class Decoded(NamedTuple):
    """One sequence, as passed to _core."""

    file: str
    field: str
    place: str  # index in the field
    content: bytes | npt.NDArray[Any]  # an .npy file, or integers [tokens, layers, top_k]
    prompt_length: int = -1  # tokens; −1: unknown
    num_tokens: int | None = None  # claimed by the response


class SourcePlace(NamedTuple):
    """Position in a source, for messages."""

    file: str
    field: str

    def at(self, key: str) -> SourcePlace:
        return SourcePlace(self.file, f"{self.field}: {key}" if self.field else key)

    def refuse(self, problem: str, index: str = "") -> NoReturn:
        refuse(self.field, problem, file=self.file, index=index)

    def decoded(self, content: bytes | npt.NDArray[Any], **facts: Any) -> Decoded:
        return Decoded(self.file, self.field, "", content, **facts)


def decoder(options: Mapping[str, Any]) -> Callable[[str, str, bytes], list[Decoded]]:
    """Returns a decoder of (format, name, bytes of a source). options: layers and top_k of headerless arrays."""

    def decode(format: str, file: str, data: bytes) -> list[Decoded]:
        if format == "npz":
            return list(_members(file, data))
        if format == "json":
            return list(_responses(file, data, options))
        read: dict[str, Callable[[bytes, SourcePlace], bytes | npt.NDArray[Any]]] = {
            "npy-base64": _base64,
            "nrlre1": _nrlre1,
            "sglang": lambda text, place: _int32(_base64(text, place), place, options),
        }
        if format == "sglang" and not _is_base64(data.split(b"\n", 1)[0].strip()):
            place = SourcePlace(file, "routed_experts")
            return [place.decoded(_int32(data, place, options))]
        return [place.decoded(read[format](line, place)) for line, place in _lines(file, data)]

    return decode


def decode_routes(value: Any, place: SourcePlace, options: Mapping[str, Any]) -> Decoded:
    """Decodes the value of routed_experts in a response: text, object, nested lists, or an array of integers."""
    if isinstance(value, str | bytes):
        text = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        if text.startswith(NPY):
            return place.decoded(text)
        if text.startswith(b"nrlre1:"):
            return place.decoded(_nrlre1(text, place))
        if text.startswith(b"["):
            return decode_routes(parse_json(text, place), place, options)
        data = _base64(text, place)
        return place.decoded(data if data.startswith(NPY) else _int32(data, place, options))
    if isinstance(value, Mapping):
        return place.decoded(_described(value, place))
    if isinstance(value, list | tuple):
        return place.decoded(_nested(value, place))
    array = np.asarray(value)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        place.refuse(f"is {array.dtype} {list(array.shape)}; expected integers [rows, layers, top_k]")
    return place.decoded(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))))


def parse_json(text: bytes, place: SourcePlace) -> Any:
    """Parses one JSON document. Raises InputError if it is malformed or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        place.refuse("nests too deeply")
    except ValueError as error:
        place.refuse(f"is not JSON: {error}")


def _lines(file: str, data: bytes) -> Iterator[tuple[bytes, SourcePlace]]:
    """Yields non-blank lines with their places; line numbers start at 1."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield line.strip(), SourcePlace(file, f"line {number}")


def _is_base64(text: bytes) -> bool:
    try:
        return bool(text) and len(base64.b64decode(text, validate=True)) > 0
    except binascii.Error:
        return False


def _base64(text: bytes, place: SourcePlace) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        place.refuse(f"is not base64: {error}")


def _expect_bytes(data: bytes, shape: Sequence[int], dtype: np.dtype[Any], place: SourcePlace) -> npt.NDArray[Any]:
    count = int(np.prod([int(n) for n in shape], dtype=object)) * dtype.itemsize
    if shape[0] > 0 and count != len(data):
        place.refuse(f"{list(shape)} of {dtype.itemsize} bytes each was claimed, but there are {len(data)} bytes")
    if shape[0] == 0:
        place.refuse("has no tokens")
    return np.frombuffer(data, dtype).reshape(shape)


def _nrlre1(text: bytes, place: SourcePlace) -> npt.NDArray[Any]:
    parts = text.decode("latin-1").split(":", 3)
    if len(parts) < 4:
        place.refuse("should be nrlre1:<dtype>:<shape>:<base64>")
    magic, name, extents, payload = parts
    if magic != "nrlre1":
        place.refuse(f'begins with "{magic[:16]}", not nrlre1')
    dtype = _dtype(name, place)
    shape = [int(n) if n.isascii() and n.isdigit() and len(n) < 20 else -1 for n in extents.split("x")]
    if len(shape) != 3 or min(shape) < 0:
        place.refuse("shape should be <tokens>x<layers>x<top_k>")
    return _expect_bytes(_base64(payload.encode("latin-1"), place), shape, dtype, place)


def _dtype(name: Any, place: SourcePlace) -> np.dtype[Any]:
    if not isinstance(name, str) or name not in DTYPES:
        place.refuse(f'dtype "{name!s:.16}" is unknown; expected int8, int16, int32, uint8 or uint16')
    return DTYPES[name]


def _described(value: Mapping[str, Any], place: SourcePlace) -> npt.NDArray[Any]:
    """Converts an object of SkyRL or prime-rl: base64 of a C-ordered array with its shape and dtype."""
    text, shape = value.get("data"), value.get("shape")
    if not isinstance(text, str):
        place.at("data").refuse(f"should be a string, not {_name(text)}")
    if not isinstance(shape, list) or len(shape) != 3 or not all(type(n) is int and n >= 0 for n in shape):
        place.at("shape").refuse(f"should be [tokens, layers, top_k], not {shape!r:.40}")
    dtype = _dtype(value.get("dtype", "uint8"), place)  # prime-rl's older objects have none
    data = _base64(text.encode("utf-8", "surrogatepass"), place.at("data"))
    array = _expect_bytes(data, shape, dtype, place)
    return _without_weights(array, place) if "start" in value and dtype == np.int32 else array


def _without_weights(packed: npt.NDArray[Any], place: SourcePlace) -> npt.NDArray[Any]:
    """Returns the ids of [tokens, layers, ids and bits of weights]."""
    if packed.shape[2] % 2:
        place.refuse(f"has rows of {packed.shape[2]} int32; expected as many routing weights as experts")
    ids, bits = np.split(packed, 2, axis=2)
    least, most = NORMAL_FLOAT_BITS
    for token, layer, k in np.argwhere((bits != 0) & ((bits < least) | (bits > most)))[:1]:
        index = f"[{token}, {layer}, {ids.shape[2] + k}]"
        place.refuse(f"{bits[token, layer, k]} are no bits of a routing weight", index)
    return np.ascontiguousarray(ids)


def _int32(data: bytes, place: SourcePlace, options: Mapping[str, Any]) -> npt.NDArray[Any]:
    layers, top_k = (int(options.get(name) or 0) for name in ("layers", "top_k"))
    if layers < 1 or top_k < 1:
        place.refuse("is a flat array of int32 without a header: give its `layers` and `top_k`")
    if len(data) % (4 * layers * top_k) != 0:
        place.refuse(f"{len(data)} bytes are no whole number of tokens of {layers} layers × {top_k} experts in int32")
    return _expect_bytes(data, [len(data) // (4 * layers * top_k), layers, top_k], np.dtype(np.int32), place)


def _nested(rows: Sequence[Any], place: SourcePlace, like: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
    """Converts nested lists [tokens][layers][top_k]. like: Preceding rows, with the same layers and top_k."""
    if not rows and like is not None:
        return like[:0]
    if not rows:
        place.refuse("is empty")
    if like is None:
        for index, holder in (("[0]", rows[0]), ("[0, 0]", _first(rows[0]))):
            if not isinstance(holder, list | tuple):
                place.refuse(f"should be a list, not {_name(holder)}", index)
            if not holder:
                place.refuse("is empty", index)
    layers, top_k = (len(rows[0]), len(rows[0][0])) if like is None else like.shape[1:]
    for t, token in enumerate(rows):
        if not isinstance(token, list | tuple):
            place.refuse(f"should be a list, not {_name(token)}", f"[{t}]")
        if len(token) != layers:
            place.refuse(f"has {len(token)} layers instead of {layers}", f"[{t}]")
        for layer, row in enumerate(token):
            if not isinstance(row, list | tuple) or len(row) != top_k:
                place.refuse(f"should be a list of {top_k} experts", f"[{t}, {layer}]")
            for k, entry in enumerate(row):
                if not isinstance(entry, int | np.integer) or isinstance(entry, bool) or abs(int(entry)) >= 2**63:
                    place.refuse(f"should be an integer of 64 bits, not {entry!r:.40}", f"[{t}, {layer}, {k}]")
    return np.array(rows, np.int64)


def _first(holder: Any) -> Any:
    return holder[0] if isinstance(holder, list | tuple) and holder else holder


def _members(file: str, data: bytes) -> Iterator[Decoded]:
    place = SourcePlace(file, "")
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, UnicodeDecodeError) as error:
        place.refuse(f"is no readable zip archive: {error}")
    infos = archive.infolist()
    members = [info for info in infos if info.filename.startswith("routed_experts")] or infos
    size, compressed = sum(info.file_size for info in members), sum(info.compress_size for info in members)
    if compressed > len(data):
        place.refuse(f"claims {compressed} bytes of members, and has {len(data)}")
    if size > FREE_BYTES and size > MOST_DEFLATION * compressed:
        place.refuse(
            f"claims {size} bytes deflated to {compressed}, more than {MOST_DEFLATION} to one, which routes never are; "
            "if it is right, unpack it and import its .npy files"
        )
    for info in members:
        at = SourcePlace(file, info.filename)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others have no bound on inflation
            at.refuse("is neither stored nor deflated")
        try:
            with archive.open(info) as data_of_member:
                yield at.decoded(b"".join(iter(functools.partial(data_of_member.read, READ_BYTES), b"")))
        except (
            zipfile.BadZipFile,
            zlib.error,
            ValueError,
            OSError,
            EOFError,
            NotImplementedError,
            RuntimeError,
        ) as error:
            at.refuse(f"is damaged: {error}")


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
        place.refuse(f"should be an object, not {_name(document)}")
    prompt = document.get("prompt_routed_experts")
    if prompt is not None and not isinstance(prompt, list):
        place.at("prompt_routed_experts").refuse(f"should be a list, not {_name(prompt)}")
    key = next((key for key in ("choices", "outputs") if document.get(key) is not None), None)
    choices = [document] if key is None else document[key]
    if not isinstance(choices, list):
        place.at(str(key)).refuse(f"should be a list, not {_name(choices)}")
    shared = member(document.get("sglext"), "routed_experts") if key else None  # routes beside the choices
    if shared is not None and len(choices) > 1:
        place.at("sglext.routed_experts").refuse(f"is of the first of {len(choices)} choices alone")
    for i, choice in enumerate(choices):
        at = (place if key is None else place.at(f"{key}[{i}]")).at("routed_experts")
        holders = (choice, member(choice, "meta_info"), member(choice, "sgl_ext"))
        routes = next((r for holder in holders if (r := member(holder, "routed_experts")) is not None), shared)
        if routes is None:
            at.refuse("is missing")
        if not isinstance(routes, str | list | dict):
            at.refuse(f"should be a string, a list or an object, not {_name(routes)}")
        if start := member(routes, "start"):
            problem = "earlier rows are in other responses, which foremoe.recorders joins"
            at.at("start").refuse(f"is token {start!r:.20}: {problem}")
        if isinstance(routes, list):
            before = _nested(prompt, place.at("prompt_routed_experts")) if prompt else None
            generated = _nested(routes, at, before)
            decoded = at.decoded(generated if before is None else np.concatenate([before, generated]))
            decoded = decoded._replace(prompt_length=-1 if prompt is None else len(prompt))
        else:
            decoded = decode_routes(routes, at, options)
        yield decoded._replace(num_tokens=_num_tokens(document, choice, len(choices) == 1))


def _num_tokens(document: dict[str, Any], choice: Any, only_choice: bool) -> int | None:
    """Returns the number of prompt and generated tokens, if the response contains it."""
    prompt = member(choice, "prompt_token_ids") or document.get("prompt_token_ids")
    generated = member(choice, "token_ids")
    if isinstance(prompt, list) and isinstance(generated, list):
        return len(prompt) + len(generated)
    counts = [member(document.get("usage"), name) for name in ("prompt_tokens", "completion_tokens")]
    known = only_choice and all(type(count) is int and 0 <= count < 2**53 for count in counts)
    return sum(counts) if known else None


def member(holder: Any, key: str) -> Any:
    """Returns a member of a JSON object; None if it is absent or the holder is not an object."""
    return holder.get(key) if isinstance(holder, dict) else None


def _name(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", str: "string", dict: "object", list: "array", int: "number"}
    return names.get(type(value), "number" if isinstance(value, float) else type(value).__name__)


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

"""Decodes values of routed_experts and archives of them, for all formats of foremoe.import_files()."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from . import _core
from ._errors import InputError, refuse

NPY = b"\x93NUMPY"
DTYPES = {name: np.dtype(name) for name in ("int8", "int16", "int32", "uint8", "uint16")}
NORMAL_FLOAT_BITS = (0x00800000, 0x7F7FFFFF)  # of positive float32; as an id, even the smallest is impossible
MOST_DEFLATION = 100  # ratio; int64 ids of 128 experts deflate to a ninth
FREE_BYTES = 64 << 20  # archives up to this size may exceed the ratio
LIST_BYTES, REFERENCE_BYTES = 56, 8  # least memory of a list or an object in Python, and of a value in it
READ_BYTES = 1 << 20  # per read; reading stops early if a member is larger than its claimed size


class Decoded(NamedTuple):
    """One sequence, as passed to _core."""

    file: str
    field: str
    place: str  # index in the field
    content: bytes | npt.NDArray[Any]  # an .npy file, or integers [tokens, layers, top_k]
    prompt_length: int = -1  # tokens; −1: unknown
    num_tokens: int | None = None  # claimed by the response
    weight_versions: tuple[str, ...] = ()  # those that generated it, as the response says
    counted_in: str = ""  # where num_tokens is from
    omitted_rows: int = 0  # rows of first tokens that may have been omitted, as the response says
    prompt: str = ""  # equal if prompts are; "": unknown
    problem: str = ""  # why the sample cannot be read; "": it can
    forward_pass: int | None = None  # counts of one pass are added


def attempt(decode: Callable[[], Decoded]) -> Decoded:
    """Returns what decode() returns, or a sample that cannot be read."""
    try:
        return decode()
    except InputError as error:
        return unreadable(error)


def unreadable(error: InputError) -> Decoded:
    return Decoded(error.file, error.field, error.index, b"", problem=error.problem)


def with_counts(decoded: Decoded, counts: Sequence[tuple[int, str]], omitted: Sequence[Any] = ()) -> Decoded:
    """Adds the number of tokens. counts: From each source, with its name. omitted: Numbers of first tokens without row.

    If sources differ, the first that explains the rows counts: token ids of pictures, for example, may be fewer.
    """
    counts = [(tokens, name) for tokens, name in counts if 0 < tokens < 2**53]
    if not counts:
        return decoded
    rows = _num_rows(decoded.content)
    lacks = [0, *(n for n in omitted if type(n) is int and n > 0)]
    fitting = [(tokens, n) for tokens, _ in counts for n in lacks if rows is not None and tokens - rows - n in (0, 1)]
    tokens, lack = fitting[0] if fitting else (counts[0][0], 0)
    names = ", ".join(name for of, name in counts if of == tokens)
    return decoded._replace(num_tokens=tokens, counted_in=names, omitted_rows=lack)


def _num_rows(content: bytes | npt.NDArray[Any]) -> int | None:
    if not isinstance(content, bytes):
        return len(content)
    file = io.BytesIO(content)
    try:
        first = np.lib.format.read_magic(file) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        return int(read(file)[0][0])
    except Exception:  # numpy raises any exception for a damaged header
        return None  # the importer names the problem


def prompt_key(tokens: Any, text: Any, group: Any) -> str:
    """Returns a text that is equal for samples of the same prompt, from the first that is known."""
    known = [(name, of) for name, of in (("tokens", tokens), ("text", text), ("group", group)) if of not in (None, [])]
    return hashlib.sha256(repr(known[0]).encode("utf-8", "replace")).hexdigest() if known else ""


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


def decode_routes(value: Any, place: SourcePlace, options: Mapping[str, Any]) -> Decoded:
    """Decodes the value of routed_experts in a response: text, object, nested lists, or an array of integers."""
    if isinstance(value, str | bytes):
        text = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        if text.startswith(NPY):
            return place.decoded(text)
        if text.startswith(b"nrlre1:"):
            return place.decoded(nrlre1(text, place))
        if text.startswith(b"["):
            return decode_routes(parse_json(text, place), place, options)
        data = base64_bytes(text, place)
        return place.decoded(data if data.startswith(NPY) else int32(data, place, options))
    if isinstance(value, Mapping):
        return place.decoded(_described(value, place))
    if isinstance(value, list | tuple):
        return place.decoded(nested(value, place))
    array = np.asarray(value)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        place.refuse(f"is {array.dtype} {list(array.shape)}; expected integers [rows, layers, top_k]")
    return place.decoded(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))))


def expect_memory_of_json(text: bytes, file: str) -> None:
    """Raises InputError if the document needs more memory in Python than is available."""
    lists, values = text.count(b"[") + text.count(b"{"), text.count(b",")
    _core._expect_memory(LIST_BYTES * lists + REFERENCE_BYTES * values, file)


def parse_json(text: bytes, place: SourcePlace) -> Any:
    """Parses one JSON document. Raises InputError if it is malformed, nested too deeply or too large."""
    expect_memory_of_json(text, place.file)
    try:
        return json.loads(text)
    except RecursionError:
        place.refuse("nests too deeply")
    except ValueError as error:
        place.refuse(f"is not JSON: {error}")


def is_base64(text: bytes) -> bool:
    try:
        return bool(text) and len(base64.b64decode(text, validate=True)) > 0
    except binascii.Error:
        return False


def base64_bytes(text: bytes, place: SourcePlace) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        place.refuse(f"is not base64: {error}")


def expect_bytes(data: bytes, shape: Sequence[int], dtype: np.dtype[Any], place: SourcePlace) -> npt.NDArray[Any]:
    count = int(np.prod([int(n) for n in shape], dtype=object)) * dtype.itemsize
    if shape[0] > 0 and count != len(data):
        place.refuse(f"{list(shape)} of {dtype.itemsize} bytes each was claimed, but there are {len(data)} bytes")
    if shape[0] == 0:
        place.refuse("has no tokens")
    return np.frombuffer(data, dtype).reshape(shape)


def nrlre1(text: bytes, place: SourcePlace) -> npt.NDArray[Any]:
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
    return expect_bytes(base64_bytes(payload.encode("latin-1"), place), shape, dtype, place)


def _dtype(name: Any, place: SourcePlace) -> np.dtype[Any]:
    if not isinstance(name, str) or name not in DTYPES:
        place.refuse(f'dtype "{name!s:.16}" is unknown; expected int8, int16, int32, uint8 or uint16')
    return DTYPES[name]


def _described(value: Mapping[str, Any], place: SourcePlace) -> npt.NDArray[Any]:
    """Converts an object of SkyRL or prime-rl: base64 of a C-ordered array with its shape and dtype."""
    text, shape = value.get("data"), value.get("shape")
    if not isinstance(text, str):
        place.at("data").refuse(f"should be a string, not {type_name(text)}")
    if not isinstance(shape, list) or len(shape) != 3 or not all(type(n) is int and n >= 0 for n in shape):
        place.at("shape").refuse(f"should be [tokens, layers, top_k], not {shape!r:.40}")
    dtype = _dtype(value.get("dtype", "uint8"), place)  # prime-rl's older objects have none
    data = base64_bytes(text.encode("utf-8", "surrogatepass"), place.at("data"))
    array = expect_bytes(data, shape, dtype, place)
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


def int32(data: bytes, place: SourcePlace, options: Mapping[str, Any]) -> npt.NDArray[Any]:
    layers, top_k = (int(options.get(name) or 0) for name in ("layers", "top_k"))
    if layers < 1 or top_k < 1:
        place.refuse("is a flat array of int32 without a header: give its `layers` and `top_k`")
    if len(data) % (4 * layers * top_k) != 0:
        place.refuse(f"{len(data)} bytes are no whole number of tokens of {layers} layers × {top_k} experts in int32")
    return expect_bytes(data, [len(data) // (4 * layers * top_k), layers, top_k], np.dtype(np.int32), place)


def nested(rows: Sequence[Any], place: SourcePlace, like: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
    """Converts nested lists [tokens][layers][top_k]. like: Preceding rows, with the same layers and top_k."""
    if not rows and like is not None:
        return like[:0]
    if not rows:
        place.refuse("is empty")
    if like is None:
        for index, holder in (("[0]", rows[0]), ("[0, 0]", _first(rows[0]))):
            if not isinstance(holder, list | tuple):
                place.refuse(f"should be a list, not {type_name(holder)}", index)
            if not holder:
                place.refuse("is empty", index)
    layers, top_k = (len(rows[0]), len(rows[0][0])) if like is None else like.shape[1:]
    for t, token in enumerate(rows):
        if not isinstance(token, list | tuple):
            place.refuse(f"should be a list, not {type_name(token)}", f"[{t}]")
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


def read_members(file: str, data: bytes, prefix: str = "") -> Iterator[tuple[SourcePlace, bytes]]:
    """Yields members of a zip archive in order: those whose names begin with prefix, or all if there are none.

    Raises InputError if the archive is damaged, or inflates more than routes can.
    """
    place = SourcePlace(file, "")
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, UnicodeDecodeError) as error:
        place.refuse(f"is no readable zip archive: {error}")
    infos = archive.infolist()
    members = [info for info in infos if info.filename.startswith(prefix)] or infos
    size, compressed = sum(info.file_size for info in members), sum(info.compress_size for info in members)
    if compressed > len(data):
        place.refuse(f"claims {compressed} bytes of members, and has {len(data)}")
    if size > FREE_BYTES and size > MOST_DEFLATION * compressed:
        place.refuse(
            f"claims {size} bytes deflated to {compressed}, more than {MOST_DEFLATION} to one, which routes never are; "
            "if it is right, unpack it and import its .npy files"
        )
    _core._expect_memory(size, file)
    for info in members:
        at = SourcePlace(file, info.filename)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others have no bound on inflation
            at.refuse("is neither stored nor deflated")
        try:
            with archive.open(info) as data_of_member:
                content = b"".join(iter(functools.partial(data_of_member.read, READ_BYTES), b""))
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
        yield at, content


def member(holder: Any, key: str) -> Any:
    """Returns a member of a JSON object, or an attribute of a client's object; None if absent."""
    return holder.get(key) if isinstance(holder, Mapping) else getattr(holder, key, None)


def distinct_labels(versions: Sequence[Any]) -> tuple[str, ...]:
    """Returns the distinct weight versions in order, as text that UTF-8 can encode."""
    return tuple(dict.fromkeys(str(version).encode("utf-8", "replace").decode() for version in versions))


def versions_of(choice: Any, response: Any, place: SourcePlace) -> tuple[str, ...]:
    """Returns the distinct weight versions that generated a completion. place: Of the completion."""
    holders = choice, member(choice, "meta_info"), member(response, "metadata")
    return next((found for holder in holders if (found := _versions_in(holder, place))), ())


def _versions_in(holder: Any, place: SourcePlace) -> tuple[str, ...]:
    """Returns the versions of spans or labels, or of the only label."""
    spans = member(holder, "weight_versions")
    if not spans:
        single = member(holder, "weight_version")
        return () if single is None else distinct_labels([single])
    place = place.at("weight_versions")
    if not isinstance(spans, list | tuple):
        place.refuse(f"should be a list, not {type_name(spans)}")
    versions = [span if isinstance(span, str | int) else member(span, "version") for span in spans]
    if None in versions:
        place.refuse("has no version", index=f"[{versions.index(None)}]")
    return distinct_labels(versions)


def type_name(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", str: "string", dict: "object", list: "array", int: "number"}
    return names.get(type(value), "number" if isinstance(value, float) else type(value).__name__)

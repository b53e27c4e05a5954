"""Decodes rollouts that slime and miles save with --save-debug-rollout-data, for foremoe.import_files().

The file is torch.save() of {"samples": [{"rollout_routed_experts": [tokens − 1, layers, top_k], "tokens", …}, …]}.
Routes are arrays of numpy, tensors or nested lists. torch is not needed. No class in the file is imported, so that a
file cannot run code: routes are read from what their pickles contain, and other objects are skipped. Time and memory
are bounded by the bytes of the file: see MOST_SHARED and DEEPEST.

Written from THUDM/slime 624b824 (slime/observability/rollout_data_utils.py, slime/utils/types.py) and radixark/miles
31f1ca9 (miles/ray/rollout/debug_data.py, miles/utils/types.py), whose routes come from SGLang.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ._decoding import (
    Decoded,
    SourcePlace,
    attempt,
    decode_routes,
    distinct_labels,
    expect_bytes,
    member,
    prompt_key,
    read_members,
    with_counts,
)

PICTURES = ("multimodal_train_inputs", "multimodal_inputs")
ARRAY_DTYPES = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
STORAGE_DTYPES = {"Byte": "u1", "Char": "i1", "Short": "i2", "Int": "i4", "Long": "i8"}
STORAGE_DTYPES |= {"Half": "f2", "Float": "f4", "Double": "f8"}
EXPECTED = "expected integers, float16, float32 or float64"
MOST_SHARED = 16  # parts of a list, or bytes of routes, per byte of the file: samples of a group may share objects
DEEPEST = 64  # lists in lists


def _text(value: Any, most: int) -> str:
    """Returns the beginning of a text. Others are refused: shared tuples may have an exponentially long one."""
    if type(value) is not str:
        raise pickle.UnpicklingError(f"has a {type(value).__name__} instead of a name")
    return value[:most]


class _Skipped:
    """Stands for an object of any other class. Its pickle can call, build and fill it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def skip(self, *_: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = skip


class _Dtype:
    """numpy.dtype: its name, then its state with the byte order."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        self.name = f"{_text(state[1], 1)}{_text(self.name, 15)}"


class _Array:
    """numpy.ndarray: its state is (version, shape, dtype, whether the first axis is fastest, bytes)."""

    state: Any = (1, (), None, False, b"")

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Storage(NamedTuple):
    kind: str  # class in torch, such as IntStorage
    key: str  # member of the archive


class _Tensor:
    """torch.Tensor: a part of a storage."""

    def __init__(self, storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> None:
        self.storage, self.offset, self.shape, self.strides = storage, offset, shape, strides


class _Opcodes(dict[int, Any]):
    """Methods of an unpickler by opcode."""

    def __missing__(self, code: int) -> Any:
        raise pickle.UnpicklingError(f"has opcode {code}, which torch.save() does not write for routes")


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler: the one in C allocates as much memory as an opcode names, before reading it."""

    dispatch: ClassVar[dict[int, Any]] = _Opcodes(
        (code, load)
        for code, load in pickle._Unpickler.dispatch.items()
        if bytes([code]) not in (pickle.INT, pickle.LONG, pickle.LONG4, pickle.INST, pickle.OBJ, pickle.PERSID)
        and bytes([code]) not in (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER)
        and bytes([code]) not in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET)
    )

    stack: list[Any]
    append: Any  # to the stack
    pop_mark: Any

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._may_encode = len(data)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.endswith("Storage"):
            return name
        made: Any = {
            ("numpy.core.multiarray", "_reconstruct"): _Array,
            ("numpy._core.multiarray", "_reconstruct"): _Array,
            ("numpy", "dtype"): _Dtype,
            ("_codecs", "encode"): self._encoded,
            ("__builtin__", "bytes"): lambda *_: b"",  # an empty array's
            ("torch._utils", "_rebuild_tensor_v2"): _Tensor,
        }.get((module, name), _Skipped)
        return lambda *arguments: made(*arguments)  # a function of this file alone, whose attributes a pickle can set

    def _set_items(self) -> None:
        items = self.pop_mark()
        self._set(items[::2], items[1::2])

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key], [value])

    def _set(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            if not isinstance(key, str | int | float | bytes | None):  # hashing a tuple hashes all that it shares
                raise pickle.UnpicklingError(f"has a {type(key).__name__} as a key")
            self.stack[-1][key] = value

    dispatch[pickle.SETITEM[0]] = _set_item
    dispatch[pickle.SETITEMS[0]] = _set_items

    def _new(self) -> None:
        arguments = self.stack.pop()
        self.append(self.stack.pop()(*arguments))

    dispatch[pickle.NEWOBJ[0]] = _new

    def _new_ex(self) -> None:
        self.stack.pop()  # keywords
        self._new()

    dispatch[pickle.NEWOBJ_EX[0]] = _new_ex

    def _encoded(self, text: str, encoding: str) -> bytes:
        """Returns bytes, as pickle's protocol 2 writes them."""
        self._may_encode -= len(text)
        if self._may_encode < 0:
            raise pickle.UnpicklingError("has more bytes than were written")
        return text.encode("latin-1") if encoding == "latin1" else b""

    def persistent_load(self, pid: Any) -> Any:
        return _Storage(_text(pid[1], 64), _text(pid[2], 64))


def _parts(value: Any, known: dict[int, int], depth: int = 0) -> int:
    """Returns the number of parts of a container, where a part that occurs twice counts twice. known: By id."""
    if id(value) not in known:
        known[id(value)] = -1
        if depth > DEEPEST:
            raise pickle.UnpicklingError(f"nests deeper than {DEEPEST}")
        items = value.values() if isinstance(value, dict) else value
        inner = [item for item in items if isinstance(item, dict | list | tuple)]
        known[id(value)] = len(value) + sum(_parts(item, known, depth + 1) for item in inner)
    if known[id(value)] < 0:
        raise pickle.UnpicklingError("contains itself")
    return known[id(value)]


class Saved(NamedTuple):
    """What torch.save() wrote. Arrays and tensors in `content` are decoded by array_of()."""

    content: Any
    members: Mapping[str, bytes]
    folder: str

    def array_of(self, value: Any, place: SourcePlace) -> Any:
        """Returns an array or tensor as an array of numpy, and other values as they are."""
        if isinstance(value, _Array):
            return _array(value, place)
        return _tensor(value, self, place) if isinstance(value, _Tensor) else value


def read_saved(file: str, data: bytes) -> Saved:
    """Reads what torch.save() wrote, without running its code. Raises InputError if it is damaged."""
    members = {place.field: content for place, content in read_members(file, data)}
    pickled = next((name for name in members if name.endswith("data.pkl")), None)
    place = SourcePlace(file, "")
    if pickled is None:
        place.refuse("contains no data.pkl, so torch.save() has not written it")
    try:
        content = _Unpickler(members[pickled]).load()
        if _parts([content], {}) > MOST_SHARED * len(members[pickled]):
            raise pickle.UnpicklingError(f"expands to more than {MOST_SHARED} times its size")
    except Exception as error:  # the unpickler raises any exception if a pickle is damaged
        place.at(pickled).refuse(f"is damaged: {error}")
    return Saved(content, members, pickled.removesuffix("data.pkl"))


def read_rollout(file: str, data: bytes, options: Mapping[str, Any]) -> Iterator[Decoded]:
    """Yields the sequences of a rollout. Raises InputError if it has no samples."""
    place = SourcePlace(file, "")
    saved = read_saved(file, data)
    samples = member(saved.content, "samples")
    if not isinstance(samples, list):
        problem = "is no list: slime and miles save rollouts with --save-debug-rollout-data"
        place.at("samples").refuse(f"{problem}. If the file has tokens per expert, give `counts`")

    known: dict[int, int] = {}
    for i, sample in enumerate(samples):
        if isinstance(sample, dict) and known.setdefault(id(sample), i) != i:
            place.at(f"samples[{i}]").refuse(f"is samples[{known[id(sample)]}] again")
    left = MOST_SHARED * sum(map(len, saved.members.values()))

    def read(i: int, sample: Any) -> Decoded:
        nonlocal left
        at = place.at(f"samples[{i}]").at("rollout_routed_experts")
        routes = member(sample, "rollout_routed_experts")
        if routes is None:
            status = member(sample, "status")
            at.refuse(
                f"is missing{f' (status {status!s:.20})' if isinstance(status, str) else ''}: "
                "was the rollout run with --use-rollout-routing-replay?"
            )
        routes = saved.array_of(routes, at)
        if not isinstance(routes, list | np.ndarray):
            at.refuse("is neither an array nor a tensor nor a list")
        left -= routes.nbytes if isinstance(routes, np.ndarray) else 0
        if left < 0:
            at.refuse(f"is shared: the routes have more than {MOST_SHARED} times the bytes of the file")
        return _with_facts(decode_routes(routes, at, options), sample)

    for i, sample in enumerate(samples):
        yield attempt(functools.partial(read, i, sample))


def _array(array: _Array, place: SourcePlace) -> npt.NDArray[Any]:
    state = array.state if isinstance(array.state, tuple) and len(array.state) == 5 else _Array.state
    _, shape, dtype, fortran_order, data = state
    name = _text(getattr(dtype, "name", "none"), 16)
    if name.lstrip("<|") not in ARRAY_DTYPES or not isinstance(data, bytes):
        place.refuse(f"is an array of dtype {name:.16}; {EXPECTED}")
    rows = expect_bytes(data, _extents(shape, place), np.dtype(name), place)
    return rows.ravel().reshape(rows.shape, order="F") if fortran_order else rows


def _tensor(tensor: _Tensor, saved: Saved, place: SourcePlace) -> npt.NDArray[Any]:
    kind, key = tensor.storage if isinstance(tensor.storage, _Storage) else ("none", "")
    name = STORAGE_DTYPES.get(kind.removesuffix("Storage"))
    if name is None:
        place.refuse(f"is a tensor in a {kind:.32}; {EXPECTED}")
    shape, dtype = _extents(tensor.shape, place), np.dtype(name)
    contiguous = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    if tensor.strides != contiguous or type(tensor.offset) is not int or tensor.offset < 0:
        place.refuse(f"is a tensor of strides {reprlib.repr(tensor.strides):.40}; expected a contiguous one")
    data = saved.members.get(f"{saved.folder}data/{key}")
    if data is None:
        place.refuse(f"is in {saved.folder}data/{key:.32}, which the file does not contain")
    begin = tensor.offset * dtype.itemsize
    return expect_bytes(data[begin : begin + math.prod(shape) * dtype.itemsize], shape, dtype, place)


def _extents(shape: Any, place: SourcePlace) -> Sequence[int]:
    if not isinstance(shape, tuple) or len(shape) not in (2, 3) or not all(type(n) is int and n >= 0 for n in shape):
        place.refuse(f"has shape {reprlib.repr(shape):.40}; expected 2 or 3 axes")
    return shape


def _with_facts(decoded: Decoded, sample: Mapping[str, Any]) -> Decoded:
    """Adds weight versions, the lengths of sequence and prompt, and the prompt. Pictures have more rows than tokens."""
    versions = sample.get("weight_versions")
    if isinstance(versions, list):
        decoded = decoded._replace(weight_versions=distinct_labels(versions))
    tokens, response, rows = sample.get("tokens"), sample.get("response_length"), len(decoded.content)
    fits = isinstance(tokens, list) and len(tokens) - rows in (0, 1)
    if not isinstance(tokens, list) or (not fits and any(sample.get(name) for name in PICTURES)):
        return decoded
    prompt = len(tokens) - response if type(response) is int and 0 <= response <= len(tokens) else -1
    decoded = with_counts(decoded, [(len(tokens), "tokens")], [sample.get("cached_tokens")])
    return decoded._replace(
        prompt_length=prompt,
        prompt=prompt_key(tokens[:prompt] if prompt > 0 else None, None, sample.get("group_index")),
    )

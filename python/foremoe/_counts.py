"""Decodes tokens per expert without source ranks, for foremoe.import_files(counts=True) and Load.from_counts().

A file is npy, npz, JSON (one document or one per line) or of torch.save(). It contains an array [steps, layers,
experts] or [layers, experts], or an object that contains one:
    SGLang  logical_count; with modes per_pass and per_token, records[i] with forward_pass_id and
            global_physical_count [layers, slots] or topk_ids_of_layer [layers, tokens, top_k], and
            last_physical_to_logical_map (srt/eplb/expert_distribution.py). Records of one pass are added: each rank has
            one
    vLLM    expert_load_pass [layers, slots], expert_load_window [steps, layers, slots] and physical_to_logical_map of
            distributed/eplb/eplb_state.py; global_expert_load_window [layers, experts]
    EPLB    weight [layers, experts], the argument of DeepSeek's rebalance_experts()
Counts of slots are added to their experts. C++ (counts.cpp) shares the counts among ranks.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ._decoding import NPY, Decoded, SourcePlace, parse_json, read_members, type_name
from ._import_torch import read_saved

Array = npt.NDArray[np.int64]
Read = Callable[[Any, SourcePlace], Any]

OF_EXPERTS = ("logical_count", "global_expert_load_window", "expert_counts", "expert_count", "weight", "counts")
OF_SLOTS = ("global_physical_count", "physical_count", "expert_load_window", "expert_load_pass", "expert_load")
ROUTES = "topk_ids_of_layer"
MAPS = ("physical_to_logical_map", "last_physical_to_logical_map")
MOST = 2**40  # sums over records fit 64 bits


def read_counts(file: str, data: bytes, options: Mapping[str, Any]) -> Iterator[Decoded]:
    """Yields counts, int64 [steps, layers, experts], of a file. options: experts, if known."""
    place = SourcePlace(file, "")
    content: Any
    if data.startswith(b"PK") and b"data.pkl" in data[:256]:
        saved = read_saved(file, data)
        return _decode(saved.content, place, options, saved.array_of)
    if data.startswith(b"PK"):
        content = {at.field.removesuffix(".npy"): _npy(of, at) for at, of in read_members(file, data)}
    else:
        content = _npy(data, place) if data.startswith(NPY) else _json(data, place)
    return _decode(content, place, options)


def decode_counts(counts: Any) -> list[Decoded]:
    """Decodes the argument of Load.from_counts(): an array of numpy or torch, or nested lists."""
    if hasattr(counts, "detach"):
        tensor = counts.detach().cpu()
        counts = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    return list(_decode(np.asarray(counts) if hasattr(counts, "__array__") else counts, SourcePlace("", "counts"), {}))


def _json(data: bytes, place: SourcePlace) -> Any:
    lines = [line for line in data.split(b"\n") if line.strip()]
    if len(lines) > 1 and lines[0].rstrip().endswith((b"}", b"]")):
        return [parse_json(line, place.at(f"line {i + 1}")) for i, line in enumerate(lines)]
    return parse_json(data, place)


def _npy(data: bytes, place: SourcePlace) -> npt.NDArray[Any]:
    try:
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # numpy raises any exception for a damaged header
        place.refuse(f"is no readable .npy array: {error}")


def _decode(
    content: Any, place: SourcePlace, options: Mapping[str, Any], read: Read = lambda value, at: value
) -> Iterator[Decoded]:
    """Yields the counts of an array or dump, or of a list of dumps. read: Returns arrays as those of numpy."""
    if isinstance(content, Mapping) and isinstance(records := content.get("records"), list):
        maps = {key: content[key] for key in MAPS if key in content}
        for i, record in enumerate(records):
            at = place.at(f"records[{i}]")
            yield from _of_dump({**maps, **_object(record, at)}, at, options, read)
    elif isinstance(content, Mapping):
        yield from _of_dump(content, place, options, read)
    elif isinstance(content, list) and content and isinstance(content[0], Mapping):
        for i, dump in enumerate(content):
            yield from _decode(_object(dump, place.at(f"[{i}]")), place.at(f"[{i}]"), options, read)
    else:
        yield place.decoded(_whole(read(content, place), place))


def _object(value: Any, place: SourcePlace) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        place.refuse(f"should be an object, not {type_name(value)}")
    return value


def _of_dump(dump: Mapping[str, Any], place: SourcePlace, options: Mapping[str, Any], read: Read) -> Iterator[Decoded]:
    key = next((key for key in (*OF_EXPERTS, *OF_SLOTS, ROUTES) if dump.get(key) is not None), None)
    if key is None and len(dump) == 1:
        key = next(iter(dump))
    if key is None:
        known = ", ".join((*OF_EXPERTS, *OF_SLOTS))
        place.refuse(f"has no counts: expected a key {known}; found {', '.join(map(str, dump)):.200}")
    at = place.at(str(key))
    given = next((name for name in MAPS if dump.get(name) is not None), None)
    slots = None if given is None else _integers(read(dump[given], place.at(given)), place.at(given))
    values = read(dump[key], at)
    if key == ROUTES:
        values = _count(_integers(values, at), slots, at)
    counts = _whole(values, at)
    if key in OF_SLOTS or key == ROUTES:
        counts = _of_experts(counts, slots, at, options)
    forward_pass = dump.get("forward_pass_id")
    yield at.decoded(counts, forward_pass=forward_pass if type(forward_pass) is int else None)


def _integers(value: Any, place: SourcePlace) -> Array:
    array = _array(value, place)
    if array.dtype.kind not in "iu":
        place.refuse(f"has dtype {array.dtype}; expected integers")
    return array.astype(np.int64)


def _array(value: Any, place: SourcePlace) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
        if array.dtype == object:  # integers beyond 64 bits; floats show them
            array = array.astype(np.float64)
    except (ValueError, TypeError, OverflowError):
        place.refuse("should be numbers in lists of equal lengths, [steps, layers, experts] or [layers, experts]")
    return array


def _whole(value: Any, place: SourcePlace) -> Array:
    """Returns [steps, layers, experts] as int64. Raises InputError for numbers that are no counts."""
    array = _array(value, place)
    if array.dtype.kind not in "iuf" or array.ndim not in (2, 3) or array.size == 0:
        shape = f"{array.dtype} {list(array.shape)}"
        place.refuse(f"is {shape}; expected numbers [steps, layers, experts] or [layers, experts]")
    wrong = ~((array >= 0) & (array <= MOST))  # also of NaN
    if array.dtype.kind == "f":
        wrong |= array != np.floor(array)
    for index in np.argwhere(wrong)[:1]:
        place.refuse(f"is {array[tuple(index)]}; expected a whole number from 0 to {MOST}", f"{index.tolist()}")
    return np.ascontiguousarray(array.astype(np.int64).reshape(-1, *array.shape[-2:]))


def _count(ids: Array, slots: Array | None, place: SourcePlace) -> Array:
    """Counts the slots in [layers, tokens, top_k]; −1 is no route."""
    if ids.ndim != 3 or ids.size == 0 or ids.min() < -1 or ids.max() >= 2**16:
        place.refuse(f"is {list(ids.shape)}; expected slots from -1 to 65535, [layers, tokens, top_k]")
    width = int(ids.max()) + 1 if slots is None else slots.shape[-1]
    return np.stack([np.bincount(row[row >= 0], minlength=width) for row in ids.reshape(len(ids), -1)])


def _of_experts(counts: Array, slots: Array | None, place: SourcePlace, options: Mapping[str, Any]) -> Array:
    """Adds counts of slots to their experts. slots: [layers, slots], the expert of each, −1 for none."""
    experts = int(options.get("experts") or 0)
    if slots is None:
        if experts != counts.shape[2]:
            problem = f"counts {counts.shape[2]} slots, and there is no {MAPS[0]}"
            place.refuse(f"{problem}. If each slot is another expert, give `experts`, {counts.shape[2]}")
        return counts
    if slots.shape != counts.shape[1:]:
        place.refuse(f"is {list(counts.shape[1:])}, but {MAPS[0]} is {list(slots.shape)}")
    experts = experts or int(slots.max()) + 1
    lost = (slots < 0) & (counts.sum(0) > 0)
    for layer, slot in np.argwhere((slots < -1) | (slots >= experts) | lost)[:1]:
        place.at(MAPS[0]).refuse(f"is {slots[layer, slot]}; there are {experts} experts", f"[{layer}, {slot}]")
    total = np.zeros((len(slots) * experts, len(counts)), np.int64)  # [layer · experts + expert][step]
    rows = np.arange(len(slots))[:, None] * experts + np.maximum(slots, 0)
    np.add.at(total, rows.ravel(), counts.reshape(len(counts), -1).T)
    return np.ascontiguousarray(total.T).reshape(*counts.shape[:2], experts)

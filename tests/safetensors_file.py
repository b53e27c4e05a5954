"""Reads and writes safetensors with only the standard library, so that tests can create malformed files.

A file is (metadata, {name: (dtype, shape, bytes)})."""

import array
import json
import struct

TYPE_CODES = {"U8": "B", "I8": "b", "U16": "H", "I16": "h", "U32": "I", "I32": "i", "I64": "q"}


def read(path):
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], body[begin:end])
    return metadata, tensors


def write(path, metadata, tensors):
    header, body = {"__metadata__": metadata}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + body)


def tensor(dtype, shape, values):
    return dtype, list(shape), array.array(TYPE_CODES[dtype], values).tobytes()


def values(entry):
    """Returns the elements of a tensor as a flat array."""
    dtype, _, data = entry
    result = array.array(TYPE_CODES[dtype])
    result.frombytes(data)
    return result

#pragma once

// Writes safetensors files that any reader of the format accepts: the same tensors and metadata give the same
// bytes. Metadata by key; tensors by falling element size, then name, so that every one lies aligned; the header is
// padded with spaces to a multiple of eight bytes. The file appears whole or not at all (atomic_file.h).

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "foremoe/core/safetensors.h"

namespace foremoe {

using Metadata = std::map<std::string, std::string, std::less<>>;

// A tensor to be written. The bytes are the caller's until the file is written.
struct TensorData {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<std::size_t> shape;
  std::span<const std::byte> bytes;  // product of shape × size_of(dtype)
};

// A tensor of these values; the shape of one axis unless told otherwise.
template <class T>
TensorData tensor_data(std::string name, std::span<const T> values, std::vector<std::size_t> shape = {}) {
  if (shape.empty()) shape = {values.size()};
  return {std::move(name), dtype_of<T>(), std::move(shape), std::as_bytes(values)};
}

// Names must be distinct; a size that disagrees with its shape is a broken invariant. Throws InputError when the
// file cannot be written.
void write_safetensors(const std::string& path, std::vector<TensorData> tensors, const Metadata& metadata);

// The same as bytes in memory.
std::vector<std::byte> to_safetensors(std::vector<TensorData> tensors, const Metadata& metadata);

}  // namespace foremoe

#include "foremoe/core/safetensors.h"

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>

#include "foremoe/core/atomic_file.h"

namespace foremoe {

namespace {

constexpr std::size_t kHeaderAlignment = 8;

// Sorts the tensors into the order of the file. Returns the header, preceded by its length.
std::string prologue(std::vector<TensorData>& tensors, const Metadata& metadata) {
  std::ranges::sort(tensors, [](const TensorData& a, const TensorData& b) {
    return size_of(a.dtype) != size_of(b.dtype) ? size_of(a.dtype) > size_of(b.dtype) : a.name < b.name;
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::size_t begin = 0;
  for (const TensorData& t : tensors) {
    assert(!header.contains(t.name));
    assert(std::accumulate(t.shape.begin(), t.shape.end(), size_of(t.dtype), std::multiplies<>{}) == t.bytes.size());
    const std::size_t end = begin + t.bytes.size();
    header[t.name] = {{"dtype", to_string(t.dtype)}, {"shape", t.shape}, {"data_offsets", {begin, end}}};
    begin = end;
  }
  std::string text = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text.resize((text.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment, ' ');
  std::uint64_t length = text.size();
  std::string result(sizeof length, '\0');
  std::memcpy(result.data(), &length, sizeof length);
  return result + text;
}

}  // namespace

void write_safetensors(const std::string& path, std::vector<TensorData> tensors, const Metadata& metadata) {
  AtomicFile file(path);
  file.write(prologue(tensors, metadata));
  for (const TensorData& t : tensors) file.write(t.bytes);
  file.commit();
}

std::vector<std::byte> to_safetensors(std::vector<TensorData> tensors, const Metadata& metadata) {
  const std::string head = prologue(tensors, metadata);
  const auto head_bytes = std::as_bytes(std::span(head));
  std::vector<std::byte> result(head_bytes.begin(), head_bytes.end());
  for (const TensorData& t : tensors) result.insert(result.end(), t.bytes.begin(), t.bytes.end());
  return result;
}

}  // namespace foremoe

#include "foremoe/core/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/core/mapped_file.h"
#include "foremoe/core/safetensors_header.h"

namespace foremoe {

namespace {

struct DTypeInfo {
  std::string_view name;
  std::size_t bytes;
};
constexpr std::array<DTypeInfo, 15> kDTypes{{{"BOOL", 1},
                                             {"U8", 1},
                                             {"I8", 1},
                                             {"F8_E5M2", 1},
                                             {"F8_E4M3", 1},
                                             {"U16", 2},
                                             {"I16", 2},
                                             {"F16", 2},
                                             {"BF16", 2},
                                             {"U32", 4},
                                             {"I32", 4},
                                             {"F32", 4},
                                             {"U64", 8},
                                             {"I64", 8},
                                             {"F64", 8}}};

std::optional<DType> dtype_from(std::string_view name) {
  const auto* const it = std::ranges::find(kDTypes, name, &DTypeInfo::name);
  if (it == kDTypes.end()) return std::nullopt;
  return static_cast<DType>(it - kDTypes.begin());
}

// Elements × bytes per element; nothing when that does not fit 64 bits.
std::optional<std::size_t> bytes_of(std::span<const std::uint64_t> shape, std::size_t element_bytes) {
  std::size_t total = element_bytes;
  for (const std::uint64_t extent : shape) {
    if (__builtin_mul_overflow(total, extent, &total)) return std::nullopt;
  }
  return total;
}

}  // namespace

std::string_view to_string(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)].name; }
std::size_t size_of(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)].bytes; }

std::int64_t TensorView::integer(std::size_t i) const {
  assert(i < num_elements());
  return visit_integer_type(dtype, [&]<class Stored>(std::type_identity<Stored>) {
    Stored value;
    std::memcpy(&value, bytes.data() + i * sizeof(Stored), sizeof(Stored));
    return static_cast<std::int64_t>(value);
  });
}

Safetensors Safetensors::open(const std::string& path) {
  const auto file = std::make_shared<const MappedFile>(path);
  return parse(file->bytes(), path, file);
}

Safetensors Safetensors::parse(std::span<const std::byte> bytes, std::string name,
                               std::shared_ptr<const void> storage) {
  Safetensors file;
  file.name_ = std::move(name);
  file.storage_ = std::move(storage);

  std::uint64_t header_bytes = 0;
  if (bytes.size() < sizeof header_bytes) file.fail("", "", "is too short to be a safetensors file");
  std::memcpy(&header_bytes, bytes.data(), sizeof header_bytes);
  bytes = bytes.subspan(sizeof header_bytes);
  if (header_bytes > kMaxHeaderBytes) {
    file.fail("header", "", fmt::format("{} bytes, more than the {} permitted", header_bytes, kMaxHeaderBytes));
  }
  if (header_bytes > bytes.size()) {
    file.fail("header", "", fmt::format("{} bytes, but the file ends after {}", header_bytes, bytes.size()));
  }
  const auto* const text = reinterpret_cast<const char*>(bytes.data());
  SafetensorsHeader header = parse_safetensors_header({text, header_bytes}, file.name_);
  const auto data = bytes.subspan(header_bytes);
  file.metadata_ = std::move(header.metadata);

  // In order of their bytes the tensors must tile the data: then none overlaps and no byte is unaccounted for.
  std::ranges::sort(header.tensors, {}, [](const TensorEntry& t) { return std::tuple(t.begin, t.end, t.name); });
  std::uint64_t tiled = 0;
  for (TensorEntry& t : header.tensors) {
    const auto dtype = dtype_from(t.dtype);
    if (!dtype) file.fail(t.name, "", fmt::format("unknown dtype '{}'", t.dtype));
    if (t.begin > t.end) file.fail(t.name, "", fmt::format("data_offsets [{}, {}] run backwards", t.begin, t.end));
    if (t.end > data.size()) {
      file.fail(t.name, "", fmt::format("data_offsets end at byte {}, but the file has {}", t.end, data.size()));
    }
    if (t.begin != tiled) {
      file.fail(t.name, "",
                fmt::format("data_offsets begin at byte {}, {} the tensor before, which ends at {}", t.begin,
                            t.begin < tiled ? "inside" : "leaving a gap after", tiled));
    }
    tiled = t.end;
    const auto size = bytes_of(t.shape, size_of(*dtype));
    if (size != t.end - t.begin) {
      file.fail(
          t.name, "",
          fmt::format("shape [{}] of {} does not take {} bytes", fmt::join(t.shape, ", "), t.dtype, t.end - t.begin));
    }
    TensorView view{
        .dtype = *dtype, .shape = {t.shape.begin(), t.shape.end()}, .bytes = data.subspan(t.begin, t.end - t.begin)};
    file.tensors_.emplace(std::move(t.name), std::move(view));
  }
  if (tiled != data.size()) {
    file.fail("", "", fmt::format("has {} bytes after its last tensor", data.size() - tiled));
  }
  return file;
}

const TensorView& Safetensors::tensor(std::string_view name, std::initializer_list<DType> dtypes,
                                      std::size_t num_axes) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end()) fail(name, "", "is missing");
  const TensorView& t = it->second;
  if (std::ranges::find(dtypes, t.dtype) == dtypes.end()) {
    std::vector<std::string_view> expected;
    for (const DType d : dtypes) expected.push_back(to_string(d));
    fail(name, "", fmt::format("dtype {}, expected {}", to_string(t.dtype), fmt::join(expected, ", ")));
  }
  if (t.shape.size() != num_axes) {
    fail(name, "", fmt::format("shape [{}], expected {} axes", fmt::join(t.shape, ", "), num_axes));
  }
  return t;
}

const TensorView& Safetensors::tensor(std::string_view name, std::initializer_list<DType> dtypes,
                                      const std::vector<std::size_t>& shape) const {
  const TensorView& t = tensor(name, dtypes, shape.size());
  if (t.shape != shape) {
    fail(name, "", fmt::format("shape [{}], expected [{}]", fmt::join(t.shape, ", "), fmt::join(shape, ", ")));
  }
  return t;
}

const std::string& Safetensors::text(std::string_view key) const {
  const auto it = metadata_.find(key);
  if (it == metadata_.end()) fail(fmt::format("__metadata__.{}", key), "", "is missing");
  return it->second;
}

std::string Safetensors::text_or(std::string_view key, std::string_view otherwise) const {
  const auto it = metadata_.find(key);
  return it == metadata_.end() ? std::string(otherwise) : it->second;
}

std::int64_t Safetensors::integer(std::string_view key, std::int64_t low, std::int64_t high) const {
  const std::string& value = text(key);
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc{} || end != value.data() + value.size() || number < low || number > high) {
    fail(fmt::format("__metadata__.{}", key), "",
         fmt::format("'{}', expected an integer from {} to {}", value, low, high));
  }
  return number;
}

void Safetensors::fail(std::string_view field, std::string_view index, const std::string& what) const {
  throw InputError({.file = name_, .field = std::string(field), .index = std::string(index)}, what);
}

}  // namespace foremoe

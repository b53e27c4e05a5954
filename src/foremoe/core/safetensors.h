#pragma once

// Reads and writes safetensors files: header length (8 bytes, little-endian), JSON header, raw tensors.
//
//   const auto file = Safetensors::open("step.safetensors");
//   const TensorView& load = file.tensor("load", {DType::kU16, DType::kU32}, 4);
//   const std::vector<std::int64_t> values = load.to_vector<std::int64_t>();
//
// The reader checks the whole header first. Names must be unique, dtypes known, and shapes free of overflow. Byte
// ranges must match their shapes and cover the rest of the file without gap or overlap. Indexing an accepted file is
// safe. For any other file, the reader throws InputError with file, field and index. It is stricter than the reference
// reader in one point: a tensor's entry may contain only dtype, shape and data_offsets.

#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "foremoe/core/debug_mode.h"
#include "foremoe/core/memory_limit.h"

namespace foremoe {

using Metadata = std::map<std::string, std::string, std::less<>>;

static_assert(std::endian::native == std::endian::little, "files are mapped as they are, and they are little-endian");

inline constexpr std::size_t kMaxHeaderBytes = 100'000'000;  // same as in the reference implementation

enum class DType : std::uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64
};

std::string_view to_string(DType dtype);  // "U8", "BF16", …
std::size_t size_of(DType dtype);         // bytes per element

template <class T>
constexpr DType dtype_of();  // T: std::uint8_t … std::int64_t, float or double

// A tensor in a file. The file's storage owns the bytes, which may be unaligned.
struct TensorView {
  DType dtype = DType::kU8;
  std::vector<std::size_t> shape;
  std::span<const std::byte> bytes;

  std::size_t num_elements() const { return bytes.size() / size_of(dtype); }

  // Returns element i of an integer tensor, widened.
  std::int64_t integer(std::size_t i) const;

  // Copies all elements of an integer tensor, each converted by static_cast. T is an integer, an id or a quantity that
  // can represent every value of the dtype.
  template <class T>
  void copy_to(std::span<T> out) const;
  // where: of this tensor. Throws InputError if memory is insufficient.
  template <class T>
  std::vector<T> to_vector(const Where& where = {}) const;
};

class Safetensors {
 public:
  // Memory-maps the file.
  static Safetensors open(const std::string& path);
  // Reads a file from memory. Messages use `name` as its path. `storage` must own the bytes, or the caller must keep
  // them alive longer than every view.
  static Safetensors parse(std::span<const std::byte> bytes, std::string name,
                           std::shared_ptr<const void> storage = {});

  const std::string& name() const { return name_; }
  const Metadata& metadata() const { return metadata_; }
  const std::map<std::string, TensorView, std::less<>>& tensors() const { return tensors_; }
  const std::shared_ptr<const void>& storage() const { return storage_; }  // keeps every view alive

  bool has(std::string_view tensor) const { return tensors_.contains(tensor); }

  // Throws InputError unless the tensor is present with one of these dtypes and this number of axes.
  const TensorView& tensor(std::string_view name, std::initializer_list<DType> dtypes, std::size_t num_axes) const;
  // As above, but requires exactly this shape.
  const TensorView& tensor(std::string_view name, std::initializer_list<DType> dtypes,
                           const std::vector<std::size_t>& shape) const;

  // Returns an entry of __metadata__. Throws InputError if it is missing, or if an integer is outside [low, high].
  const std::string& text(std::string_view key) const;
  std::string text_or(std::string_view key, std::string_view otherwise) const;
  std::int64_t integer(std::string_view key, std::int64_t low, std::int64_t high) const;

  // Throws InputError for this file.
  [[noreturn]] void fail(std::string_view field, std::string_view index, const std::string& what) const;

 private:
  Safetensors() = default;

  std::string name_;
  Metadata metadata_;
  std::map<std::string, TensorView, std::less<>> tensors_;
  std::shared_ptr<const void> storage_;
};

// ---- writing ----
//
// Writes files that any reader of the format accepts. Equal tensors and metadata give equal bytes. Metadata is sorted
// by key. Tensors are sorted by descending element size, then name, so that each is aligned. The header is padded with
// spaces to a multiple of eight bytes. The file appears complete or not at all (atomic_file.h).

// A tensor to be written. The caller owns the bytes until the file is written.
struct TensorData {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<std::size_t> shape;
  std::span<const std::byte> bytes;  // product of shape × size_of(dtype)
};

// Makes a tensor from these values, with one axis unless a shape is given.
template <class T>
TensorData tensor_data(std::string name, std::span<const T> values, std::vector<std::size_t> shape = {}) {
  if (shape.empty()) shape = {values.size()};
  return {std::move(name), dtype_of<T>(), std::move(shape), std::as_bytes(values)};
}

// Names must be distinct, and the size of each tensor must match its shape (asserted). Throws InputError if the file
// cannot be written.
void write_safetensors(const std::string& path, std::vector<TensorData> tensors, const Metadata& metadata);

// Like write_safetensors(), but returns the file's bytes.
std::vector<std::byte> to_safetensors(std::vector<TensorData> tensors, const Metadata& metadata);

// ---- implementation ----

template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, std::uint8_t>) return DType::kU8;
  if constexpr (std::is_same_v<T, std::int8_t>) return DType::kI8;
  if constexpr (std::is_same_v<T, std::uint16_t>) return DType::kU16;
  if constexpr (std::is_same_v<T, std::int16_t>) return DType::kI16;
  if constexpr (std::is_same_v<T, std::uint32_t>) return DType::kU32;
  if constexpr (std::is_same_v<T, std::int32_t>) return DType::kI32;
  if constexpr (std::is_same_v<T, std::uint64_t>) return DType::kU64;
  if constexpr (std::is_same_v<T, std::int64_t>) return DType::kI64;
  if constexpr (std::is_same_v<T, float>) return DType::kF32;
  if constexpr (std::is_same_v<T, double>) return DType::kF64;
}

// Calls f(std::type_identity<T>{}) with the C++ type of an integer dtype.
template <class F>
auto visit_integer_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kU8:
      return f(std::type_identity<std::uint8_t>{});
    case DType::kI8:
      return f(std::type_identity<std::int8_t>{});
    case DType::kU16:
      return f(std::type_identity<std::uint16_t>{});
    case DType::kI16:
      return f(std::type_identity<std::int16_t>{});
    case DType::kU32:
      return f(std::type_identity<std::uint32_t>{});
    case DType::kI32:
      return f(std::type_identity<std::int32_t>{});
    case DType::kU64:
      return f(std::type_identity<std::uint64_t>{});
    default:
      assert(dtype == DType::kI64);
      return f(std::type_identity<std::int64_t>{});
  }
}

template <class T>
void TensorView::copy_to(std::span<T> out) const {
  assert(out.size() == num_elements());
  visit_integer_type(dtype, [&]<class Stored>(std::type_identity<Stored>) {
    for (std::size_t i = 0; i < out.size(); ++i) {
      Stored value;
      std::memcpy(&value, bytes.data() + i * sizeof(Stored), sizeof(Stored));
      out[i] = static_cast<T>(value);
    }
  });
}

template <class T>
std::vector<T> TensorView::to_vector(const Where& where) const {
  expect_memory(static_cast<double>(num_elements() * sizeof(T)), where);
  std::vector<T> out(num_elements());
  copy_to(std::span<T>(out));
  return out;
}

}  // namespace foremoe

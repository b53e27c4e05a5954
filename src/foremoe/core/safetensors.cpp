#include "foremoe/core/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/core/mapped_file.h"

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

// Elements × bytes per element; nullopt if that exceeds 64 bits.
std::optional<std::size_t> bytes_of(std::span<const std::uint64_t> shape, std::size_t element_bytes) {
  std::size_t total = element_bytes;
  for (const std::uint64_t extent : shape) {
    if (__builtin_mul_overflow(total, extent, &total)) return std::nullopt;
  }
  return total;
}

// One tensor of the JSON header. HeaderReader checks the grammar, and Safetensors::parse checks the values.
struct TensorEntry {
  std::string name;
  std::string dtype;
  std::vector<std::uint64_t> shape;
  std::uint64_t begin = 0;  // bytes from the start of the data
  std::uint64_t end = 0;
};

struct SafetensorsHeader {
  std::map<std::string, std::string, std::less<>> metadata;
  std::vector<TensorEntry> tensors;
};

constexpr std::size_t kMaxAxes = 32;

// A SAX handler with a small state machine. Unlike a DOM parser, it stores only the data that we use, bounds the depth
// by the grammar, and detects repeated keys.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(SafetensorsHeader& header, const std::string& file) : header_(header), file_(file) {}

  bool start_object(std::size_t) override {
    switch (state_) {
      case State::kStart:
        state_ = State::kTop;
        return true;
      case State::kName:
        state_ = is_metadata() ? State::kMetadata : State::kTensor;
        return true;
      default:
        fail("unexpected object");
    }
  }

  bool key(string_t& key) override {
    switch (state_) {
      case State::kTop:
        if (!names_.insert(key).second) fail_at(key, "appears twice");
        name_ = key;
        seen_ = 0;
        if (!is_metadata()) header_.tensors.push_back({.name = key, .dtype = {}, .shape = {}});
        state_ = State::kName;
        return true;
      case State::kMetadata:
        if (header_.metadata.contains(key)) fail_at("__metadata__." + key, "appears twice");
        key_ = key;
        return true;
      default:
        start_field(key);
        return true;
    }
  }

  bool string(string_t& text) override {
    if (state_ == State::kMetadata) {
      header_.metadata.emplace(key_, text);
    } else if (state_ == State::kDType) {
      header_.tensors.back().dtype = text;
      state_ = State::kTensor;
    } else {
      fail("unexpected string");
    }
    return true;
  }

  bool start_array(std::size_t) override {
    if (in_list_ || (state_ != State::kShape && state_ != State::kOffsets)) fail("unexpected list");
    in_list_ = true;
    offsets_ = 0;
    return true;
  }

  bool number_unsigned(number_unsigned_t number) override {
    if (!in_list_) fail("unexpected number");
    TensorEntry& tensor = header_.tensors.back();
    if (state_ == State::kShape) {
      if (tensor.shape.size() == kMaxAxes) fail(fmt::format("more than {} axes", kMaxAxes));
      tensor.shape.push_back(number);
    } else {
      if (offsets_ == 2) fail("data_offsets must be two numbers");
      (offsets_ == 0 ? tensor.begin : tensor.end) = number;
      ++offsets_;
    }
    return true;
  }

  bool end_array() override {
    if (state_ == State::kOffsets && offsets_ != 2) fail("data_offsets must be two numbers");
    in_list_ = false;
    state_ = State::kTensor;
    return true;
  }

  bool end_object() override {
    if (state_ == State::kTensor && seen_ != kAllFields) fail("needs dtype, shape and data_offsets");
    state_ = state_ == State::kTop ? State::kEnd : State::kTop;
    return true;
  }

  bool number_integer(number_integer_t) override { fail("unexpected negative number"); }
  bool number_float(number_float_t, const string_t& text) override { fail(text + " is not a count"); }
  bool boolean(bool) override { fail("unexpected boolean"); }
  bool null() override { fail("unexpected null"); }
  bool binary(binary_t&) override { fail("unexpected binary data"); }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception& error) override {
    const std::string_view what = error.what();  // "[json.exception.parse_error.101] parse error at …"
    const std::string index = fmt::format("byte {}", position);
    throw InputError({.file = file_, .field = "header", .index = index}, std::string(what.substr(what.find(' ') + 1)));
  }

 private:
  enum class State { kStart, kTop, kName, kMetadata, kTensor, kDType, kShape, kOffsets, kEnd };
  enum Field : unsigned { kDTypeField = 1, kShapeField = 2, kOffsetsField = 4, kAllFields = 7 };

  bool is_metadata() const { return name_ == "__metadata__"; }

  void start_field(const std::string& key) {
    const auto [state, field] = key == "dtype"          ? std::pair(State::kDType, kDTypeField)
                                : key == "shape"        ? std::pair(State::kShape, kShapeField)
                                : key == "data_offsets" ? std::pair(State::kOffsets, kOffsetsField)
                                                        : throw_unknown(key);
    if ((seen_ & field) != 0) fail(key + " appears twice");
    seen_ |= field;
    state_ = state;
  }

  [[noreturn]] std::pair<State, Field> throw_unknown(const std::string& key) const {
    fail("unknown key '" + key + "'");
  }
  [[noreturn]] void fail(const std::string& what) const {
    fail_at(name_.empty() ? "header" : is_metadata() && !key_.empty() ? name_ + "." + key_ : name_, what);
  }
  [[noreturn]] void fail_at(const std::string& field, const std::string& what) const {
    throw InputError({.file = file_, .field = field}, what);
  }

  SafetensorsHeader& header_;
  const std::string& file_;
  State state_ = State::kStart;
  std::set<std::string> names_;
  std::string name_;  // tensor whose entry is being read
  std::string key_;   // metadata key whose value is being read
  unsigned seen_ = 0;
  bool in_list_ = false;
  int offsets_ = 0;  // numbers of data_offsets read so far
};

// Parses {"__metadata__": {string: string}, name: {"dtype": string, "shape": [n…], "data_offsets": [begin, end]}, …}.
// Rejects other keys, deeper nesting and repeated keys. Throws InputError for `file`.
SafetensorsHeader parse_header(std::string_view text, const std::string& file) {
  if (!text.starts_with('{')) {
    throw InputError({.file = file, .field = "header"}, "does not begin with '{': is this a safetensors file?");
  }
  SafetensorsHeader header;
  HeaderReader reader(header, file);
  nlohmann::json::sax_parse(text, &reader);
  return header;
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
    file.fail("", "",
              fmt::format("is not a safetensors file: its header would have {} bytes, more than the {} permitted",
                          header_bytes, kMaxHeaderBytes));
  }
  if (header_bytes > bytes.size()) {
    file.fail("header", "", fmt::format("{} bytes, but the file ends after {}", header_bytes, bytes.size()));
  }
  const auto* const text = reinterpret_cast<const char*>(bytes.data());
  SafetensorsHeader header = parse_header({text, header_bytes}, file.name_);
  const auto data = bytes.subspan(header_bytes);
  file.metadata_ = std::move(header.metadata);

  // Tensors, sorted by offset, must tile the data: none overlap and every byte belongs to a tensor.
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
    fail(fmt::format("__metadata__.{}", key), "", fmt::format("{} (is '{}')", must_be_integer(low, high), value));
  }
  return number;
}

void Safetensors::fail(std::string_view field, std::string_view index, const std::string& what) const {
  throw InputError({.file = name_, .field = std::string(field), .index = std::string(index)}, what);
}

}  // namespace foremoe

// Integer arrays [tokens, layers, top_k], either decoded by Python or from .npy files. An .npy file has "\x93NUMPY", a
// version, the header length, a Python dict literal and the raw array
// (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html).

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <limits>

#include "foremoe/rollout/importers/formats.h"
#include "foremoe/rollout/importers/text.h"

namespace foremoe {

namespace {

template <class T>
std::int64_t load_as(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return static_cast<std::int64_t>(value);
}

template <class T>
void add_rows(TraceAssembler& assembler, const IntegerArray& array) {
  const auto [tokens, layers, top_k] = array.shape;
  const std::array<std::uint64_t, 3> stride = array.fortran_order
                                                  ? std::array<std::uint64_t, 3>{1, tokens, tokens * layers}
                                                  : std::array<std::uint64_t, 3>{layers * top_k, top_k, 1};
  std::vector<std::int64_t> row(top_k);
  for (std::uint64_t t = 0; t < tokens; ++t) {
    for (std::uint64_t l = 0; l < layers; ++l) {
      const std::byte* at = array.bytes.data() + (t * stride[0] + l * stride[1]) * sizeof(T);
      for (std::uint64_t k = 0; k < top_k; ++k) row[k] = load_as<T>(at + k * stride[2] * sizeof(T));
      assembler.add_row(row);
    }
  }
}

// Computes the size in bytes. Returns false if the size exceeds 64 bits.
bool size_in_bytes(const IntegerArray& array, std::uint64_t& size) {
  size = static_cast<std::uint64_t>(array.type_bytes);
  bool fits = true;
  for (const std::uint64_t extent : array.shape) fits &= !__builtin_mul_overflow(size, extent, &size);
  return fits;
}

void expect_size(const Where& where, const IntegerArray& array, std::uint64_t num_bytes) {
  const auto& shape = array.shape;
  if (shape[0] == 0) throw InputError(where, "has no tokens");
  std::uint64_t size = 0;
  if (size_in_bytes(array, size) && size == num_bytes) return;
  throw InputError(where, fmt::format("[{}, {}, {}] of {} bytes each was claimed, but there are {} bytes", shape[0],
                                      shape[1], shape[2], array.type_bytes, num_bytes));
}

// Adds one sequence. Throws InputError if the number of bytes does not match the shape, or the rows the tokens.
void add_array(TraceAssembler& assembler, const DecodedSequence& sequence, const IntegerArray& array) {
  const Where& where = sequence.where;
  expect_size(where, array, array.bytes.size());
  const auto& shape = array.shape;
  constexpr std::uint64_t kMax = std::numeric_limits<std::int64_t>::max();
  if (shape[0] > kMax || shape[1] > kMax || shape[2] > kMax) throw InputError(where, "an extent is beyond 64 bits");
  const bool is_unsigned = !array.is_signed && array.type_bytes < 8;
  const std::int64_t omitted = assembler.omitted_rows(sequence, static_cast<std::int64_t>(shape[0]));
  assembler.begin_sequence(where, {.num_tokens = omitted + static_cast<std::int64_t>(shape[0]),
                                   .num_layers = static_cast<std::int64_t>(shape[1]),
                                   .top_k = static_cast<std::int64_t>(shape[2]),
                                   .sentinel = is_unsigned ? (std::int64_t{1} << 8 * array.type_bytes) - 1 : -1,
                                   .prompt_length = static_cast<std::int32_t>(std::min<std::int64_t>(
                                       sequence.prompt_length, omitted + static_cast<std::int64_t>(shape[0])))});
  assembler.add_omitted_rows(omitted);
  switch (array.type_bytes * 2 + (array.is_signed ? 1 : 0)) {
    case 2:
      return add_rows<std::uint8_t>(assembler, array);
    case 3:
      return add_rows<std::int8_t>(assembler, array);
    case 4:
      return add_rows<std::uint16_t>(assembler, array);
    case 5:
      return add_rows<std::int16_t>(assembler, array);
    case 8:
      return add_rows<std::uint32_t>(assembler, array);
    case 9:
      return add_rows<std::int32_t>(assembler, array);
    case 16:
      return add_rows<std::uint64_t>(assembler, array);
    default:
      return add_rows<std::int64_t>(assembler, array);
  }
}

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kMaxHeader = std::size_t{1} << 16;  // numpy writes about 100 bytes

struct NpyParts {
  std::string_view header;  // the dict literal
  std::span<const std::byte> payload;
};

NpyParts split_npy(std::span<const std::byte> bytes, const Where& where) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (!text.starts_with(kMagic)) throw InputError(where, "does not begin like an .npy file");
  if (text.size() < 12) throw InputError(with_field(where, "header"), "is truncated");
  const int version = static_cast<unsigned char>(text[6]);
  if (version < 1 || version > 3)
    throw InputError(with_field(where, "version"), fmt::format("{} is unknown; expected 1 to 3", version));
  const std::size_t length_bytes = version == 1 ? 2 : 4;
  std::uint32_t length = 0;
  std::memcpy(&length, text.data() + 8, length_bytes);
  const std::size_t begin = 8 + length_bytes;
  if (length > kMaxHeader || length > text.size() - begin) {
    throw InputError(with_field(where, "header"), fmt::format("claims {} bytes of {}", length, text.size() - begin));
  }
  return {text.substr(begin, length), bytes.subspan(begin + length)};
}

// Returns the text after 'key': in the dict literal.
std::string_view value_of(std::string_view header, std::string_view key, const Where& where) {
  for (const char quote : {'\'', '"'}) {
    const auto quoted = fmt::format("{0}{1}{0}", quote, key);
    if (const auto found = header.find(quoted); found != std::string_view::npos) {
      const std::string_view rest = trimmed(header.substr(found + quoted.size()));
      if (rest.starts_with(':')) return trimmed(rest.substr(1));
    }
  }
  throw InputError(with_field(where, key), "is not in the header");
}

// Returns the type's size in bytes, and whether it is signed.
std::pair<int, bool> npy_type(std::string_view value, const Where& where) {
  const auto end = value.size() > 1 ? value.find(value[0], 1) : std::string_view::npos;
  const bool quoted = (value.starts_with('\'') || value.starts_with('"')) && end != std::string_view::npos;
  const std::string_view descr =
      quoted ? value.substr(1, end - 1) : value.substr(0, std::min<std::size_t>(value.size(), 16));
  if (descr.size() == 3 && (descr[1] == 'i' || descr[1] == 'u')) {
    const int bytes = descr[2] - '0';
    const bool known = bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8;
    const bool little = descr[0] == '<' || descr[0] == '=' || (descr[0] == '|' && bytes == 1);
    if (known && (little || bytes == 1)) return {bytes, descr[1] == 'i'};
  }
  throw InputError(with_field(where, "descr"), fmt::format("{} is not a little-endian integer type", descr));
}

bool parse_order(std::string_view value, const Where& where) {
  if (value.starts_with("True")) return true;
  if (value.starts_with("False")) return false;
  throw InputError(with_field(where, "fortran_order"), "is neither True nor False");
}

std::array<std::uint64_t, 3> npy_shape(std::string_view value, const Where& where) {
  const auto fail = [&](std::string_view why) { throw InputError(with_field(where, "shape"), std::string(why)); };
  const auto close = value.find(')');
  if (!value.starts_with('(') || close == std::string_view::npos) fail("is not a tuple");
  std::string_view rest = trimmed(value.substr(1, close - 1));
  std::array<std::uint64_t, 3> shape{};
  std::size_t axes = 0;
  while (!rest.empty()) {
    std::uint64_t extent = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), extent);
    if (error == std::errc::result_out_of_range) fail("has an extent beyond 64 bits");
    if (error != std::errc{}) fail("is not a tuple of integers");
    if (axes < shape.size()) shape[axes] = extent;
    ++axes;
    rest = trimmed(rest.substr(static_cast<std::size_t>(end - rest.data())));
    if (rest.empty()) break;
    if (!rest.starts_with(',')) fail("is not a tuple of integers");
    rest = trimmed(rest.substr(1));
  }
  if (axes != shape.size()) fail(fmt::format("has {} axes; expected 3: tokens, layers, top_k", axes));
  return shape;
}

IntegerArray npy_array(std::span<const std::byte> bytes, const Where& where) {
  const NpyParts file = split_npy(bytes, where);
  const auto [type_bytes, is_signed] = npy_type(value_of(file.header, "descr", where), where);
  return {.bytes = file.payload,
          .type_bytes = type_bytes,
          .is_signed = is_signed,
          .shape = npy_shape(value_of(file.header, "shape", where), where),
          .fortran_order = parse_order(value_of(file.header, "fortran_order", where), where)};
}

// Adds the sequence of an .npy file. The error for an array that may count tokens per expert suggests `counts`.
void add_npy(TraceAssembler& assembler, const DecodedSequence& sequence) {
  const auto bytes = std::get<std::span<const std::byte>>(sequence.content);
  const Where& where = sequence.where;
  try {
    add_array(assembler, sequence, npy_array(bytes, where));
  } catch (const InsufficientMemory&) {
    throw;
  } catch (const InputError& error) {
    const NpyParts file = split_npy(bytes, where);
    const std::string_view value = value_of(file.header, "shape", where);
    const std::string_view shape = value.substr(0, value.find(')'));
    const std::string_view type = value_of(file.header, "descr", where).substr(0, 4);  // "'<f8"
    const bool floats = type.find('f') != std::string_view::npos;
    const bool large = type.ends_with("i8") && !error.where().index.empty();  // an id out of range
    const auto axes = std::ranges::count(shape, ',') + (shape.ends_with(',') ? 0 : 1);
    const bool may_count = axes == 2 || (axes == 3 && (floats || large || npy_shape(value, where)[2] > 16));
    if (!may_count) throw;
    throw InputError(error.where(), error.problem() + ". If these are tokens per expert, give `counts`");
  }
}

}  // namespace

void import_npy(const ImportSource& source, TraceAssembler& assembler) {
  add_sequence(assembler, {.where = {.file = source.name, .field = "routed_experts"}, .content = source.bytes});
}

void add_sequence(TraceAssembler& assembler, const DecodedSequence& sequence) {
  assembler.add_sample([&] {
    if (!sequence.problem.empty()) throw InputError(sequence.where, sequence.problem);
    const auto* const array = std::get_if<IntegerArray>(&sequence.content);
    array != nullptr ? add_array(assembler, sequence, *array) : add_npy(assembler, sequence);
    assembler.sequence_was(sequence);
  });
}

}  // namespace foremoe

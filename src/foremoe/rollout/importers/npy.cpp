// numpy's .npy: "\x93NUMPY", version, header length, a Python dict literal, the raw array.
// https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html

#include <fmt/format.h>

#include <charconv>
#include <cstring>

#include "foremoe/rollout/importers/base64.h"
#include "foremoe/rollout/importers/formats.h"
#include "foremoe/rollout/importers/integer_array.h"
#include "foremoe/rollout/importers/lines.h"

namespace foremoe {

namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kMaxHeader = std::size_t{1} << 16;  // numpy itself writes some 100 bytes

struct NpyFile {
  std::string_view header;  // the dict literal
  std::span<const std::byte> payload;
};

Where at(Where where, std::string_view field) {
  where.field += fmt::format("{}{}", where.field.empty() ? "" : ": ", field);
  return where;
}

NpyFile split(std::span<const std::byte> bytes, const Where& where) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (!text.starts_with(kMagic)) throw InputError(where, "does not begin like an .npy file");
  if (text.size() < 12) throw InputError(at(where, "header"), "is cut off");
  const int version = static_cast<unsigned char>(text[6]);
  if (version < 1 || version > 3)
    throw InputError(at(where, "version"), fmt::format("{} is unknown; expected 1 to 3", version));
  const std::size_t length_bytes = version == 1 ? 2 : 4;
  std::uint32_t length = 0;
  std::memcpy(&length, text.data() + 8, length_bytes);
  const std::size_t begin = 8 + length_bytes;
  if (length > kMaxHeader || length > text.size() - begin) {
    throw InputError(at(where, "header"), fmt::format("claims {} bytes of {}", length, text.size() - begin));
  }
  return {text.substr(begin, length), bytes.subspan(begin + length)};
}

// What follows 'key': in the dict literal.
std::string_view value_of(std::string_view header, std::string_view key, const Where& where) {
  for (const char quote : {'\'', '"'}) {
    const auto quoted = fmt::format("{0}{1}{0}", quote, key);
    if (const auto found = header.find(quoted); found != std::string_view::npos) {
      const std::string_view rest = trimmed(header.substr(found + quoted.size()));
      if (rest.starts_with(':')) return trimmed(rest.substr(1));
    }
  }
  throw InputError(at(where, key), "is not in the header");
}

IntegerType parse_type(std::string_view value, const Where& where) {
  const auto end = value.size() > 1 ? value.find(value[0], 1) : std::string_view::npos;
  const bool quoted = (value.starts_with('\'') || value.starts_with('"')) && end != std::string_view::npos;
  const std::string_view descr =
      quoted ? value.substr(1, end - 1) : value.substr(0, std::min<std::size_t>(value.size(), 16));
  if (descr.size() == 3 && (descr[1] == 'i' || descr[1] == 'u')) {
    const int bytes = descr[2] - '0';
    const bool known = bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8;
    const bool little = descr[0] == '<' || descr[0] == '=' || (descr[0] == '|' && bytes == 1);
    if (known && (little || bytes == 1)) return {.bytes = bytes, .is_signed = descr[1] == 'i'};
  }
  throw InputError(at(where, "descr"), fmt::format("{} is not a little-endian integer type", descr));
}

bool parse_order(std::string_view value, const Where& where) {
  if (value.starts_with("True")) return true;
  if (value.starts_with("False")) return false;
  throw InputError(at(where, "fortran_order"), "is neither True nor False");
}

std::array<std::uint64_t, 3> parse_shape(std::string_view value, const Where& where) {
  const auto fail = [&](std::string_view why) { throw InputError(at(where, "shape"), std::string(why)); };
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

}  // namespace

void add_npy(TraceAssembler& assembler, const Where& where, std::span<const std::byte> bytes,
             std::int32_t prompt_length) {
  const NpyFile file = split(bytes, where);
  const IntegerArray array{.bytes = file.payload,
                           .type = parse_type(value_of(file.header, "descr", where), where),
                           .shape = parse_shape(value_of(file.header, "shape", where), where),
                           .fortran_order = parse_order(value_of(file.header, "fortran_order", where), where)};
  add_sequence(assembler, where, array, prompt_length);
}

void import_npy(const ImportSource& source, TraceAssembler& assembler) {
  add_npy(assembler, {.file = source.name, .field = "routed_experts"}, source.bytes);
}

void import_npy_base64(const ImportSource& source, TraceAssembler& assembler) {
  for_each_line(text_of(source), [&](std::string_view line, const std::string& number) {
    const Where where{.file = source.name, .field = number};
    add_npy(assembler, where, decode_base64(line, where));
  });
}

}  // namespace foremoe

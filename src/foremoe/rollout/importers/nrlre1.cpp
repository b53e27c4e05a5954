// NeMo-RL's envelope: "nrlre1:<dtype>:<S>x<L>x<K>:<base64 of the C-ordered array>".

#include <fmt/format.h>

#include <charconv>

#include "foremoe/rollout/importers/base64.h"
#include "foremoe/rollout/importers/formats.h"
#include "foremoe/rollout/importers/integer_array.h"
#include "foremoe/rollout/importers/lines.h"

namespace foremoe {

namespace {

IntegerType parse_type(std::string_view name, const Where& where) {
  if (name == "int8") return {1, true};
  if (name == "int16") return {2, true};
  if (name == "int32") return {4, true};
  if (name == "uint8") return {1, false};
  if (name == "uint16") return {2, false};
  throw InputError(
      where, fmt::format("dtype \"{}\" is unknown; expected int8, int16, int32, uint8 or uint16", name.substr(0, 16)));
}

std::array<std::uint64_t, 3> parse_shape(std::string_view text, const Where& where) {
  std::array<std::uint64_t, 3> shape{};
  const char* at = text.data();
  const char* const end = text.data() + text.size();
  for (std::size_t axis = 0; axis < 3; ++axis) {
    if (axis > 0 && (at == end || *at++ != 'x')) throw InputError(where, "shape should be <tokens>x<layers>x<top_k>");
    const auto [next, error] = std::from_chars(at, end, shape[axis]);
    if (error != std::errc{}) throw InputError(where, "shape should be <tokens>x<layers>x<top_k>");
    at = next;
  }
  if (at != end) throw InputError(where, "shape should be <tokens>x<layers>x<top_k>");
  return shape;
}

}  // namespace

void add_nrlre1(TraceAssembler& assembler, const Where& where, std::string_view envelope) {
  std::array<std::string_view, 3> part;  // magic, dtype, shape; what remains is the payload
  for (auto& field : part) {
    const auto colon = envelope.find(':');
    if (colon == std::string_view::npos) throw InputError(where, "should be nrlre1:<dtype>:<shape>:<base64>");
    field = envelope.substr(0, colon);
    envelope.remove_prefix(colon + 1);
  }
  if (part[0] != "nrlre1")
    throw InputError(where, fmt::format("begins with \"{}\", not nrlre1", part[0].substr(0, 16)));
  const std::vector<std::byte> bytes = decode_base64(envelope, where);
  const IntegerType type = parse_type(part[1], where);
  const auto shape = parse_shape(part[2], where);
  add_sequence(assembler, where, {.bytes = bytes, .type = type, .shape = shape});
}

void import_nrlre1(const ImportSource& source, TraceAssembler& assembler) {
  for_each_line(text_of(source), [&](std::string_view line, const std::string& number) {
    add_nrlre1(assembler, {.file = source.name, .field = number}, line);
  });
}

}  // namespace foremoe

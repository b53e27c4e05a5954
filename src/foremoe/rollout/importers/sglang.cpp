// SGLang's flat array: int32 [tokens, layers, top_k] without any header; layers without experts and tokens
// without routes are zeros, which repeat and so become missing. Raw (one sequence) or one base64 per line.

#include <fmt/format.h>

#include "foremoe/rollout/importers/base64.h"
#include "foremoe/rollout/importers/formats.h"
#include "foremoe/rollout/importers/integer_array.h"
#include "foremoe/rollout/importers/lines.h"

namespace foremoe {

void add_flat_int32(TraceAssembler& assembler, const Where& where, std::span<const std::byte> bytes,
                    const ImportOptions& options) {
  if (options.num_layers < 1 || options.top_k < 1)
    throw InputError(where, "is a flat array: give its layers and top_k");
  const auto layers = static_cast<std::uint64_t>(options.num_layers);
  const auto top_k = static_cast<std::uint64_t>(options.top_k);
  const std::uint64_t token_bytes = layers * top_k * sizeof(std::int32_t);
  if (bytes.size() % token_bytes != 0) {
    throw InputError(where, fmt::format("{} bytes are no whole number of tokens of {} layers × {} experts in int32",
                                        bytes.size(), layers, top_k));
  }
  add_sequence(assembler, where,
               {.bytes = bytes, .type = {4, true}, .shape = {bytes.size() / token_bytes, layers, top_k}});
}

void import_sglang(const ImportSource& source, const ImportOptions& options, TraceAssembler& assembler) {
  const std::string_view text = text_of(source);
  const std::string_view first_line = trimmed(text.substr(0, text.find('\n')));
  if (!looks_like_base64(first_line)) {
    return add_flat_int32(assembler, {.file = source.name, .field = "routed_experts"}, source.bytes, options);
  }
  for_each_line(text, [&](std::string_view line, const std::string& number) {
    const Where where{.file = source.name, .field = number};
    add_flat_int32(assembler, where, decode_base64(line, where), options);
  });
}

}  // namespace foremoe

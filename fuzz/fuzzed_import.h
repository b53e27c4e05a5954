#pragma once

// Fuzzes importers. The first three bytes select options; the remaining bytes are the file.

#include <array>
#include <span>

#include "foremoe/rollout/importers/importer.h"
#include "fuzzed_input.h"

namespace foremoe {

// bytes[0] selects one of `formats`, or format detection. bytes[1] encodes flags and the number of layers of headerless
// arrays. bytes[2] encodes the number of experts and the top_k of headerless arrays.
template <std::size_t N>
void import_fuzzed(std::span<const std::byte> bytes, const std::array<ImportFormat, N>& formats) {
  if (bytes.size() < 3) {
    if (inputs_are_seeds() && !bytes.empty()) found("shorter than its options");
    return;
  }
  const auto byte = [&](std::size_t i) { return std::to_integer<unsigned>(bytes[i]); };
  ImportOptions options;
  if (const unsigned choice = byte(0) % (N + 1); choice < N) options.format = formats[choice];
  options.num_layers = static_cast<int>(byte(1) & 7);
  options.drop_recomputed = (byte(1) & 8) != 0;
  options.drop_empty_layers = (byte(1) & 16) != 0;
  options.pipeline_stages = 1 + static_cast<int>(byte(1) >> 7);
  options.top_k = static_cast<int>(byte(2) & 7);
  options.num_experts = static_cast<int>(byte(2) >> 3);  // 0 … 31
  options.weightless_experts = options.num_experts / 4;
  const ImportSource source{.name = kFuzzedInput, .bytes = bytes.subspan(3)};
  const Imported imported = import_rollout({&source, 1}, options);

  if (const RoutingTrace* trace = imported.trace()) {
    std::vector<ExpertId> route(static_cast<std::size_t>(trace->top_k));
    for (std::int64_t token = 0; token < trace->num_tokens; ++token) {
      for (int l = 0; l < trace->num_layers; ++l) trace->route(token, LayerId{l}, route);
    }
  } else {
    load_digest(*imported.load());
  }
}

}  // namespace foremoe

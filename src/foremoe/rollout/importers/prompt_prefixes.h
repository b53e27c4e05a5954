#pragma once

// Routes of prompts that a prefix cache held: the engine computed such a prompt once, and other samples of its group
// lack rows of the first tokens. The sample that lacks the fewest has them.
//
// Siblings have equal prompts, as far as the recording tells: equal keys (token ids, text or group) and lengths. If
// recordings have no keys, prompts of equal length count as equal. Rows are taken only if all siblings agree about
// every row of the prompt that several have.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "foremoe/rollout/importers/importer.h"

namespace foremoe {

struct FilledPrefixes {
  std::int64_t tokens = 0;
  int sequences = 0;
  int first = -1;           // number of the first filled sample in the sources
  int source = -1;          // from which sample
  bool by_length = false;   // some prompts are known by their lengths alone
  int in_disagreement = 0;  // sequences that lack rows, whose siblings disagree
};

// Fills `routes`, [tokens] of token_bytes each; a token without a route has only bytes 0xFF.
FilledPrefixes fill_prefixes(std::span<std::byte> routes, std::size_t token_bytes,
                             const std::vector<std::int64_t>& cu_seqlens,
                             const std::vector<std::int32_t>& prompt_lengths, const std::vector<SampleFacts>& facts);

std::string describe(const FilledPrefixes& filled);

}  // namespace foremoe

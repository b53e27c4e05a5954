#include "foremoe/rollout/importers/prompt_prefixes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

namespace foremoe {

FilledPrefixes fill_prefixes(std::span<std::byte> routes, std::size_t token_bytes,
                             const std::vector<std::int64_t>& cu_seqlens,
                             const std::vector<std::int32_t>& prompt_lengths, const std::vector<SampleFacts>& facts) {
  const auto rows = [&](std::size_t s, std::int64_t begin, std::int64_t end) {
    return routes.subspan(static_cast<std::size_t>(cu_seqlens[s] + begin) * token_bytes,
                          static_cast<std::size_t>(std::max(begin, end) - begin) * token_bytes);
  };
  struct Sibling {
    std::size_t s;
    std::int64_t first;  // token of the prompt with a row
    std::int64_t end;    // of the prompt
  };
  std::map<std::pair<std::string, std::int32_t>, std::vector<Sibling>> prompts;
  for (std::size_t s = 0; s < prompt_lengths.size(); ++s) {
    if (prompt_lengths[s] < 1) continue;
    Sibling of{s, 0, std::min<std::int64_t>(prompt_lengths[s], cu_seqlens[s + 1] - cu_seqlens[s])};
    const auto is_missing = [](std::byte b) { return b == std::byte{0xFF}; };
    while (of.first < of.end && std::ranges::all_of(rows(s, of.first, of.first + 1), is_missing)) ++of.first;
    prompts[{facts[s].prompt, prompt_lengths[s]}].push_back(of);
  }
  FilledPrefixes filled;
  for (const auto& [prompt, siblings] : prompts) {
    const Sibling& donor = *std::ranges::min_element(siblings, {}, &Sibling::first);
    const bool agree = std::ranges::all_of(siblings, [&](const Sibling& of) {
      const std::int64_t end = std::min(of.end, donor.end);
      return std::ranges::equal(rows(of.s, of.first, end), rows(donor.s, of.first, end));
    });
    for (const Sibling& of : siblings) {
      const std::int64_t end = std::min(of.first, donor.end);
      if (end <= donor.first) continue;
      if (!agree) {
        ++filled.in_disagreement;
        continue;
      }
      std::ranges::copy(rows(donor.s, donor.first, end), rows(of.s, donor.first, end).begin());
      filled.tokens += end - donor.first;
      filled.by_length |= prompt.first.empty();
      if (filled.sequences++ == 0)
        std::tie(filled.first, filled.source) = std::pair(facts[of.s].sample, facts[donor.s].sample);
    }
  }
  return filled;
}

std::string describe(const FilledPrefixes& filled) {
  std::string text = "no first tokens were filled: no sequence with the same known prompt has them";
  if (filled.sequences > 0) {
    text = fmt::format(
        "{} first tokens of {} sequences were filled from sequences with the same {}: the first is sample {}, "
        "from sample {}",
        filled.tokens, filled.sequences,
        filled.by_length ? "length of the prompt, which is all that is known of it" : "prompt", filled.first,
        filled.source);
  }
  if (filled.in_disagreement > 0) {
    text += fmt::format("; {} sequences were not filled, since sequences with their prompt have different rows",
                        filled.in_disagreement);
  }
  return text;
}

}  // namespace foremoe

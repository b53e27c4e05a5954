#include "foremoe/rollout/synthesis/sequences.h"

#include <cmath>
#include <numeric>

#include "foremoe/rollout/synthesis/draw.h"

namespace foremoe {

namespace {

// Lognormal, scaled to fill `tokens`: ends of sequences are rounded, so that the sum is exact.
std::vector<std::int64_t> draw_lengths(Random& random, const SynthesisOptions& options, std::int64_t tokens) {
  std::vector<double> end;
  double sum = 0;
  for (int s = 0; s < options.sequences_per_rank; ++s)
    end.push_back(sum += std::exp(options.length_spread * random.normal()));
  std::vector<std::int64_t> lengths;
  std::int64_t before = 0;
  for (const double e : end) {
    const std::int64_t until = std::llround(static_cast<double>(tokens) * (e / sum));
    lengths.push_back(until - before);
    before = until;
  }
  return lengths;
}

void assign_groups(const SynthesisOptions& options, std::vector<SyntheticSequence>& sequences) {
  if (options.layout == Layout::kShuffled) {
    Random random = stream_of(options.seed, Purpose::kGroups);
    const auto at = permutation(random, sequences.size());
    for (std::size_t i = 0; i < sequences.size(); ++i)
      sequences[static_cast<std::size_t>(at[i])].group = static_cast<std::int32_t>(i) / options.group_size;
    return;
  }
  const int per_micro_step = options.num_ranks * options.sequences_per_rank;
  const int groups = (per_micro_step + options.group_size - 1) / options.group_size;
  for (SyntheticSequence& sequence : sequences) {
    sequence.group = sequence.micro_step.value * groups + sequence.index % per_micro_step / options.group_size;
  }
}

}  // namespace

std::vector<SyntheticSequence> draw_sequences(const SynthesisOptions& options, const TokenRouter& router) {
  std::vector<SyntheticSequence> sequences;
  for (int m = 0; m < options.num_micro_steps; ++m) {
    for (int r = 0; r < options.num_ranks; ++r) {
      Random random =
          stream_of(options.seed, Purpose::kLengths, static_cast<std::uint64_t>(m), static_cast<std::uint64_t>(r));
      const std::int64_t tokens = router.tokens_of(MicroStepId{m}, RankId{r}, options.tokens_per_rank);
      for (const std::int64_t length : draw_lengths(random, options, tokens)) {
        sequences.push_back({.micro_step = MicroStepId{m},
                             .rank = RankId{r},
                             .index = static_cast<std::int32_t>(sequences.size()),
                             .tokens = length});
      }
    }
  }
  assign_groups(options, sequences);
  return sequences;
}

}  // namespace foremoe

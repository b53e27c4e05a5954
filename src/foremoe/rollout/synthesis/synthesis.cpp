#include "foremoe/rollout/synthesis/synthesis.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "foremoe/core/error.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/synthesis/draw.h"
#include "foremoe/rollout/synthesis/token_router.h"

namespace foremoe {

namespace {

void check(const SynthesisOptions& options) {
  const auto expect = [](const char* field, std::int64_t value, std::int64_t most) {
    if (value < 1 || value > most) {
      throw InputError({.field = field}, fmt::format("{} (is {})", must_be_integer(1, most), value));
    }
  };
  expect("layers", options.num_layers, SynthesisLimits::kLayers);
  expect("experts", options.num_experts, SynthesisLimits::kExperts);
  expect("top_k", options.top_k, options.num_experts);
  expect_groups_fit(options.groups, options.num_experts, options.top_k);
  expect("micro_steps", options.num_micro_steps, SynthesisLimits::kMicroSteps);
  expect("ranks", options.num_ranks, SynthesisLimits::kRanks);
  expect("tokens_per_rank", options.tokens_per_rank, SynthesisLimits::kTokensPerRank);
  expect("sequences_per_rank", options.sequences_per_rank, SynthesisLimits::kSequencesPerRank);
  expect("group_size", options.group_size, SynthesisLimits::kGroupSize);
  if (options.ranks_per_node < 0) throw InputError({.field = "ranks_per_node"}, "is negative");
  if (!(options.length_spread >= 0 && options.length_spread <= 10)) {
    throw InputError({.field = "length_spread"}, "must be a number from 0 to 10");
  }
  const double sequences = 1.0 * options.num_micro_steps * options.num_ranks * options.sequences_per_rank;
  if (sequences > static_cast<double>(std::int64_t{1} << 30)) {
    throw InputError({.field = "sequences_per_rank"},
                     fmt::format("makes {} sequences in all; expected at most 2^30", sequences));
  }
}

std::unique_ptr<TokenRouter> router_of(const SynthesisOptions& options, const RoutingModel& model) {
  const auto* const workload = std::get_if<StressWorkload>(&model);
  if (workload != nullptr && options.groups.count > 1) {
    throw InputError({.field = "expert_groups"},
                     fmt::format("{} deals experts to tokens in turn, without groups; expected 1", name_of(*workload)));
  }
  return std::visit([&](const auto& parameters) { return make_router(options, parameters); }, model);
}

int ranks_per_node_of(const SynthesisOptions& options) {
  return options.ranks_per_node > 0 ? options.ranks_per_node : std::min(kDefaultRanksPerNode, options.num_ranks);
}

// Draws lognormal lengths, scaled to fill `tokens`. Rounds the ends of sequences, so that the sum is exact.
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

// Draws sequences by micro-step and rank. The lengths of a rank sum to exactly its tokens; a sequence may be empty.
std::vector<SyntheticSequence> draw_sequences(const SynthesisOptions& options, const TokenRouter& router) {
  const double num_sequences = 1.0 * options.num_micro_steps * options.num_ranks * options.sequences_per_rank;
  expect_memory(num_sequences * sizeof(SyntheticSequence), {.field = "sequences_per_rank"});
  std::vector<SyntheticSequence> sequences;
  sequences.reserve(static_cast<std::size_t>(num_sequences));
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

// Draws one sequence in one layer at a time and reuses scratch memory between draws. The caller must pass sequences in
// the order of the step.
class SequenceDraw {
 public:
  SequenceDraw(const SynthesisOptions& options, const TokenRouter& router)
      : options_(options),
        router_(router),
        p_(static_cast<std::size_t>(options.num_experts)),
        counts_(p_.size()),
        shares_(p_.size()),
        owed_({static_cast<std::size_t>(options.num_layers), p_.size()}) {}

  // Returns tokens per [expert].
  std::span<const std::int64_t> counts(const SyntheticSequence& sequence, LayerId layer) {
    weigh(sequence, layer);
    if (router_.is_deterministic()) {
      round_shares(sequence, layer);
    } else if (options_.groups.restrict_tokens(options_.top_k)) {
      std::fill(counts_.begin(), counts_.end(), 0);
      for (const std::int64_t expert : rows(sequence, layer)) ++counts_[static_cast<std::size_t>(expert)];
    } else {
      Random random =
          stream_of(options_.seed, Purpose::kCounts, static_cast<std::uint64_t>(sequence.index), layer.index());
      multinomial(random, sequence.tokens * options_.top_k, p_, sequence.tokens, counts_);
    }
    return counts_;
  }

  // Returns experts, [token][top_k].
  std::span<const std::int64_t> rows(const SyntheticSequence& sequence, LayerId layer) {
    const auto top_k = static_cast<std::size_t>(options_.top_k);
    const std::size_t entries = static_cast<std::size_t>(sequence.tokens) * top_k;
    if (entries > rows_.capacity())
      expect_memory(sizeof rows_[0] * static_cast<double>(entries), {.field = "tokens_per_rank"});
    rows_.resize(entries);
    if (router_.is_deterministic()) {
      deal(counts(sequence, layer), static_cast<std::size_t>(sequence.tokens));
    } else {
      weigh(sequence, layer);
      Random random =
          stream_of(options_.seed, Purpose::kRows, static_cast<std::uint64_t>(sequence.index), layer.index());
      const auto draw_all = [&](auto sampler) {
        for (std::size_t t = 0; t < rows_.size(); t += top_k) sampler.draw({&rows_[t], top_k});
      };
      if (options_.groups.restrict_tokens(options_.top_k)) {
        draw_all(GroupedSampler(p_, options_.top_k, options_.groups, random));
      } else {
        draw_all(DistinctSampler(p_, options_.top_k, random));
      }
    }
    return rows_;
  }

 private:
  void weigh(const SyntheticSequence& sequence, LayerId layer) {
    router_.weigh(sequence, layer, p_);
    normalize(p_, 1.0 / options_.top_k);
  }

  // Carries rounding errors to the next sequence of the micro-step, so that the counts of the whole micro-step are
  // rounded shares too.
  void round_shares(const SyntheticSequence& sequence, LayerId layer) {
    if (owed_in_ != sequence.micro_step) {
      std::fill(owed_.flat().begin(), owed_.flat().end(), 0.0);
      owed_in_ = sequence.micro_step;
    }
    const auto owed = owed_.row(layer);
    const std::int64_t assignments = sequence.tokens * options_.top_k;
    for (std::size_t e = 0; e < p_.size(); ++e) shares_[e] = static_cast<double>(assignments) * p_[e] + owed[e];
    apportion(assignments, shares_, sequence.tokens, counts_);
    for (std::size_t e = 0; e < p_.size(); ++e) owed[e] = shares_[e] - static_cast<double>(counts_[e]);
  }

  // Deals experts, ascending, to tokens 0, 1, …, 0, 1, …. No count exceeds `tokens`, so no token repeats an expert.
  void deal(std::span<const std::int64_t> counts, std::size_t tokens) {
    std::size_t dealt = 0;
    for (std::size_t e = 0; e < counts.size(); ++e) {
      for (std::int64_t i = 0; i < counts[e]; ++i, ++dealt) {
        rows_[dealt % tokens * static_cast<std::size_t>(options_.top_k) + dealt / tokens] =
            static_cast<std::int64_t>(e);
      }
    }
  }

  const SynthesisOptions& options_;
  const TokenRouter& router_;
  std::vector<double> p_;
  std::vector<std::int64_t> counts_;
  std::vector<double> shares_;
  Array<double, 2> owed_;  // [layer][expert], tokens
  MicroStepId owed_in_;
  std::vector<std::int64_t> rows_;
};

// Returns the trace without its routes.
RoutingTrace outline(const SynthesisOptions& options, const std::vector<SyntheticSequence>& sequences) {
  RoutingTrace trace;
  trace.num_layers = options.num_layers;
  trace.top_k = options.top_k;
  trace.num_experts = options.num_experts;
  trace.type = narrowest_route_type(options.num_experts);
  trace.cu_seqlens.push_back(0);
  for (const SyntheticSequence& sequence : sequences) {
    trace.cu_seqlens.push_back(trace.cu_seqlens.back() + sequence.tokens);
    trace.group_ids.push_back(sequence.group);
    trace.micro_step.push_back(sequence.micro_step.value);
    trace.rank.push_back(sequence.rank.value);
  }
  trace.num_tokens = trace.cu_seqlens.back();
  trace.layer_ids.resize(static_cast<std::size_t>(options.num_layers));
  std::iota(trace.layer_ids.begin(), trace.layer_ids.end(), 0);
  trace.ranks = options.num_ranks;
  trace.ranks_per_node = ranks_per_node_of(options);
  return trace;
}

}  // namespace

SynthesisOptions with_shape(SynthesisOptions options, const ModelShape& shape) {
  options.num_layers = shape.moe_layers;
  options.num_experts = shape.experts;
  options.top_k = shape.top_k;
  return options;
}

LoadTable synthesize_load(const SynthesisOptions& options, const RoutingModel& model) {
  check(options);
  const std::array shape{static_cast<std::size_t>(options.num_micro_steps),
                         static_cast<std::size_t>(options.num_layers), static_cast<std::size_t>(options.num_ranks),
                         static_cast<std::size_t>(options.num_experts)};
  expect_load_shape(shape, "");
  const auto router = router_of(options, model);
  LoadTable table;
  table.load = Array<Tokens, 4>(shape);
  table.top_k = options.top_k;
  table.ranks_per_node = ranks_per_node_of(options);
  table.name = describe(options, model);
  SequenceDraw draw(options, *router);
  for (const SyntheticSequence& sequence : draw_sequences(options, *router)) {
    for (int l = 0; l < options.num_layers; ++l) {
      const auto counts = draw.counts(sequence, LayerId{l});
      const auto load = table.load.row(sequence.micro_step, l, sequence.rank);
      for (std::size_t e = 0; e < load.size(); ++e) load[e] += Tokens{counts[e]};
    }
  }
  return table;
}

RoutingTrace synthesize_trace(const SynthesisOptions& options, const RoutingModel& model) {
  check(options);
  const double entries = 1.0 * options.num_micro_steps * options.num_ranks *
                         static_cast<double>(options.tokens_per_rank) * options.num_layers * options.top_k;
  const RouteType type = narrowest_route_type(options.num_experts);
  expect_memory(entries * static_cast<double>(size_of(type)), {.field = "tokens_per_rank"});
  const auto router = router_of(options, model);
  const auto sequences = draw_sequences(options, *router);
  RoutingTrace trace = outline(options, sequences);
  trace.origin = "synthetic: " + describe(options, model);

  const std::size_t width = size_of(trace.type);
  const auto top_k = static_cast<std::size_t>(options.top_k);
  const std::size_t token_entries = top_k * static_cast<std::size_t>(options.num_layers);
  auto storage =
      std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(trace.num_tokens) * token_entries * width);
  SequenceDraw draw(options, *router);
  for (const SyntheticSequence& sequence : sequences) {
    const auto first =
        static_cast<std::size_t>(trace.cu_seqlens[static_cast<std::size_t>(sequence.index)]) * token_entries;
    for (int l = 0; l < options.num_layers; ++l) {
      const auto rows = draw.rows(sequence, LayerId{l});
      std::byte* const layer = storage->data() + (first + static_cast<std::size_t>(l) * top_k) * width;
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const auto expert = static_cast<std::uint16_t>(rows[i]);  // little-endian: the first bytes are the narrow value
        std::memcpy(layer + (i / top_k * token_entries + i % top_k) * width, &expert, width);
      }
    }
  }
  trace.routes = storage->data();
  trace.storage = std::move(storage);
  return trace;
}

std::string describe(const SynthesisOptions& options, const RoutingModel& model) {
  struct Name {
    std::string operator()(const ZipfRouting& zipf) const {
      return fmt::format("zipf skew={} permute_probability={}", zipf.skew, zipf.permute_probability);
    }
    std::string operator()(const DirichletRouting& dirichlet) const {
      return fmt::format("dirichlet concentration={} sequence_concentration={}", dirichlet.concentration,
                         dirichlet.sequence_concentration);
    }
    std::string operator()(const GrpoRouting& grpo) const {
      return fmt::format("grpo step_spread={} group_spread={}", grpo.step_spread, grpo.group_spread);
    }
    std::string operator()(StressWorkload workload) const {
      return fmt::format("{} ({})", name_of(workload), description_of(workload));
    }
  };
  const std::string groups =
      options.groups.restrict_tokens(options.top_k)
          ? fmt::format(", {} of {} groups of experts per token", options.groups.per_token, options.groups.count)
          : "";
  return fmt::format("{}{}, {} sequences of a group {}, seed {}", std::visit(Name{}, model), groups, options.group_size,
                     options.layout == Layout::kGrouped ? "together" : "shuffled", options.seed);
}

}  // namespace foremoe

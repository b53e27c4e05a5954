#include "foremoe/homes/choose_homes.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/planner/planner.h"
#include "foremoe/rollout/count_routes.h"

namespace foremoe {
namespace {

// Sequences of one trace.
struct Part {
  const BatchedTrace* batched = nullptr;
  std::vector<int> sequences;
};

Part all_of(const BatchedTrace& batched) {
  Part part{.batched = &batched, .sequences = std::vector<int>(batched.trace.num_sequences())};
  std::iota(part.sequences.begin(), part.sequences.end(), 0);
  return part;
}

void expect_same_shape(const BatchedTrace& first, const BatchedTrace& other) {
  const auto shape = [](const BatchedTrace& b) {
    return std::array{b.trace.num_layers, b.trace.num_experts, b.trace.top_k, b.batching.num_ranks,
                      b.batching.ranks_per_node};
  };
  if (shape(first) == shape(other)) return;
  throw InputError({.file = other.trace.name},
                   fmt::format("has [layers, experts, top-k, ranks, ranks per node] {}; {} has {}", shape(other),
                               first.trace.name, shape(first)));
}

// Moves whole groups, evenly spaced in the order of their first sequence, to the second part.
std::pair<Part, Part> split(const BatchedTrace& batched, double fraction) {
  const RoutingTrace& trace = batched.trace;
  Part kept{.batched = &batched};
  Part held{.batched = &batched};
  std::map<int, bool> is_held;  // by group
  for (int s = 0; s < trace.num_sequences(); ++s) {
    const int group = trace.group_ids.empty() ? s : trace.group_ids[s];
    if (!is_held.contains(group)) {
      const auto i = static_cast<double>(is_held.size());
      is_held[group] = std::floor((i + 1) * fraction) > std::floor(i * fraction);
    }
    (is_held[group] ? held : kept).sequences.push_back(s);
  }
  if (kept.sequences.empty() || held.sequences.empty()) {
    throw InputError({.field = "holdout"}, fmt::format("{} selects none or all of the {} groups of {}", fraction,
                                                       is_held.size(), trace.name));
  }
  return {std::move(kept), std::move(held)};
}

TokenSets tokens_of(std::span<const Part> parts, LayerId layer) {
  const RoutingTrace& trace = parts.front().batched->trace;
  TokenSets sets{.num_experts = trace.num_experts, .top_k = trace.top_k};
  for (const Part& part : parts) append_tokens(*part.batched, part.sequences, layer, sets);
  return sets;
}

int count_sequences(std::span<const Part> parts) {
  std::size_t n = 0;
  for (const Part& part : parts) n += part.sequences.size();
  return static_cast<int>(n);
}

}  // namespace

std::vector<Option> options_of(HomesOptions& o) {
  const std::string group = "Search";
  return {
      number_option({.name = "balance",
                     .value = "FRACTION",
                     .help = "Load of a node above its share that costs nothing. Every further token–expert "
                             "assignment costs as much as a pair",
                     .group = group},
                    o.search.tolerance, {.least = 0}),
      integer_option({.name = "sweeps",
                      .value = "N",
                      .help = "Exchanges to try, in multiples of the number of pairs of experts",
                      .group = group},
                     o.search.sweeps, {0, 100'000}),
      integer_option({.name = "sample",
                      .value = "TOKENS",
                      .help = "Largest number of tokens per layer that the search uses, evenly spaced. Figures "
                              "use all tokens",
                      .group = group},
                     o.tokens, {1, std::int64_t{1} << 30}),
      seed_option(
          {.name = "seed", .value = "N", .help = "Random seed. The same seed produces the same homes", .group = group},
          o.search.seed)};
}

// Throws InputError unless all traces are valid, of the same shape, and of experts that their ranks can share.
static void expect_alike(std::span<const BatchedTrace> traces, const Holdout& holdout) {
  if (traces.empty()) throw InputError({.field = "traces"}, "there is none");
  const BatchedTrace& first = traces.front();
  const auto expect_valid = [&](const BatchedTrace& other) {
    foremoe::expect_valid(other.batching, other.trace);
    expect_same_shape(first, other);
    check_routes(other.trace);
  };
  for (const BatchedTrace& other : traces) expect_valid(other);
  if (holdout.trace != nullptr) expect_valid(*holdout.trace);
  if (first.trace.num_experts % first.batching.num_ranks != 0) {
    throw InputError({.file = first.trace.name},
                     fmt::format("has {} experts, which cannot be spread evenly over {} ranks", first.trace.num_experts,
                                 first.batching.num_ranks));
  }
}

ChosenHomes choose_homes(std::span<const BatchedTrace> traces, const Holdout& holdout, const HomesOptions& options,
                         ThreadPool& pool) {
  expect_alike(traces, holdout);
  const BatchedTrace& first = traces.front();
  std::vector<Part> fitted;
  std::vector<Part> held_out;
  std::vector<std::string> names;
  for (const BatchedTrace& batched : traces) {
    names.push_back(batched.trace.name);
    if (holdout.fraction > 0) {
      auto [kept, held] = split(batched, holdout.fraction);
      fitted.push_back(std::move(kept));
      held_out.push_back(std::move(held));
    } else {
      fitted.push_back(all_of(batched));
    }
  }
  if (holdout.trace != nullptr) held_out.push_back(all_of(*holdout.trace));

  const int num_layers = first.trace.num_layers;
  const Topology topology{first.batching.num_ranks, first.batching.ranks_per_node};
  ChosenHomes chosen{.homes = {.home = contiguous_homes(num_layers, first.trace.num_experts, topology.num_ranks,
                                                        first.trace.experts_of_layer),
                               .num_ranks = topology.num_ranks,
                               .ranks_per_node = topology.ranks_per_node,
                               .origin = fmt::format("chosen from {}", fmt::join(names, ", "))},
                     .fitted = {.num_sequences = count_sequences(fitted)}};
  struct Layer {
    HomesJudgement fitted, held_out;
    int num_moved = 0;
  };
  std::vector<Layer> layers(num_layers);
  pool.parts().begin(num_layers);
  pool.for_each_index(layers.size(), [&](std::size_t l, std::size_t) {
    const std::span<RankId> home = chosen.homes.home.row(l);
    const std::vector<RankId> contiguous(home.begin(), home.end());
    TokenSets sets = tokens_of(fitted, LayerId{l});
    const TokenSets all = sets;
    thin(sets, static_cast<std::size_t>(options.tokens));
    std::ranges::copy(search_homes(contiguous, sets, topology, options.search), home.begin());
    for (std::size_t e = 0; e < home.size(); ++e) layers[l].num_moved += home[e] == contiguous[e] ? 0 : 1;
    const auto judge = [&](const TokenSets& tokens, HomesJudgement& judgement) {
      judgement.contiguous = costs_of(contiguous, tokens, topology);
      judgement.chosen = costs_of(home, tokens, topology);
    };
    judge(all, layers[l].fitted);
    if (!held_out.empty()) judge(tokens_of(held_out, LayerId{l}), layers[l].held_out);
    pool.parts().add();
  });
  if (!held_out.empty()) chosen.held_out.emplace().num_sequences = count_sequences(held_out);
  for (const Layer& layer : layers) {
    chosen.num_moved += layer.num_moved;
    chosen.fitted.contiguous += layer.fitted.contiguous;
    chosen.fitted.chosen += layer.fitted.chosen;
    if (!chosen.held_out) continue;
    chosen.held_out->contiguous += layer.held_out.contiguous;
    chosen.held_out->chosen += layer.held_out.chosen;
  }
  return chosen;
}

}  // namespace foremoe

// Tokens per expert without source ranks, as engines dump them. Python decodes the files (foremoe/_counts.py).

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/importers/formats.h"
#include "foremoe/rollout/load_statistics.h"

namespace foremoe {
namespace {

using Steps = std::vector<std::vector<std::int64_t>>;  // [step][layer · experts + expert], tokens

// Adds the steps of one forward pass.
Steps add_up(std::span<const DecodedSequence> parts, std::size_t layers, std::size_t experts) {
  Steps all;
  std::map<std::int64_t, std::size_t> step_of_pass;
  for (const DecodedSequence& part : parts) {
    const auto& array = std::get<IntegerArray>(part.content);
    if (array.shape[1] != layers || array.shape[2] != experts) {
      throw InputError(part.where, fmt::format("has {} layers of {} experts, but the first counts have {} of {}",
                                               array.shape[1], array.shape[2], layers, experts));
    }
    const auto* values = reinterpret_cast<const std::int64_t*>(array.bytes.data());
    for (std::size_t s = 0; s < array.shape[0]; ++s, values += layers * experts) {
      const std::size_t step =
          part.forward_pass ? step_of_pass.try_emplace(*part.forward_pass, all.size()).first->second : all.size();
      if (step == all.size()) all.emplace_back(layers * experts);
      std::transform(all[step].begin(), all[step].end(), values, all[step].begin(), std::plus{});
    }
  }
  return all;
}

void expect_options(int layers, int experts, const Where& where, const ImportOptions& options) {
  const auto expect = [](bool valid, const Where& at, const std::string& what) {
    if (!valid) throw InputError(at, what);
  };
  const Where ranks{.field = "ranks"};
  const Where top_k{.field = "top_k"};
  expect(options.num_experts == 0 || experts == options.num_experts, where,
         fmt::format("has {} experts, but {} were asked for", experts, options.num_experts));
  expect(options.num_layers == 0 || layers == options.num_layers, where,
         fmt::format("has {} layers, but {} were asked for", layers, options.num_layers));
  expect(options.ranks != 0, ranks,
         fmt::format("is missing: counts have no ranks, and the homes of experts depend on them{}",
                     options.top_k != 0 ? "" : ". `top_k` (or a known `model`) is missing, too"));
  expect(experts % options.ranks == 0, ranks,
         fmt::format("{}, which does not divide the {} experts", options.ranks, experts));
  expect(options.top_k != 0, top_k,
         "is missing: counts do not tell how many experts a token chooses. A known `model` gives it, too");
  expect(options.top_k <= experts, top_k, fmt::format("{}, but there are {} experts", options.top_k, experts));
}

// Removes steps without tokens and returns the layers with tokens.
std::vector<int> drop_empty(Steps& steps, std::size_t layers, const Where& where, std::vector<std::string>& notes) {
  const auto any = [](const auto& tokens) { return std::ranges::any_of(tokens, [](auto n) { return n != 0; }); };
  const std::size_t dropped = std::erase_if(steps, [&](const auto& step) { return !any(step); });
  if (steps.empty()) throw InputError(where, "has no tokens");
  if (dropped != 0) notes.push_back(fmt::format("{} steps without tokens are dropped", dropped));
  const std::size_t experts = steps.front().size() / layers;
  std::vector<int> kept;
  std::vector<int> empty;
  for (std::size_t l = 0; l < layers; ++l) {
    const auto in_layer = [&](const auto& step) { return any(std::span(step).subspan(l * experts, experts)); };
    (std::ranges::any_of(steps, in_layer) ? kept : empty).push_back(static_cast<int>(l));
  }
  if (!empty.empty()) {
    notes.push_back(fmt::format(
        "layers without tokens, as dense layers have none, are dropped: {}{}", fmt::join(empty, ", "),
        empty.back() + 1 != std::ssize(empty) ? ""
                                              : fmt::format(". foremoe maps needs --dense-layers {}", empty.size())));
  }
  return kept;
}

}  // namespace

void share_evenly(std::int64_t tokens, std::size_t micro_step, std::size_t layer, std::size_t expert,
                  LoadTable& table) {
  const std::size_t ranks = table.load.extent(2);
  const std::int64_t share = tokens / static_cast<std::int64_t>(ranks);
  const std::size_t remainder = static_cast<std::size_t>(tokens) % ranks;
  for (std::size_t i = 0; i < ranks; ++i)
    table.load(micro_step, layer, (expert + i) % ranks, expert) = Tokens{share + (i < remainder ? 1 : 0)};
}

Imported import_counts(std::span<const DecodedSequence> parts, const ImportOptions& options) {
  const Where& where = parts.front().where;
  const auto [_, layers, experts] = std::get<IntegerArray>(parts.front().content).shape;
  expect_options(static_cast<int>(layers), static_cast<int>(experts), where, options);
  Steps steps = add_up(parts, layers, experts);
  ImportReport report{.num_experts_inferred = options.num_experts == 0};
  report.notes.push_back(fmt::format(
      "counts have no source ranks: each of {} ranks sends an even part of every expert's tokens", options.ranks));
  report.layer_ids = drop_empty(steps, layers, where, report.notes);
  const std::array<std::size_t, 4> shape{steps.size(), report.layer_ids.size(), static_cast<std::size_t>(options.ranks),
                                         experts};
  expect_load_shape(shape, where.file);
  const int ranks_per_node = options.ranks_per_node > 0 ? options.ranks_per_node : kDefaultRanksPerNode;
  LoadTable table{.load = Array<Tokens, 4>(shape),
                  .top_k = options.top_k,
                  .ranks_per_node = std::min(ranks_per_node, options.ranks),
                  .name = options.model};
  bool is_even = true;
  for (std::size_t m = 0; m < shape[0]; ++m) {
    is_even &= std::accumulate(steps[m].begin(), steps[m].end(), std::int64_t{0}) % options.top_k == 0;
    for (std::size_t l = 0; l < shape[1]; ++l) {
      const std::int64_t* const tokens = &steps[m][static_cast<std::size_t>(report.layer_ids[l]) * experts];
      for (std::size_t e = 0; e < experts; ++e) share_evenly(tokens[e], m, l, e, table);
    }
  }
  expect_valid(table, where.file);
  constexpr std::int64_t kLargeMicroStep = 1 << 16;  // tokens of a rank
  if (const Tokens mean = mean_tokens_per_rank(table); mean.value > kLargeMicroStep) {
    report.notes.push_back(
        fmt::format("a step has {} tokens per rank: more than a micro-step, so ρ is meaningful, and "
                    "seconds and memory are not",
                    mean.value));
  }
  if (!is_even)
    report.notes.push_back(fmt::format("a step's tokens are no multiple of top-{}: check it", options.top_k));
  return {std::move(table), std::move(report)};
}

}  // namespace foremoe

// Megatron-LM's tokens per expert: each rank has a file tokens_per_expert/rank{N}.jsonl of
//   {"iter", "block", "layer", "tpe": [[count per expert] per micro-batch]}.
// The micro-batches of an iteration become micro-steps; iterations are concatenated.
//
// Megatron counts at the experts' first projection, after dispatch: rank N counts the tokens that its own experts
// *received* (E/R numbers). Source ranks are not recorded. The importer assumes uniform sources, which makes loads per
// rank exact but traffic approximate. Other tools log counts at the *source* under the same keys, over all E experts.
// num_experts distinguishes the two. Without num_experts, the importer compares the layers of a micro-step. With source
// counts, each rank's sum is equal in all layers. With received counts, only the total over ranks is.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "foremoe/rollout/importers/formats.h"
#include "foremoe/rollout/importers/megatron_records.h"

namespace foremoe {

namespace {

constexpr std::int64_t kMaxCount = std::numeric_limits<std::uint32_t>::max();

using Counts = std::vector<std::vector<std::int64_t>>;  // [micro-batch][expert as logged]

struct Log {
  std::set<std::int64_t> iterations;
  std::set<std::int32_t> ranks;
  std::map<std::tuple<std::int64_t, std::int32_t, MegatronRouter>, std::pair<Counts, Where>>
      counts;             // by (iteration, rank, router)
  std::size_t width = 0;  // counts per micro-batch
};

// Returns N of the last "rank{N}" in a file name.
std::optional<std::int32_t> rank_in_name(std::string_view name) {
  const auto at = name.rfind("rank");
  if (at == std::string_view::npos) return std::nullopt;
  const char* begin = name.data() + at + 4;
  std::int32_t rank = 0;
  const auto [end, error] = std::from_chars(begin, name.data() + name.size(), rank);
  const bool valid = end != begin && error == std::errc{} && rank >= 0 && rank <= kMaxMegatronRank;
  return valid ? std::optional(rank) : std::nullopt;
}

Counts read_counts(const nlohmann::json& record, const Where& where, std::size_t& width) {
  const Where place = with_field(where, "tpe");
  const auto tpe = record.find("tpe");
  if (tpe == record.end() || !tpe->is_array()) throw InputError(place, "should be a list of micro-batches");
  Counts counts;
  for (std::size_t m = 0; m < tpe->size(); ++m) {
    const auto& row = (*tpe)[m];
    const Where row_place = with_index(place, fmt::format("[{}]", m));
    if (!row.is_array() || row.empty()) throw InputError(row_place, "should be a list of counts");
    if (width == 0) width = row.size();
    if (row.size() != width)
      throw InputError(row_place, fmt::format("has {} counts, but the first had {}", row.size(), width));
    auto& of_batch = counts.emplace_back();
    for (std::size_t e = 0; e < row.size(); ++e) {
      const auto entry = [&] { return with_index(place, fmt::format("[{}, {}]", m, e)); };
      const std::int64_t count =
          row[e].is_number_integer() ? row[e].get<std::int64_t>() : integer_entry(row[e], entry());
      if (count < 0 || count > kMaxCount)
        throw InputError(entry(), fmt::format("{} is not in [0, {}]", count, kMaxCount));
      of_batch.push_back(count);
    }
  }
  return counts;
}

Log read_log(std::span<const ImportSource> sources) {
  Log log;
  const bool named = std::all_of(sources.begin(), sources.end(),
                                 [](const auto& source) { return rank_in_name(source.name).has_value(); });
  for (std::size_t s = 0; s < sources.size(); ++s) {
    const auto rank = named ? *rank_in_name(sources[s].name) : static_cast<std::int32_t>(s);
    for_each_record(sources[s], [&](const nlohmann::json& record, const Where& where) {
      const std::int64_t iteration = integer_member(record, "iter", 0, std::numeric_limits<std::int64_t>::max(), where);
      const auto [at, fresh] = log.counts.try_emplace({iteration, rank, router_of(record, where)},
                                                      read_counts(record, where, log.width), where);
      if (!fresh) {
        throw InputError(
            with_field(where, "layer"),
            fmt::format("was already counted in iteration {} on rank {} ({}, {}); is the rank given twice?", iteration,
                        rank, at->second.second.file, at->second.second.field));
      }
      log.iterations.insert(iteration);
      log.ranks.insert(rank);
    });
  }
  if (log.counts.empty() || log.width == 0) throw InputError({.file = sources.front().name}, "holds no counts");
  return log;
}

// The log as a dense array: every router of every iteration, on every rank of its stage.
struct DenseLog {
  Array<std::int64_t, 4> count;  // [micro_step][layer][rank][expert as logged]
  std::vector<std::int32_t> layer_ids;
};

DenseLog densify(const Log& log, const MegatronRanks& ranks, const std::string& file) {
  std::set<MegatronRouter> routers;
  std::map<std::int64_t, std::size_t> micro_batches;  // [iteration]
  std::map<std::tuple<std::int64_t, std::int32_t, MegatronRouter>, const Counts*> staged;
  for (const auto& [key, value] : log.counts) {
    auto [iteration, rank, router] = key;
    const auto& [counts, where] = value;
    const RankPlace place = ranks.place_of(rank);
    router.stage = place.stage;
    routers.insert(router);
    staged[{iteration, place.rank, router}] = &counts;
    const auto [at, fresh] = micro_batches.try_emplace(iteration, counts.size());
    if (at->second != counts.size()) {
      throw InputError(with_field(where, "tpe"), fmt::format("has {} micro-batches, but iteration {} began with {}",
                                                             counts.size(), iteration, at->second));
    }
  }
  // Check completeness before allocating the array, so that the array is no larger than the input.
  for (const auto& [iteration, batches] : micro_batches) {
    for (const MegatronRouter& router : routers) {
      for (std::int32_t rank = 0; rank < ranks.per_stage(); ++rank) {
        if (!staged.contains({iteration, rank, router})) {
          throw InputError(
              {.file = file, .field = "tpe"},
              fmt::format("{} layer {} has no counts in iteration {} on rank {}", router.mtp ? "mtp" : "decoder",
                          router.layer, iteration, ranks.first() + router.stage * ranks.per_stage() + rank));
        }
      }
    }
  }
  const std::size_t micro_steps =
      std::accumulate(micro_batches.begin(), micro_batches.end(), std::size_t{0},
                      [](std::size_t sum, const auto& entry) { return sum + entry.second; });
  DenseLog dense{.count = Array<std::int64_t, 4>(
                     {micro_steps, routers.size(), static_cast<std::size_t>(ranks.per_stage()), log.width}),
                 .layer_ids = layer_ids_of(routers)};
  std::size_t first = 0;
  for (const auto& [iteration, batches] : micro_batches) {
    std::size_t layer = 0;
    for (const MegatronRouter& router : routers) {
      for (std::int32_t rank = 0; rank < ranks.per_stage(); ++rank) {
        const Counts& counts = *staged.at({iteration, rank, router});
        for (std::size_t m = 0; m < batches; ++m)
          std::copy(counts[m].begin(), counts[m].end(), dense.count.row(first + m, layer, rank).begin());
      }
      ++layer;
    }
    first += batches;
  }
  return dense;
}

bool looks_received(const Array<std::int64_t, 4>& count) {
  bool rank_sums_differ = false;
  for (std::size_t m = 0; m < count.extent(0); ++m) {
    std::vector<std::int64_t> first_layer;
    for (std::size_t l = 0; l < count.extent(1); ++l) {
      std::vector<std::int64_t> sums;
      for (std::size_t r = 0; r < count.extent(2); ++r) {
        const auto row = count.row(m, l, r);
        sums.push_back(std::accumulate(row.begin(), row.end(), std::int64_t{0}));
      }
      if (l == 0) first_layer = sums;
      rank_sums_differ |= sums != first_layer;
      const auto total = [](const auto& values) {
        return std::accumulate(values.begin(), values.end(), std::int64_t{0});
      };
      if (total(sums) != total(first_layer)) return false;
    }
  }
  return rank_sums_differ;
}

bool decide_received(const Array<std::int64_t, 4>& count, const ImportOptions& options, const std::string& file) {
  const auto ranks = static_cast<std::int64_t>(count.extent(2));
  const auto width = static_cast<std::int64_t>(count.extent(3));
  const auto fits = [&](std::int64_t experts) { return options.num_experts == 0 || experts == options.num_experts; };
  switch (options.counts_at) {
    case CountsAt::kSource:
      if (fits(width)) return false;
      break;
    case CountsAt::kReceived:
      if (fits(width * ranks)) return true;
      break;
    case CountsAt::kAuto:
      if (options.num_experts == 0) return looks_received(count);
      if (fits(width)) return false;
      if (fits(width * ranks)) return true;
      break;
  }
  throw InputError({.file = file, .field = "tpe"}, fmt::format("{} counts on each of {} ranks do not make {} experts",
                                                               width, ranks, options.num_experts));
}

void spread_received(const Array<std::int64_t, 4>& count, LoadTable& table) {
  const std::size_t ranks = count.extent(2);
  const std::size_t width = count.extent(3);
  for (std::size_t m = 0; m < count.extent(0); ++m) {
    for (std::size_t l = 0; l < count.extent(1); ++l) {
      for (std::size_t e = 0; e < ranks * width; ++e) {
        share_evenly(count(m, l, e / width, e % width), m, l, e, table);
      }
    }
  }
}

}  // namespace

Imported import_megatron_counts(std::span<const ImportSource> sources, const ImportOptions& options) {
  const std::string& file = sources.front().name;
  const Log log = read_log(sources);
  const MegatronRanks ranks(log.ranks, options.pipeline_stages, file);
  const DenseLog dense = densify(log, ranks, file);
  const bool received = decide_received(dense.count, options, file);
  const std::size_t num_ranks = dense.count.extent(2);
  const std::size_t num_experts = dense.count.extent(3) * (received ? num_ranks : 1);
  if (num_experts > static_cast<std::size_t>(kMaxImportedExperts)) {
    throw InputError({.file = file, .field = "tpe"},
                     fmt::format("{} experts are more than {}", num_experts, kMaxImportedExperts));
  }

  if (static_cast<std::size_t>(options.top_k) > num_experts) {
    throw InputError(
        {.file = file, .field = "tpe"},
        fmt::format("{} experts, too few to be chosen {} at a time (`top_k`)", num_experts, options.top_k));
  }

  ImportReport report;
  LoadTable table;
  const std::array shape{dense.count.extent(0), dense.count.extent(1), num_ranks, num_experts};
  expect_load_shape(shape, file);
  table.load = Array<Tokens, 4>(shape);
  if (received) {
    spread_received(dense.count, table);
    report.notes.push_back(
        "read as tokens received by each rank's own experts; all sources are assumed to send equally many");
  } else {
    std::transform(dense.count.flat().begin(), dense.count.flat().end(), table.load.flat().begin(),
                   [](std::int64_t count) { return Tokens{count}; });
    report.notes.push_back("read as choices of each rank's own tokens among all experts");
  }
  table.top_k = std::max(1, options.top_k);
  if (options.top_k == 0) report.notes.push_back("top_k is not in the counts; 1 was assumed");
  table.ranks_per_node =
      options.ranks_per_node > 0 ? options.ranks_per_node : static_cast<int>(std::min<std::size_t>(8, num_ranks));
  table.name = options.model;
  report.num_experts_inferred = options.num_experts == 0;
  return {std::move(table), std::move(report)};
}

}  // namespace foremoe

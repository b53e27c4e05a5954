// Megatron-LM's router trace: each rank has a file of router calls,
//   {"step", "stage": "pre_dispatch", "block", "layer", "rank", "num_tokens", "topk", "top_indices": [[…], …]}.
// Records have no micro-batch number: the n-th call of a router on a rank becomes one sequence of micro-step n.
// Recorded steps are concatenated. If a router has fewer calls than others of its rank, its last calls are missing. If
// more rows are missing than recorded, the import fails, since some files must belong to another pipeline stage.
// Recomputation repeats a router call with the same tokens: repeats are reported, and dropped on request.

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "foremoe/rollout/importers/formats.h"
#include "foremoe/rollout/importers/megatron_records.h"

namespace foremoe {

namespace {

struct Call {
  Where where;
  std::int64_t num_tokens = 0;
  std::int64_t top_k = 0;
  std::vector<std::int32_t> ids;  // [num_tokens][top_k]

  bool same_routes(const Call& other) const { return num_tokens == other.num_tokens && ids == other.ids; }
};

using Calls = std::vector<Call>;  // calls of one router on one rank, in file order
using CallsByRank = std::map<std::int32_t, std::map<MegatronRouter, Calls>>;

Call read_call(const nlohmann::json& record, const Where& where, std::int64_t num_experts) {
  const std::int64_t last_expert = (num_experts > 0 ? num_experts : kMaxImportedExperts) - 1;
  Call call{.where = where};
  const Where place = with_field(where, "top_indices");
  const auto rows = record.find("top_indices");
  if (rows == record.end() || !rows->is_array()) throw InputError(place, "should be a list of rows");
  call.num_tokens = static_cast<std::int64_t>(rows->size());
  if (record.contains("num_tokens")) integer_member(record, "num_tokens", call.num_tokens, call.num_tokens, where);
  call.top_k = rows->empty() || !rows->front().is_array() ? 0 : static_cast<std::int64_t>(rows->front().size());
  if (record.contains("topk")) call.top_k = integer_member(record, "topk", 1, kMaxImportedExperts, where);
  for (std::size_t t = 0; t < rows->size(); ++t) {
    const auto& row = (*rows)[t];
    if (!row.is_array() || static_cast<std::int64_t>(row.size()) != call.top_k) {
      throw InputError(with_index(place, fmt::format("[{}]", t)),
                       fmt::format("should be a list of {} experts", call.top_k));
    }
    for (std::size_t k = 0; k < row.size(); ++k) {
      const auto index = [&] { return with_index(place, fmt::format("[{}, {}]", t, k)); };
      const std::int64_t id = row[k].is_number_integer() ? row[k].get<std::int64_t>() : integer_entry(row[k], index());
      if (id < -1 || id > last_expert) {
        throw InputError(index(), fmt::format("expert {} is out of range; the last is {}", id, last_expert));
      }
      call.ids.push_back(static_cast<std::int32_t>(id));
    }
  }
  return call;
}

CallsByRank read_calls(std::span<const ImportSource> sources, const ImportOptions& options, ImportReport& report) {
  CallsByRank calls;
  std::set<std::int64_t> steps;
  std::int64_t other_stages = 0;
  std::map<std::int32_t, std::size_t> source_of_rank;
  for (std::size_t s = 0; s < sources.size(); ++s) {
    for_each_record(sources[s], [&](const nlohmann::json& record, const Where& where) {
      if (record.contains("stage") && record["stage"] != "pre_dispatch") {
        ++other_stages;
        return;
      }
      if (record.contains("step")) steps.insert(integer_entry(record["step"], with_field(where, "step")));
      const auto rank = static_cast<std::int32_t>(integer_member(record, "rank", 0, kMaxMegatronRank, where));
      const auto [known, first] = source_of_rank.try_emplace(rank, s);
      if (known->second != s) {
        throw InputError(with_field(where, "rank"), fmt::format("rank {} is in {} already; a rank has one file", rank,
                                                                sources[known->second].name));
      }
      calls[rank][router_of(record, where)].push_back(read_call(record, where, options.num_experts));
    });
  }
  if (calls.empty()) throw InputError({.file = sources.front().name}, "holds no router call");
  if (steps.size() > 1) {
    report.notes.push_back(fmt::format("{} recorded steps follow one another as micro-steps of one", steps.size()));
  }
  if (other_stages > 0)
    report.notes.push_back(fmt::format("{} records of stages other than pre_dispatch were skipped", other_stages));
  return calls;
}

// Removes repeats: calls that equal an earlier call not yet repeated. Returns the number of repeats.
std::size_t split_recomputed(const Calls& calls, Calls& kept) {
  std::vector<std::size_t> unrepeated;  // indices into kept
  for (const Call& call : calls) {
    const auto first =
        std::find_if(unrepeated.begin(), unrepeated.end(), [&](std::size_t i) { return kept[i].same_routes(call); });
    if (first != unrepeated.end()) {
      unrepeated.erase(first);
    } else {
      unrepeated.push_back(kept.size());
      kept.push_back(call);
    }
  }
  return calls.size() - kept.size();
}

void handle_recomputed(CallsByRank& calls, bool drop, ImportReport& report) {
  std::size_t repeats = 0;
  for (auto& [rank, by_router] : calls) {
    for (auto& [router, of_router] : by_router) {
      Calls kept;
      repeats += split_recomputed(of_router, kept);
      if (drop) of_router = std::move(kept);
    }
  }
  if (repeats == 0) return;
  report.notes.push_back(drop
                             ? fmt::format("{} recomputed calls were dropped", repeats)
                             : fmt::format("{} calls repeat an earlier call of their router; if that is recomputation, "
                                           "ask for it to be dropped",
                                           repeats));
}

class MicroSteps {
 public:
  MicroSteps(const CallsByRank& calls, const ImportOptions& options, const std::string& file)
      : ranks_(ranks_of(calls), options.pipeline_stages, file), file_(file) {
    for (const auto& [recorded_rank, by_router] : calls) {
      const RankPlace place = ranks_.place_of(recorded_rank);
      for (const auto& [router, of_router] : by_router) {
        MegatronRouter staged = router;
        staged.stage = place.stage;
        routers_.insert(staged);
        calls_[place.rank][staged] = &of_router;
        num_micro_steps_ = std::max(num_micro_steps_, of_router.size());
      }
    }
  }

  void append_to(TraceAssembler& assembler) const {
    check_skipped();
    for (std::size_t n = 0; n < num_micro_steps_; ++n) {
      for (const auto& [rank, by_router] : calls_) append(assembler, n, rank);
    }
    assembler.set_layer_ids(layer_ids_of(routers_));
    if (ranks_.first() > 0) {
      assembler.report().notes.push_back(fmt::format("rank {} of the files is rank 0 of the trace", ranks_.first()));
    }
  }

 private:
  static std::set<std::int32_t> ranks_of(const CallsByRank& calls) {
    std::set<std::int32_t> ranks;
    for (const auto& entry : calls) ranks.insert(entry.first);
    return ranks;
  }

  const Call* find(std::int32_t rank, const MegatronRouter& router, std::size_t n) const {
    const auto& by_router = calls_.at(rank);
    const auto found = by_router.find(router);
    return found == by_router.end() || n >= found->second->size() ? nullptr : &(*found->second)[n];
  }

  // Returns any recorded call of the micro-step; throws InputError if its calls differ in tokens or top-k.
  const Call* leader(std::size_t n, std::int32_t rank) const {
    const Call* first = nullptr;
    for (const MegatronRouter& router : routers_) {
      const Call* call = find(rank, router, n);
      if (!call) continue;
      if (!first) first = call;
      if (call->num_tokens != first->num_tokens || call->top_k != first->top_k) {
        throw InputError(
            with_field(call->where, "top_indices"),
            fmt::format("has {} tokens and top-{}, but micro-step {} of rank {} began with {} and top-{} ({}, {})",
                        call->num_tokens, call->top_k, n, rank, first->num_tokens, first->top_k, first->where.file,
                        first->where.field));
      }
    }
    return first;
  }

  // Limits memory by the recorded rows, and detects files of different pipeline stages.
  void check_skipped() const {
    std::size_t recorded = 0;
    std::size_t skipped = 0;
    for (std::size_t n = 0; n < num_micro_steps_; ++n) {
      for (const auto& [rank, by_router] : calls_) {
        const Call* first = leader(n, rank);
        if (!first) continue;
        const auto called = static_cast<std::size_t>(std::count_if(
            by_router.begin(), by_router.end(), [&](const auto& entry) { return n < entry.second->size(); }));
        recorded += called * static_cast<std::size_t>(first->num_tokens);
        skipped += (routers_.size() - called) * static_cast<std::size_t>(first->num_tokens);
      }
    }
    if (skipped > recorded) {
      throw InputError(
          {.file = file_, .field = "layer"},
          fmt::format("{} rows of {} were never recorded; are these files of several pipeline stages or steps?",
                      skipped, skipped + recorded));
    }
  }

  void append(TraceAssembler& assembler, std::size_t n, std::int32_t rank) const {
    const Call* first = leader(n, rank);
    if (!first) return;
    Where where = first->where;
    where.index = fmt::format("micro-step {} of rank {}", n, rank);
    const auto top_k = static_cast<std::size_t>(first->top_k);
    assembler.begin_sequence(where, {.num_tokens = first->num_tokens,
                                     .num_layers = static_cast<std::int64_t>(routers_.size()),
                                     .top_k = first->top_k,
                                     .micro_step = static_cast<std::int32_t>(n),
                                     .rank = rank});
    std::vector<const Call*> layers;
    for (const MegatronRouter& router : routers_) layers.push_back(find(rank, router, n));
    std::vector<std::int64_t> row(top_k);
    for (std::size_t t = 0; t < static_cast<std::size_t>(first->num_tokens); ++t) {
      for (const Call* call : layers) {
        if (!call) {
          assembler.add_skipped_row();
          continue;
        }
        std::copy_n(call->ids.begin() + static_cast<std::ptrdiff_t>(t * top_k), top_k, row.begin());
        assembler.add_row(row);
      }
    }
  }

  MegatronRanks ranks_;
  std::string file_;
  std::set<MegatronRouter> routers_;
  std::map<std::int32_t, std::map<MegatronRouter, const Calls*>> calls_;  // by rank within its stage
  std::size_t num_micro_steps_ = 0;
};

}  // namespace

void import_megatron_trace(std::span<const ImportSource> sources, const ImportOptions& options,
                           TraceAssembler& assembler) {
  CallsByRank calls = read_calls(sources, options, assembler.report());
  handle_recomputed(calls, options.drop_recomputed, assembler.report());
  MicroSteps(calls, options, sources.front().name).append_to(assembler);
}

}  // namespace foremoe

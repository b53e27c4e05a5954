#pragma once

// Shared by the importers of Megatron-LM's two logs. Each rank writes one file with one JSON object per line. Block and
// layer identify a router. Layers are numbered within their pipeline stage, ranks globally. Ascending ranks are split
// into `pipeline_stages` equal runs with consecutive layers.

#include <compare>
#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <span>
#include <string_view>
#include <vector>

#include "foremoe/rollout/importers/importer.h"
#include "foremoe/rollout/importers/text.h"

namespace foremoe {

// A router. Routers are ordered as tokens pass through them.
struct MegatronRouter {
  bool mtp = false;  // multi-token prediction comes after the decoder
  std::int32_t stage = 0;
  std::int32_t mtp_index = 0;
  std::int32_t layer = 0;

  friend auto operator<=>(const MegatronRouter&, const MegatronRouter&) = default;
};

// Reads "block", "layer" and "mtp_idx"; records do not contain the stage.
MegatronRouter router_of(const nlohmann::json& record, const Where& where);

// Infers the model's layer numbers: decoder layers of a stage continue after the largest number of the previous stage,
// and multi-token prediction continues after the decoder.
std::vector<std::int32_t> layer_ids_of(const std::set<MegatronRouter>& routers);

struct RankPlace {
  std::int32_t stage = 0;
  std::int32_t rank = 0;  // rank within its stage
};

class MegatronRanks {
 public:
  // `recorded`: all ranks found, not empty. Throws InputError for `file` if these do not divide into equal stages.
  MegatronRanks(const std::set<std::int32_t>& recorded, int pipeline_stages, const std::string& file);

  RankPlace place_of(std::int32_t rank) const { return {(rank - first_) / per_stage_, (rank - first_) % per_stage_}; }
  std::int32_t per_stage() const { return per_stage_; }
  std::int32_t first() const { return first_; }

 private:
  std::int32_t first_;
  std::int32_t per_stage_;
};

inline constexpr std::int64_t kMaxMegatronRank = 1 << 20;
inline constexpr std::int64_t kMaxMegatronLayer = 65534;

// Calls visit(record, where) for each line. Throws InputError unless each line is a JSON object.
void for_each_record(const ImportSource& source,
                     const std::function<void(const nlohmann::json& record, const Where& where)>& visit);

}  // namespace foremoe

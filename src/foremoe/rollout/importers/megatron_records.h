#pragma once

// What Megatron-LM's two logs share: one JSON object per line, routers named by block and layer, one file per
// rank. Its numbers are local: a layer counts from the start of its pipeline stage, a rank from the start of the
// world. The ranks, ascending, are read as `pipeline_stages` equal runs, whose layers follow one another.

#include <compare>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string_view>
#include <vector>

#include "foremoe/rollout/importers/importer.h"
#include "foremoe/rollout/importers/text.h"

namespace foremoe {

// A router, in the order in which a token meets them.
struct MegatronRouter {
  bool mtp = false;  // multi-token prediction comes after the decoder
  std::int32_t stage = 0;
  std::int32_t mtp_index = 0;
  std::int32_t layer = 0;

  friend auto operator<=>(const MegatronRouter&, const MegatronRouter&) = default;
};

// From "block", "layer" and "mtp_idx"; the stage is not in a record.
MegatronRouter router_of(const nlohmann::json& record, const Where& where);

// The model's own layer numbers, as far as they can be told: a stage's decoder layers go on after the largest
// number of the stage before; multi-token prediction goes on after the decoder.
std::vector<std::int32_t> layer_ids_of(const std::set<MegatronRouter>& routers);

struct RankPlace {
  std::int32_t stage = 0;
  std::int32_t rank = 0;  // in its stage
};

class MegatronRanks {
 public:
  // `recorded`, not empty: all ranks seen. Throws InputError in `file` when stages do not divide them.
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

// visit(record, where) for each line; records are objects.
template <class Visit>
void for_each_record(const ImportSource& source, Visit&& visit) {
  for_each_line({reinterpret_cast<const char*>(source.bytes.data()), source.bytes.size()},
                [&](std::string_view line, const std::string& number) {
                  const Where where{.file = source.name, .field = number};
                  const nlohmann::json record = parse_json(line, where);
                  if (!record.is_object()) throw InputError(where, "should be a JSON object");
                  visit(record, where);
                });
}

}  // namespace foremoe

#include "foremoe/rollout/importers/megatron_records.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace foremoe {

MegatronRouter router_of(const nlohmann::json& record, const Where& where) {
  MegatronRouter router;
  const auto block = record.find("block");
  if (block != record.end()) {
    if (*block == "mtp") {
      router.mtp = true;
    } else if (*block != "decoder") {
      throw InputError(with_field(where, "block"), "should be \"decoder\" or \"mtp\"");
    }
  }
  if (record.contains("mtp_idx")) {
    router.mtp_index = static_cast<std::int32_t>(integer_member(record, "mtp_idx", 0, kMaxMegatronLayer, where));
  }
  router.layer = static_cast<std::int32_t>(integer_member(record, "layer", 0, kMaxMegatronLayer, where));
  return router;
}

std::vector<std::int32_t> layer_ids_of(const std::set<MegatronRouter>& routers) {
  std::vector<std::int32_t> ids;
  std::int32_t stage = 0;
  std::int32_t offset = 0;
  for (const MegatronRouter& router : routers) {
    const std::int32_t next = ids.empty() ? 0 : ids.back() + 1;
    if (router.mtp) {
      ids.push_back(next);
      continue;
    }
    if (router.stage != stage) {
      stage = router.stage;
      offset = next;
    }
    ids.push_back(offset + router.layer);
  }
  return ids;
}

MegatronRanks::MegatronRanks(const std::set<std::int32_t>& recorded, int pipeline_stages, const std::string& file)
    : first_(*recorded.begin()) {
  const std::int32_t ranks = *recorded.rbegin() - first_ + 1;
  if (pipeline_stages < 1 || ranks % pipeline_stages != 0) {
    throw InputError({.file = file, .field = "rank"},
                     fmt::format("{} ranks cannot be split into {} equal pipeline stages", ranks, pipeline_stages));
  }
  per_stage_ = ranks / pipeline_stages;
}

void for_each_record(const ImportSource& source,
                     const std::function<void(const nlohmann::json& record, const Where& where)>& visit) {
  const std::string_view text{reinterpret_cast<const char*>(source.bytes.data()), source.bytes.size()};
  for_each_line(text, [&](std::string_view line, const std::string& number) {
    const Where where{.file = source.name, .field = number};
    const nlohmann::json record = parse_json(line, where);
    if (!record.is_object()) throw InputError(where, "should be a JSON object");
    visit(record, where);
  });
}

}  // namespace foremoe

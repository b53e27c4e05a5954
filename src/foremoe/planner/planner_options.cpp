#include "foremoe/planner/planner_options.h"

#include <nlohmann/json.hpp>

namespace foremoe {

std::string to_json(const PlannerOptions& o) {
  std::string stages;
  if (o.stages.base) stages += 'B';
  if (o.stages.relocation) stages += 'L';
  if (o.stages.replication) stages += 'P';
  if (o.stages.tokens) stages += 'T';
  nlohmann::ordered_json j = {{"guest-slots", o.guest_slots},
                              {"residency", to_string(o.residency)},
                              {"in-flight", o.in_flight},
                              {"stages", stages},
                              {"prefer", o.prefer == Prefer::kLinks ? "links" : "balance"},
                              {"tolerance", o.tolerance.value_or(default_tolerance(o.residency))},
                              {"min-tokens-per-guest", o.min_tokens_per_guest},
                              {"seed", o.seed}};
  if (o.rehome == kNoLimit) {
    j["rehome"] = "free";
  } else {
    j["rehome"] = o.rehome;
  }
  if (o.max_copies_per_rank) j["max-copies-per-rank"] = *o.max_copies_per_rank;
  if (o.max_copies_per_source != kNoLimit) j["max-copies-per-source"] = o.max_copies_per_source;
  return j.dump();
}

}  // namespace foremoe

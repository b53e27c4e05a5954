#include "foremoe/rollout/importers/import_json.h"

#include <nlohmann/json.hpp>

namespace foremoe {

nlohmann::ordered_json to_json(const ImportReport& report) {
  auto skipped = nlohmann::ordered_json::array();
  for (const SkippedSample& of : report.skipped)
    skipped.push_back({{"sample", of.sample}, {"problem", InputError(of.where, of.problem).what()}});
  return {{"format", name_of(report.format)},
          {"experts_inferred", report.num_experts_inferred},
          {"rows", report.rows},
          {"rows_recorded_missing", report.rows_recorded_missing},
          {"rows_repeating", report.rows_repeating},
          {"rows_skipped", report.rows_skipped},
          {"rows_partial", report.rows_partial},
          {"rows_omitted", report.rows_omitted},
          {"rows_filled", report.rows_filled},
          {"last_tokens_without_route", report.last_tokens_without_route},
          {"rows_missing", report.rows_missing()},
          {"samples_skipped", report.skipped.size()},
          {"skipped", std::move(skipped)},
          {"layer_ids", report.layer_ids},
          {"notes", report.notes}};
}

}  // namespace foremoe

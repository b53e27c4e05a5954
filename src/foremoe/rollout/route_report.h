#pragma once

// The work of `foremoe routes check`: reads captured routes, checks them, and describes the findings.

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "foremoe/core/option.h"
#include "foremoe/rollout/importers/importer.h"
#include "foremoe/rollout/route_checks.h"

namespace foremoe {

// Options of `foremoe routes check` besides those of import.
struct RouteCheckOptions {
  ImportOptions import;  // experts, top_k and model are expectations; layers: as recorded
  std::vector<std::string> lengths;
  std::vector<std::string> weight_versions;  // of each sequence; empty: those of the files
};
std::vector<Option> options_of(RouteCheckOptions& options);

RouteReport check_route_files(const std::vector<std::string>& paths, const RouteCheckOptions& options,
                              const Decode& decode = {});

std::vector<std::string> describe(const RouteReport& report);  // one line each
nlohmann::ordered_json to_json(const RouteReport& report);     // {ok, findings, remarks}

}  // namespace foremoe

#include "foremoe/rollout/route_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>
#include <variant>

#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/error.h"
#include "foremoe/rollout/trace_file.h"

namespace foremoe {

namespace {

struct CapturedRoutes {
  RoutingTrace trace;
  std::vector<std::vector<std::string>> weight_versions = {};  // [sequences]; empty: unknown
};

// Reads a trace, or payloads with invalid rows as they were recorded. Throws InputError like import_files().
CapturedRoutes read_captured_routes(const std::vector<std::string>& paths, ImportOptions options,
                                    const Decode& decode) {
  if (paths.size() == 1 && paths.front().ends_with(".safetensors")) return {read_trace(paths.front())};
  options.keep_invalid_rows = true;
  options.model.clear();
  Imported imported = import_files(paths, options, decode);
  if (imported.load() != nullptr) throw InputError({.file = paths.front()}, "contains counts, not routes");
  auto trace = std::get<RoutingTrace>(std::move(imported.value));
  std::vector<std::vector<std::string>> versions = std::move(imported.report.weight_versions);
  if (!versions.empty()) versions.resize(static_cast<std::size_t>(trace.num_sequences()));
  return {std::move(trace), std::move(versions)};
}

}  // namespace

std::vector<Option> options_of(RouteCheckOptions& options) {
  std::vector<Option> all = options_of(options.import);
  all.push_back(list_option({.name = "lengths", .value = "N,N,…", .help = "Tokens of each sequence", .main = true},
                            options.lengths));
  all.push_back(
      list_option({.name = "weight_versions",
                   .value = "V,V,…",
                   .help = "Version of the weights that sampled each sequence, instead of those in the files"},
                  options.weight_versions));
  return all;
}

RouteReport check_route_files(const std::vector<std::string>& paths, const RouteCheckOptions& options,
                              const Decode& decode) {
  const ImportOptions& given = options.import;
  auto [trace, versions] = read_captured_routes(paths, given, decode);
  RouteExpectations expected{.experts = given.num_experts,
                             .top_k = given.top_k,
                             .weight_versions = std::move(versions),
                             .weightless_experts = given.weightless_experts};
  if (given.num_layers != trace.num_layers && !given.drop_empty_layers) {
    expected.layers = given.num_layers;  // as recorded, dense layers included
  }
  if (!given.model.empty()) {
    const ModelShape model = model_named(given.model);
    if (expected.experts == 0) {
      expected.experts = model.experts;
      expected.weightless_experts = model.weightless_experts;
    }
    if (expected.top_k == 0) expected.top_k = model.top_k;
    expected.layers = model.moe_layers;
    expected.dense_layers = given.drop_empty_layers ? 0 : model.dense_layers;
  }
  for (const std::string& length : options.lengths)
    expected.lengths.push_back(parse_integer("lengths", length, {0, std::int64_t{1} << 40}));
  if (!options.weight_versions.empty()) {
    expected.weight_versions.clear();
    for (const std::string& version : options.weight_versions) expected.weight_versions.push_back({version});
  }
  return find_route_faults(trace, expected);
}

static std::string line_of(const RouteFinding& f) {
  std::string place;
  const auto part = [&](const char* name, std::int64_t index) {
    if (index >= 0) place += fmt::format("{}{} {}", place.empty() ? " at " : ", ", name, index);
  };
  part("layer", f.layer);
  part("sequence", f.sequence);
  part("token", f.token);
  return fmt::format("{}{}{}: {}; {}", f.check, place, f.count > 1 ? fmt::format(" (first of {})", f.count) : "",
                     f.cause, f.remedy);
}

std::vector<std::string> describe(const RouteReport& report) {
  std::vector<std::string> lines;
  for (const RouteFinding& finding : report.findings) lines.push_back(line_of(finding));
  if (lines.empty()) lines.emplace_back("no fault was found");
  for (const std::string& remark : report.remarks) lines.push_back("note: " + remark);
  return lines;
}

nlohmann::ordered_json to_json(const RouteReport& report) {
  using Json = nlohmann::ordered_json;
  Json findings = Json::array();
  const auto place = [](std::int64_t index) { return index < 0 ? Json() : Json(index); };
  for (const RouteFinding& f : report.findings) {
    findings.push_back({{"check", f.check},
                        {"layer", place(f.layer)},
                        {"sequence", place(f.sequence)},
                        {"token", place(f.token)},
                        {"count", f.count},
                        {"cause", f.cause},
                        {"remedy", f.remedy}});
  }
  return {{"ok", findings.empty()}, {"findings", std::move(findings)}, {"remarks", report.remarks}};
}

}  // namespace foremoe

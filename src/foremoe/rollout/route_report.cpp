#include "foremoe/rollout/route_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>
#include <variant>

#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/error.h"
#include "foremoe/rollout/importers/layer_choice.h"
#include "foremoe/rollout/trace_file.h"

namespace foremoe {

namespace {

struct CapturedRoutes {
  RoutingTrace trace;
  ImportReport report = {};  // of payloads
};

// Reads a trace, or payloads with invalid rows as they were recorded. Throws InputError like import_files().
CapturedRoutes read_captured_routes(const std::vector<std::string>& paths, ImportOptions options,
                                    const Decode& decode) {
  if (paths.size() == 1 && paths.front().ends_with(".safetensors")) return {read_trace(paths.front())};
  options.keep_invalid_rows = true;
  options.num_experts = 0;
  if (!options.model.empty()) options.drop_empty_layers = false;  // the model decides
  options.model.clear();
  Imported imported = import_files(paths, options, decode);
  if (imported.load() != nullptr) throw InputError({.file = paths.front()}, "contains counts, not routes");
  return {std::get<RoutingTrace>(std::move(imported.value)), std::move(imported.report)};
}

// Returns the values of the sequences, if there is one for each sample.
template <class T>
std::vector<T> of_sequences(std::vector<T> values, const ImportReport& report) {
  if (report.skipped.empty() || values.size() != report.sequences.size() + report.skipped.size()) return values;
  std::vector<T> kept;
  for (const SampleFacts& of : report.sequences) kept.push_back(std::move(values[static_cast<std::size_t>(of.sample)]));
  return kept;
}

RouteFinding finding_of(const std::vector<SkippedSample>& skipped) {
  return {.check = "skipped-sample",
          .sequence = skipped.front().sample,
          .cause = InputError(skipped.front().where, skipped.front().problem).what(),
          .remedy = "`foremoe import` omits such samples: omit them from training too, or record them again",
          .count = static_cast<std::int64_t>(skipped.size())};
}

}  // namespace

std::vector<Option> options_of(RouteCheckOptions& options) {
  std::vector<Option> all = options_of(options.import);
  std::erase_if(all, [](const Option& o) { return o.name == "counts" || o.name == "ranks"; });
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
  auto [trace, report] = read_captured_routes(paths, given, decode);
  RouteExpectations expected{
      .experts = given.num_experts, .top_k = given.top_k, .weightless_experts = given.weightless_experts};
  if (given.num_layers != trace.num_layers && !given.drop_empty_layers) {
    expected.layers = given.num_layers;  // as recorded, dense layers included
  }
  const bool unknown = report.num_experts_inferred && given.model.empty() && given.num_experts == 0;
  const std::string ids = unknown ? find_weightless_experts(trace) : "";
  if (!given.model.empty()) {
    const ModelShape model = model_named(given.model);
    if (expected.experts == 0) {
      expected.experts = model.experts;
      expected.weightless_experts = model.weightless_experts;
    }
    if (expected.top_k == 0) expected.top_k = model.top_k;
    expected.layers = model.moe_layers;
    expected.dense_layers = model.layers() - model.moe_layers;
    expected.layer_kinds = model.layer_kinds;
    const auto is_dense = [](LayerKind kind) { return kind != LayerKind::kMoe && kind != LayerKind::kHashMoe; };
    if (trace.num_layers == model.moe_layers) std::erase_if(expected.layer_kinds, is_dense);
  }
  for (const std::string& length : options.lengths)
    expected.lengths.push_back(parse_integer("lengths", length, {0, std::int64_t{1} << 40}));
  expected.lengths = of_sequences(std::move(expected.lengths), report);
  for (const SampleFacts& of : report.sequences) {
    expected.samples.push_back(of.sample);
    expected.weight_versions.push_back(of.weight_versions);
    if (!options.lengths.empty()) continue;
    expected.lengths.push_back(of.num_tokens.value_or(-1));
    expected.counted_in.push_back(of.counted_in);
  }
  if (!options.weight_versions.empty()) {
    expected.weight_versions.clear();
    for (const std::string& version : options.weight_versions) expected.weight_versions.push_back({version});
    expected.weight_versions = of_sequences(std::move(expected.weight_versions), report);
  }
  RouteReport found = find_route_faults(trace, expected);
  if (!ids.empty()) found.remarks.push_back(ids);
  for (const SkippedSample& of : report.skipped)
    found.skipped.emplace_back(of.sample, InputError(of.where, of.problem).what());
  if (!report.skipped.empty()) found.findings.insert(found.findings.begin(), finding_of(report.skipped));
  return found;
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
  Json json{{"ok", findings.empty()}, {"findings", std::move(findings)}, {"remarks", report.remarks}};
  for (const auto& [sample, problem] : report.skipped)
    json["skipped"].push_back({{"sample", sample}, {"problem", problem}});
  return json;
}

}  // namespace foremoe

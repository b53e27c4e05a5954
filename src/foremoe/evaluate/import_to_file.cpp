#include "foremoe/evaluate/import_to_file.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/evaluate/workload.h"
#include "foremoe/rollout/importers/import_json.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/trace_file.h"

namespace foremoe {
Imported import_to_file(std::span<const std::string> paths, const ImportOptions& options, const std::string& out,
                        const Decode& decode) {
  Imported imported = import_files(paths, options, decode);
  if (const RoutingTrace* trace = imported.trace()) {
    write_trace(*trace, out);
  } else {
    write_load(*imported.load(), out, {{"origin", fmt::format("imported from {}", name_of(imported.report.format))}});
  }
  return imported;
}

std::vector<std::string> describe(const Imported& imported, const std::string& out) {
  std::vector<std::string> lines;
  const ImportReport& report = imported.report;
  if (const RoutingTrace* trace = imported.trace()) {
    const std::string weightless =
        trace->weightless_experts == 0 ? "" : fmt::format(" and {} ids without weights", trace->weightless_experts);
    lines.push_back(fmt::format("{}: a trace of {} in {}, {}, top-{} of {}{}{}, from {}", out,
                                counted(trace->num_tokens, "token"), counted(trace->num_sequences(), "sequence"),
                                counted(trace->num_layers, "layer"), trace->top_k,
                                counted(trace->num_experts, "expert"), weightless,
                                report.num_experts_inferred ? " (the largest id + 1)" : "", name_of(report.format)));
    lines.push_back(fmt::format(
        "{} of {} rows have no route: {} recorded without, {} with repeated ids, {} never recorded{}{}",
        report.rows_missing(), report.rows, report.rows_recorded_missing, report.rows_repeating, report.rows_skipped,
        report.rows_omitted > 0 ? fmt::format(", {} omitted", report.rows_omitted) : "",
        report.rows_filled > 0 ? fmt::format("; {} were filled", report.rows_filled) : ""));
  } else {
    lines.push_back(fmt::format("{}: a load, {}, from {}", out, describe(*imported.load()), name_of(report.format)));
  }
  for (const std::string& text : report.notes) lines.push_back(fmt::format("note: {}", text));
  return lines;
}

nlohmann::ordered_json to_json(const Imported& imported, const std::string& out) {
  nlohmann::ordered_json json = to_json(imported.report);
  json["out"] = out;
  json["kind"] = imported.trace() != nullptr ? "trace" : "load";
  if (const RoutingTrace* trace = imported.trace()) {
    json["sequences"] = trace->num_sequences();
    json["tokens"] = trace->num_tokens;
    json["layers"] = trace->num_layers;
    json["experts"] = trace->num_experts;
    json["top_k"] = trace->top_k;
    json["weightless_experts"] = trace->weightless_experts;
    json["recorded_batching"] = trace->has_batching();
  } else {
    const LoadTable& load = *imported.load();
    json["micro_steps"] = load.num_micro_steps();
    json["layers"] = load.num_layers();
    json["ranks"] = load.num_ranks();
    json["experts"] = load.num_experts();
    json["top_k"] = load.top_k;
  }
  return json;
}

}  // namespace foremoe

// foremoe routes check: finds damage in captured routes, with its cause and remedy.

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "command.h"
#include "console.h"
#include "foremoe/rollout/route_report.h"
#include "run_in_python.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kRoutesExamples = R"(  foremoe routes check step.trace.safetensors
  foremoe routes check sample-*.npy --model Qwen3-30B-A3B --json
  foremoe routes check responses.jsonl --layers 48 --top-k 8 --lengths 512,640
)";

constexpr std::string_view kRoutesMeaning =
    R"(Reads traces and the files that foremoe import reads. Each line names a check, the first place where it failed,
the number of places, a probable cause, and a remedy:
  row-count          rows do not match --lengths, or the token counts in the files; the last token may have no row
  skipped-sample     a sample without routes, as of an aborted request, or that cannot be read
  repeated-block     rows of an aborted request, then the whole sequence again
  expert-range       ids beyond the experts        duplicate-experts  an expert twice in a row
  top-k-differs      rows or sequences of other k  padding            zeros or filler instead of -1
  prefix-missing     first tokens have no route    missing-rows       other tokens have none
  repeated-rows      the previous token's route    repeated-sequence  another sequence's routes
  constant-rows      a layer's route stays         equal-layers       another layer's routes
  layer-shift        dense layers were counted     empty-layer        a layer without routes
  mtp-layers         layers beyond the model       weight-versions    several weights in a step
Thresholds raise no alarm on real routes of two models. --model, --layers, --experts and --top-k set what is expected.
Sequences are numbered like the samples of the files, including skipped ones.
Exit code 0: nothing was found. 1: something was. 2: a file could not be read.
)";

struct RoutesArguments {
  std::vector<std::string> files;
  RouteCheckOptions options;
  bool json = false;
};

bool is_for_python(const RoutesArguments& arguments) {
  return std::ranges::any_of(arguments.files, [&](const std::string& path) {
    return !path.ends_with(".safetensors") && needs_decoder(path, arguments.options.import);
  });
}

int run(const RoutesArguments& arguments, const Given& given) {
  if (is_for_python(arguments)) {
    RouteCheckOptions any;
    nlohmann::json request;
    request["options"] = texts_of(options_of(any), given);
    request["json"] = arguments.json;
    run_in_python("_check_routes", request.dump(), arguments.files);  // returns if the package did not start this
  }
  const RouteReport report = check_route_files(arguments.files, arguments.options);
  if (arguments.json) {
    fmt::print("{}\n", to_json(report).dump(2));
  } else {
    for (const std::string& line : describe(report)) print_values("{}\n", line);
  }
  return report.findings.empty() ? kOk : kFoundWrong;
}

}  // namespace

Command routes_command() {
  auto a = std::make_shared<RoutesArguments>();
  return {
      .name = "routes",
      .summary = "Check captured routes, and name the cause and remedy of each fault",
      .examples = std::string(kRoutesExamples),
      .meaning = std::string(kRoutesMeaning),
      .options = joined(
          {{word_option({.name = "action", .value = "ACTION", .help = "check", .required = true, .positional = true},
                        {"check"}, [](std::size_t) {}),
            values_option({.name = "files",
                           .value = "FILE...",
                           .help = "A trace, or recorded files",
                           .required = true,
                           .positional = true},
                          a->files)},
           options_of(a->options),
           {json_option(a->json, "Print {ok, findings, remarks} as JSON")}}),
      .run = [a](const Given& given) { return cli::run(*a, given); },
      .any_process = true};
}

}  // namespace foremoe::cli

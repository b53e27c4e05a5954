// foremoe import: what rollout engines and trainers record, as a trace or a load.

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "command.h"
#include "console.h"
#include "foremoe/core/error.h"
#include "foremoe/evaluate/step_input.h"
#include "foremoe/rollout/importers/import_json.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/trace_file.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kImportExamples = R"(  foremoe import sample-*.npy --experts 128 --out step.trace.safetensors
  foremoe import responses.jsonl --model Qwen3-30B-A3B --out step.trace.safetensors
  foremoe import routed.bin --format sglang --layers 48 --top-k 8 --out step.trace.safetensors
  foremoe import router_trace_rank*.jsonl --drop-recomputed --out step.trace.safetensors
  foremoe import tokens_per_expert/rank*.jsonl --top-k 8 --out step.load.safetensors
)";

constexpr std::string_view kImportMeaning = R"(Formats, detected from the bytes unless --format says which:
  npy              numpy array [tokens, layers, top_k] of expert ids, a file is a sequence (vLLM)
  npz              zip of such arrays, a member is a sequence
  npy-base64       base64 of .npy, a line is a sequence
  json             responses of vLLM and of SGLang, one object, a list, or a line each
  sglang           int32 without a header, raw or base64 per line; needs --layers and --top-k
  nrlre1           NeMo-RL's text envelope, a line is a sequence
  megatron-trace   Megatron-LM's router_trace_rank{N}.jsonl; a call is a sequence, the n-th call of a layer micro-step n
  megatron-counts  Megatron-LM's tokens_per_expert/rank{N}.jsonl; yields a load file
Several files are several sequences, in the order given (Megatron: one file per rank). A row is one token in one layer; rows
with repeated expert ids are not routes (padding) and become missing ones; the report counts them.
)";

struct ImportArguments {
  std::vector<std::string> inputs;
  std::string out;
  ImportOptions options;
  bool json = false;
};

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

void print(const Imported& imported, const std::string& out) {
  const ImportReport& report = imported.report;
  if (const RoutingTrace* trace = imported.trace()) {
    print_values("{}: a trace of {} in {}, {}, top-{} of {}{}, from {}\n", out, counted(trace->num_tokens, "token"),
                 counted(trace->num_sequences(), "sequence"), counted(trace->num_layers, "layer"), trace->top_k,
                 counted(trace->num_experts, "expert"), report.num_experts_inferred ? " (the largest id + 1)" : "",
                 name_of(report.format));
    const std::int64_t missing = report.rows_recorded_missing + report.rows_repeating + report.rows_skipped;
    fmt::print("{} of {} rows have no route: {} recorded so, {} turned so because ids repeat, {} never recorded\n",
               missing, report.rows, report.rows_recorded_missing, report.rows_repeating, report.rows_skipped);
  } else {
    print_values("{}: a load, {}, from {}\n", out, describe(*imported.load()), name_of(report.format));
  }
  for (const std::string& text : report.notes) print_values("note: {}\n", text);
}

Imported import_and_write(const ImportArguments& arguments) {
  const Activity activity("importing " + counted(static_cast<std::int64_t>(arguments.inputs.size()), "file"));
  Imported imported = import_files(arguments.inputs, arguments.options);
  if (const RoutingTrace* trace = imported.trace()) {
    write_trace(*trace, arguments.out);
  } else {
    write_load(*imported.load(), arguments.out,
               {{"origin", fmt::format("imported from {}", name_of(imported.report.format))}});
  }
  return imported;
}

int run(const ImportArguments& arguments) {
  expect_output(arguments.out, arguments.inputs);
  const Imported imported = import_and_write(arguments);
  if (arguments.json) {
    fmt::print("{}\n", to_json(imported, arguments.out).dump(2));
  } else {
    print(imported, arguments.out);
  }
  return kOk;
}

}  // namespace

Command import_command() {
  auto a = std::make_shared<ImportArguments>();
  Option out = out_option(a->out, "FILE", "Write the trace (of counts: the load) here, whole or not at all");
  out.required = true;
  return {
      .name = "import",
      .summary = "Read the routes that a rollout engine or trainer recorded",
      .examples = std::string(kImportExamples),
      .meaning = std::string(kImportMeaning),
      .options = joined(
          {{values_option(
                {.name = "files", .value = "FILE...", .help = "Recorded files", .required = true, .positional = true},
                a->inputs),
            std::move(out)},
           options_of(a->options),
           {json_option(a->json, "Print the report as JSON")}}),
      .run = [a](const Given&) { return cli::run(*a); }};
}

}  // namespace foremoe::cli

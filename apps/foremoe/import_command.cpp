// foremoe import: what rollout engines and trainers record, as a trace or a load.

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "command.h"
#include "console.h"
#include "foremoe/core/error.h"
#include "foremoe/evaluate/step_input.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/importers/importer.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/trace_file.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kExamples = R"(  foremoe import sample-*.npy --experts 128 --out step.trace.safetensors
  foremoe import responses.jsonl --model Qwen3-30B-A3B --out step.trace.safetensors
  foremoe import routed.bin --format sglang --layers 48 --top-k 8 --out step.trace.safetensors
  foremoe import router_trace_rank*.jsonl --drop-recomputed --out step.trace.safetensors
  foremoe import tokens_per_expert/rank*.jsonl --top-k 8 --out step.load.safetensors
)";

constexpr std::string_view kMeaning = R"(Formats, detected from the bytes unless --format says which:
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

ImportFormat parse_format(const std::string& name) {
  if (const auto format = import_format_named(name)) return *format;
  throw InputError({.field = "format"}, fmt::format("'{}' is not a format; see foremoe import --help-all", name));
}

nlohmann::ordered_json to_json(const Imported& imported, const std::string& out) {
  const ImportReport& report = imported.report;
  nlohmann::ordered_json json{
      {"out", out}, {"format", name_of(report.format)}, {"kind", imported.trace() != nullptr ? "trace" : "load"}};
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
  json["experts_inferred"] = report.num_experts_inferred;
  json["rows"] = report.rows;
  json["rows_recorded_missing"] = report.rows_recorded_missing;
  json["rows_repeating"] = report.rows_repeating;
  json["rows_skipped"] = report.rows_skipped;
  json["last_tokens_without_route"] = report.last_tokens_without_route;
  json["rows_missing"] = report.rows_recorded_missing + report.rows_repeating + report.rows_skipped;
  json["notes"] = report.notes;
  return json;
}

void print(const Imported& imported, const std::string& out) {
  const ImportReport& report = imported.report;
  if (const RoutingTrace* trace = imported.trace()) {
    fmt::print("{}: a trace of {} in {}, {}, top-{} of {}{}, from {}\n", out, counted(trace->num_tokens, "token"),
               counted(trace->num_sequences(), "sequence"), counted(trace->num_layers, "layer"), trace->top_k,
               counted(trace->num_experts, "expert"), report.num_experts_inferred ? " (the largest id + 1)" : "",
               name_of(report.format));
    const std::int64_t missing = report.rows_recorded_missing + report.rows_repeating + report.rows_skipped;
    fmt::print("{} of {} rows have no route: {} recorded so, {} turned so because ids repeat, {} never recorded\n",
               missing, report.rows, report.rows_recorded_missing, report.rows_repeating, report.rows_skipped);
  } else {
    fmt::print("{}: a load, {}, from {}\n", out, describe(*imported.load()), name_of(report.format));
  }
  for (const std::string& text : report.notes) fmt::print("note: {}\n", text);
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
  ImportOptions& o = a->options;
  const auto count = [&](const char* name, int& value, std::int64_t most, const char* help, const char* initial) {
    return integer_option({.name = name, .value = "N", .help = help, .initial = initial, .main = true}, value,
                          {1, most});
  };
  Option out = out_option(a->out, "FILE", "Write the trace (of counts: the load) here, whole or not at all");
  out.required = true;
  Option format{.name = "format",
                .value = "NAME",
                .help = "Format, see --help-all",
                .initial = "detected",
                .main = true,
                .type = "text"};
  format.set = [&o](const std::string& name) { o.format = parse_format(name); };
  return {
      .name = "import",
      .summary = "Read the routes that a rollout engine or trainer recorded",
      .examples = std::string(kExamples),
      .meaning = std::string(kMeaning),
      .options =
          {values_option(
               {.name = "files", .value = "FILE...", .help = "Recorded files", .required = true, .positional = true},
               a->inputs),
           std::move(out), std::move(format),
           text_option({.name = "model",
                        .value = "NAME",
                        .help = "Name of the model, for the trace's metadata. A known one also sets --experts",
                        .main = true},
                       o.model),
           count("experts", o.num_experts, kMaxExperts, "Experts of a layer", "the largest id + 1"),
           count("layers", o.num_layers, 65535,
                 "Layers of headerless arrays; elsewhere checked against what is recorded", "as recorded"),
           count("top_k", o.top_k, 65535, "Experts of a token, of headerless arrays and of counts", "as recorded"),
           count("ranks_per_node", o.ranks_per_node, kMaxRanks, "Where ranks are recorded: ranks of a node",
                 "8, or all if fewer"),
           count("pipeline_stages", o.pipeline_stages, kMaxRanks,
                 "Megatron: number of pipeline stages; ascending ranks are split evenly among them", "1"),
           flag_option({.name = "drop_recomputed",
                        .help = "Megatron trace: drop a call that equals an earlier one of its layer, which is "
                                "activation recomputation"},
                       o.drop_recomputed),
           flag_option({.name = "drop_empty_layers", .help = "Leave out layers without any route (dense ones)"},
                       o.drop_empty_layers),
           word_option<CountsAt>(
               {.name = "counts_at",
                .value = "auto|source|received",
                .help = "Megatron counts: at the source (a rank counts its own tokens) or as received "
                        "(by its own experts)"},
               o.counts_at,
               {{"auto", CountsAt::kAuto}, {"source", CountsAt::kSource}, {"received", CountsAt::kReceived}}),
           json_option(a->json, "Print the report as JSON")},
      .run = [a](const Given&) { return cli::run(*a); }};
}

}  // namespace foremoe::cli

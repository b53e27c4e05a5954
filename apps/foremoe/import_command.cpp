// foremoe import: what rollout engines and trainers record, as a trace or a load.

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "command.h"
#include "foremoe/core/mapped_file.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/importers/importer.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/trace_file.h"
#include "help_text.h"
#include "input_options.h"
#include "messages.h"
#include "option_checks.h"
#include "output_file.h"
#include "wording.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kExamples = R"(  foremoe import sample-*.npy --experts 128 --out step.trace.safetensors
  foremoe import responses.jsonl --model Qwen3-30B-A3B --out step.trace.safetensors
  foremoe import routed.bin --format sglang --layers 48 --top-k 8 --out step.trace.safetensors
  foremoe import router_trace_rank*.jsonl --drop-recomputed --out step.trace.safetensors
  foremoe import tokens_per_expert/rank*.jsonl --top-k 8 --out step.load.safetensors
)";

constexpr std::string_view kMeaning = R"(Formats, detected from the bytes unless --format tells:
  npy              numpy array [tokens, layers, top_k] of expert ids, a file is a sequence (vLLM)
  npz              zip of such arrays, a member is a sequence
  npy-base64       base64 of .npy, a line is a sequence
  json             responses of vLLM and of SGLang, one object, a list, or a line each
  sglang           int32 without a header, raw or base64 per line; needs --layers and --top-k
  nrlre1           NeMo-RL's text envelope, a line is a sequence
  megatron-trace   Megatron-LM's router_trace_rank{N}.jsonl; a call is a sequence, the n-th call of a layer micro-step n
  megatron-counts  Megatron-LM's tokens_per_expert/rank{N}.jsonl; yields a load file
Several files are several sequences, in the order given (Megatron: one file per rank). A row is one token in one layer; rows
with repeated expert ids are no routes (padding) and become missing ones; the report counts them.)";

struct ImportArguments {
  std::vector<std::string> inputs;
  std::string out;
  ImportOptions options;
  bool json = false;
};

ImportFormat parse_format(const std::string& name) {
  const auto format = import_format_named(name);
  if (!format)
    throw CLI::ValidationError("--format", fmt::format("'{}' is no format; see foremoe import --help", name));
  return *format;
}

CountsAt parse_counts_at(const std::string& text) {
  if (text == "auto") return CountsAt::kAuto;
  if (text == "source") return CountsAt::kSource;
  if (text == "received") return CountsAt::kReceived;
  throw CLI::ValidationError("--counts-at", fmt::format("'{}', expected auto, source or received", text));
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
  std::vector<std::unique_ptr<MappedFile>> files;
  std::vector<ImportSource> sources;
  for (const std::string& path : arguments.inputs) {
    files.push_back(std::make_unique<MappedFile>(path));
    sources.push_back({.name = path, .bytes = files.back()->bytes()});
  }
  Imported imported = import_rollout(sources, arguments.options);
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

Command import_command(CLI::App& parent) {
  auto arguments = std::make_shared<ImportArguments>();
  ImportOptions& options = arguments->options;
  CLI::App* const command =
      parent.add_subcommand("import", "Read the routes that a rollout engine or trainer recorded");
  command->add_option("FILE", arguments->inputs, "Recorded files")->required();
  command->add_option("-o,--out", arguments->out, "Write the trace (of counts: the load) here, whole or not at all")
      ->type_name("FILE")
      ->required();
  command
      ->add_option_function<std::string>(
          "--format", [&options](const std::string& name) { options.format = parse_format(name); }, "See below")
      ->type_name("NAME")
      ->default_str("detected");
  const auto count = [&](const char* name, int& value, std::int64_t most, const char* text) {
    command->add_option(name, value, text)->type_name("N")->check(in_range(1, most));
  };
  count("--experts", options.num_experts, kMaxExperts, "Experts of a layer (default: the largest id + 1)");
  count("--layers", options.num_layers, 65535,
        "Layers of headerless arrays; elsewhere checked against what is recorded");
  count("--top-k", options.top_k, 65535, "Experts of a token, of headerless arrays and of counts");
  count("--ranks-per-node", options.ranks_per_node, kMaxRanks,
        "Where ranks are recorded (default: 8, or all if fewer)");
  count("--pipeline-stages", options.pipeline_stages, kMaxRanks,
        "Megatron: the ranks, ascending, are this many stages whose layers follow each other");
  command->add_flag("--drop-recomputed", options.drop_recomputed,
                    "Megatron trace: a call equal to an earlier one of its layer is activation recomputation");
  command->add_flag("--drop-empty-layers", options.drop_empty_layers,
                    "Leave out layers without any route (dense ones)");
  command
      ->add_option_function<std::string>(
          "--counts-at", [&options](const std::string& text) { options.counts_at = parse_counts_at(text); },
          "Megatron counts: at the source (a rank counts its own tokens) or as received (by its own experts)")
      ->type_name("auto|source|received")
      ->default_str("auto");
  command->add_option("--model", options.model, "The model's name, for the trace's metadata")->type_name("NAME");
  command->add_flag("--json", arguments->json, "Print the report as JSON");
  teach(*command, kExamples, kMeaning);
  return {command, [arguments] { return run(*arguments); }};
}

}  // namespace foremoe::cli

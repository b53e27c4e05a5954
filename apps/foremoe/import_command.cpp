// foremoe import: converts recordings of rollout engines and trainers into a trace or a load.

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "command.h"
#include "console.h"
#include "foremoe/core/error.h"
#include "foremoe/evaluate/import_to_file.h"
#include "foremoe/evaluate/workload.h"
#include "progress.h"
#include "run_in_python.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kImportExamples = R"(  foremoe import sample-*.npy --experts 128 --out step.trace.safetensors
  foremoe import responses.jsonl --model Qwen3-30B-A3B --out step.trace.safetensors
  foremoe import routed.bin --format sglang --layers 48 --top-k 8 --out step.trace.safetensors
  foremoe import router_trace_rank*.jsonl --drop-recomputed --out step.trace.safetensors
  foremoe import tokens_per_expert/rank*.jsonl --top-k 8 --out step.load.safetensors
  foremoe import expert_distribution_recorder_*.pt --ranks 32 --top-k 8 --out step.load.safetensors
)";

constexpr std::string_view kImportMeaning =
    R"(Formats, detected from the file's bytes unless --format is given (* requires the Python package):
  npy              numpy array [tokens, layers, top_k] of expert ids, one sequence per file (vLLM)
  npz *            zip of such arrays, one sequence per member
  npy-base64 *     base64 of .npy, one sequence per line
  torch *          rollout that slime or miles saved with --save-debug-rollout-data
  json *           responses of vLLM, SGLang, SkyRL and prime-rl: one object, a list, or one object per line
  sglang *         int32 without a header, raw or base64 per line; needs --layers and --top-k
  nrlre1 *         NeMo-RL's text envelope, one sequence per line
  megatron-trace   Megatron-LM's router_trace_rank{N}.jsonl; one sequence per call; a layer's n-th call is micro-step n
  megatron-counts  Megatron-LM's tokens_per_expert/rank{N}.jsonl; produces a load file
  counts *         tokens per expert [steps, layers, experts] or [layers, experts], in npy, npz, torch or JSON: dumps of
                   SGLang's expert distribution recorder and of vLLM's EPLB; other arrays need --counts. Produces a load
                   file, in which each of --ranks sends an even part of every expert's tokens
Sequences have the order of the files (Megatron: one file per rank). A row is one token in one layer. Rows with repeated
expert ids are padding, not routes: they are stored as rows without a route, and the report counts them. If more than
1 % of the rows repeat an id, but not in all entries, the recording is refused (--drop-repeating-rows). −1 in some
entries of a row: the token has fewer experts.
A sample must have as many rows as tokens, or one less, if usage, token ids, meta_info or tokens count these. If cached
tokens explain that rows lack, the first rows are missing. Samples that are aborted, damaged or contradict these counts
are skipped and named; --strict makes the first an error. --fill-prefixes compares prompts by their token ids or text,
else by group and length, else by length alone, and takes rows only if all sequences with the prompt agree.
)";

struct ImportArguments {
  std::vector<std::string> inputs;
  std::string out;
  ImportOptions options;
  bool json = false;
};

int run(const ImportArguments& arguments, const Given& given) {
  expect_output(arguments.out, arguments.inputs);
  const auto is_for_python = [&](const std::string& path) { return needs_decoder(path, arguments.options); };
  if (std::ranges::any_of(arguments.inputs, is_for_python)) {
    ImportOptions any;
    std::string out;
    nlohmann::json request = texts_of({out_option(out, "", "")}, given);
    request["options"] = texts_of(options_of(any), given);
    request["json"] = arguments.json;
    run_in_python("_import", request.dump(), arguments.inputs);  // returns if the package did not start this program
  }
  const Activity activity("importing " + counted(static_cast<std::int64_t>(arguments.inputs.size()), "file"));
  const Imported imported = import_to_file(arguments.inputs, arguments.options, arguments.out);
  if (arguments.json) {
    fmt::print("{}\n", to_json(imported, arguments.out).dump(2));
  } else {
    for (const std::string& line : describe(imported, arguments.out)) print_values("{}\n", line);
  }
  return kOk;
}

}  // namespace

Command import_command() {
  auto a = std::make_shared<ImportArguments>();
  Option out = out_option(a->out, "FILE", "Write the trace (of counts: the load) here, atomically");
  out.required = true;
  return {
      .name = "import",
      .summary = "Convert routes recorded by a rollout engine or trainer to a trace",
      .examples = std::string(kImportExamples),
      .meaning = std::string(kImportMeaning),
      .options = joined(
          {{values_option(
                {.name = "files", .value = "FILE...", .help = "Recorded files", .required = true, .positional = true},
                a->inputs),
            std::move(out)},
           options_of(a->options),
           {json_option(a->json, "Print the report as JSON")}}),
      .run = [a](const Given& given) { return cli::run(*a, given); }};
}

}  // namespace foremoe::cli

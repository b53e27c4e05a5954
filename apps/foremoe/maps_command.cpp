// foremoe maps: places experts for an inference engine, in the file format that it reads.

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "command.h"
#include "console.h"
#include "foremoe/core/atomic_file.h"
#include "foremoe/core/error.h"
#include "foremoe/evaluate/engine_map.h"
#include "foremoe/evaluate/workload.h"
#include "foremoe/plan/plan_file.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/load_file.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kMapsExamples =
    R"(  foremoe maps step.load.safetensors --to sglang --ranks 16 --out experts.json
  foremoe maps step.load.safetensors --to tensorrt-llm -G 2 --dense-layers 3 --out experts.yaml
  foremoe maps plan.safetensors --to vllm-ascend --out experts.json
)";

constexpr std::string_view kMapsMeaning =
    R"(Counts of a training step place the experts of the next rollout. From a load, experts are placed as by foremoe.eplb,
with each micro-step as a window; each replica will serve an equal part of its expert's tokens. From a plan, its experts
are taken as they are; they must not change within the step. Empty slots get the experts with the most tokens per
replica. The engine must have the same number of expert-parallel ranks, and as many redundant experts as printed.
The formats follow the engines' sources. SGLang 0.5.23 has started from such a file (lab/engines).
)";

struct MapsArguments {
  std::string input;
  std::string out;
  EngineMapOptions options;
  bool json = false;
};

EngineMap placed(const MapsArguments& arguments, const Given& given) {
  const Safetensors file = open_input(arguments.input);
  const FileKind kind = file_kind(file);
  if (kind == FileKind::kTrace || kind == FileKind::kHomes) refuse_kind(file, {kLoadFormat, kPlanFormat});
  if (kind == FileKind::kLoad) {
    LoadTable load = read_load(file);
    load.name = arguments.input;
    return place_for_engine(load, arguments.options);
  }
  for (const char* option : {"ranks", "guest_slots", "expert_groups"}) {
    if (given(option)) throw InputError({.field = option}, "cannot be combined with a plan, which has its own");
  }
  return place_for_engine(read_plan(file), arguments.input);
}

int run(const MapsArguments& arguments, const Given& given) {
  const EngineMapOptions& options = arguments.options;
  if (options.engine == Engine::kVllm) (void)engine_file({}, options);  // throws
  expect_output(arguments.out, {arguments.input});
  expect_extension(options.engine, arguments.out);
  const EngineMap map = placed(arguments, given);
  write_file(arguments.out, engine_file(map, options));
  const auto num_layers = static_cast<int>(map.slot_expert.extent(0));
  const auto num_ranks = static_cast<int>(map.slot_expert.extent(1));
  const auto num_replicas = num_ranks * static_cast<int>(map.slot_expert.extent(2));
  const std::string settings = engine_settings(map, options.engine, arguments.out);
  if (arguments.json) {
    const nlohmann::ordered_json json{{"out", arguments.out}, {"engine", to_string(options.engine)},
                                      {"layers", num_layers}, {"experts", map.num_experts},
                                      {"ranks", num_ranks},   {"replicas", num_replicas},
                                      {"settings", settings}};
    fmt::print("{}\n", json.dump(2));
  } else {
    print_values("{}: {} of {} on {} in {}\n", arguments.out, counted(num_replicas, "replica"),
                 counted(map.num_experts, "expert"), counted(num_ranks, "rank"), counted(num_layers, "MoE layer"));
    print_values("{}: {}\n", to_string(options.engine), settings);
  }
  return kOk;
}

}  // namespace

Command maps_command() {
  auto a = std::make_shared<MapsArguments>();
  Option out = out_option(a->out, "FILE", "Write the placement here, atomically");
  out.required = true;
  return {.name = "maps",
          .summary = "Place experts for the start of an inference engine, in its file format",
          .examples = std::string(kMapsExamples),
          .meaning = std::string(kMapsMeaning),
          .options = joined({{input_option(a->input, "Load or plan"), std::move(out)},
                             options_of(a->options),
                             {json_option(a->json, "Print the report as JSON")}}),
          .run = [a](const Given& given) { return cli::run(*a, given); }};
}

}  // namespace foremoe::cli

// foremoe synth: draws traces and loads from a routing model.

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "command.h"
#include "console.h"
#include "foremoe/core/error.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/synthesis/synthesis_request.h"
#include "foremoe/rollout/trace_file.h"
#include "progress.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kSynthExamples =
    R"(  foremoe synth --out step.load.safetensors                                            GRPO groups, 8 ranks, 4 layers
  foremoe synth --shape Qwen3-30B-A3B --ranks 64 --out step.load.safetensors           48 layers × 32 micro-steps
  foremoe synth --sequences-per-rank 1 --tokens-per-rank 4096 --group-spread 1 --out bursty.load.safetensors
  foremoe synth --routing zipf --skew 1.2 --layers 1 --out zipf.load.safetensors
  foremoe synth --routing w1 --out w1.load.safetensors                                 a stress workload
  foremoe synth --kind trace --ranks 8 --micro-steps 4 --tokens-per-rank 1024 --out step.trace.safetensors
)";

struct SynthArguments : SynthesisRequest {
  std::string kind = "load";
  std::string out;
  bool json = false;
};

std::string meaning() {
  std::string text =
      "Routing models (all deterministic by --seed):\n"
      "  grpo       popularity ∝ exp(normal per layer and expert + normal per group + small term per sequence): skewed "
      "and\n"
      "             stable over the step; varies strongly between micro-steps that contain whole groups\n"
      "  zipf       the i-th most popular expert is chosen with probability ∝ i^−skew\n"
      "  dirichlet  popularity ~ Dirichlet(concentration): a small concentration is skewed\n";
  for (int w = 0; w < kNumStressWorkloads; ++w) {
    const auto workload = static_cast<StressWorkload>(w);
    text += fmt::format("  {:<9}  {}\n", name_of(workload), description_of(workload));
  }
  text += "\nShapes, MoE layers / experts / top-k:\n";
  for (const ModelShape& shape : model_shapes()) {
    text += fmt::format("  {:<18} {} / {} / {}\n", shape.name, shape.moe_layers, shape.experts, shape.top_k);
  }
  return text;
}

int run(const SynthArguments& arguments) {
  const SynthesisOptions options = synthesis_options(arguments);
  const RoutingModel model = routing_model(arguments);
  const std::string name = describe(options, model);
  expect_output(arguments.out);
  {
    const Activity activity(fmt::format("drawing {}", name));
    if (arguments.kind == "trace") {
      RoutingTrace trace = synthesize_trace(options, model);
      trace.model = arguments.shape;
      write_trace(trace, arguments.out);
    } else {
      const LoadTable load = synthesize_load(options, model);
      write_load(load, arguments.out, {{"origin", "synthetic: " + name}});
    }
  }
  if (arguments.json) {
    const nlohmann::ordered_json json{{"out", arguments.out},
                                      {"kind", arguments.kind},
                                      {"micro_steps", options.num_micro_steps},
                                      {"layers", options.num_layers},
                                      {"ranks", options.num_ranks},
                                      {"experts", options.num_experts},
                                      {"top_k", options.top_k},
                                      {"tokens_per_rank", options.tokens_per_rank},
                                      {"seed", options.seed},
                                      {"routing", name}};
    fmt::print("{}\n", json.dump(2));
  } else {
    print_values("{}: a {} of {} micro-steps × {} layers, top-{} of {} experts on {} ranks; {}\n", arguments.out,
                 arguments.kind, options.num_micro_steps, options.num_layers, options.top_k, options.num_experts,
                 options.num_ranks, name);
  }
  return kOk;
}

}  // namespace

Command synth_command() {
  auto a = std::make_shared<SynthArguments>();
  Option out = out_option(a->out, "FILE", "Write the trace or load here, atomically");
  out.required = true;
  Option kind = word_option({.name = "kind",
                             .value = "load|trace",
                             .help = "load: counts only. trace: the route of every token",
                             .initial = "load",
                             .main = true},
                            {"load", "trace"}, [a](std::size_t i) { a->kind = i == 0 ? "load" : "trace"; });
  return {.name = "synth",
          .summary = "Generate a trace or a load from a routing model",
          .examples = std::string(kSynthExamples),
          .meaning = meaning(),
          .options = joined({{std::move(out), std::move(kind)},
                             options_of(static_cast<SynthesisRequest&>(*a)),
                             {json_option(a->json, "Print the shape and seed as JSON")}}),
          .run = [a](const Given&) { return cli::run(*a); }};
}

}  // namespace foremoe::cli

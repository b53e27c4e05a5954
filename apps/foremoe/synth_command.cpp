// foremoe synth: traces and loads drawn from a model of routing.

#include <fmt/format.h>

#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "command.h"
#include "console.h"
#include "foremoe/core/error.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/synthesis/synthesis.h"
#include "foremoe/rollout/trace_file.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kExamples =
    R"(  foremoe synth --out step.load.safetensors                                            GRPO groups, 8 ranks, 4 layers
  foremoe synth --shape Qwen3-30B-A3B --ranks 64 --out step.load.safetensors           48 layers × 32 micro-steps
  foremoe synth --sequences-per-rank 1 --tokens-per-rank 4096 --group-spread 1 --out bursty.load.safetensors
  foremoe synth --routing zipf --skew 1.2 --layers 1 --out zipf.load.safetensors
  foremoe synth --routing w1 --out w1.load.safetensors                                 a stress workload
  foremoe synth --kind trace --ranks 8 --micro-steps 4 --tokens-per-rank 1024 --out step.trace.safetensors
)";

struct SynthArguments {
  SynthesisOptions options;
  std::optional<int> layers, experts, top_k;  // none: the shape's, or the options'
  std::string routing = "grpo";
  ZipfRouting zipf;
  DirichletRouting dirichlet;
  GrpoRouting grpo;
  std::string shape;
  std::string kind = "load";
  std::string out;
  bool json = false;
};

std::string meaning() {
  std::string text =
      "Routing models (all deterministic by --seed):\n"
      "  grpo       popularity ∝ exp(normal per layer and expert + normal per group + a little per sequence): skewed "
      "and\n"
      "             stable over the step, wild from micro-step to micro-step where a group meets in one\n"
      "  zipf       the i-th most popular expert is chosen ∝ i^−skew\n"
      "  dirichlet  popularity ~ Dirichlet(concentration): small is skewed\n";
  for (int w = 0; w < kNumStressWorkloads; ++w) {
    const auto workload = static_cast<StressWorkload>(w);
    text += fmt::format("  {:<9}  {}\n", name_of(workload), description_of(workload));
  }
  text += "\nShapes, MoE layers / experts / top-k:\n";
  for (const ModelShape& shape : model_shapes()) {
    text += fmt::format("  {:<16} {} / {} / {}\n", shape.name, shape.moe_layers, shape.experts, shape.top_k);
  }
  return text;
}

RoutingModel model_of(const SynthArguments& arguments) {
  if (arguments.routing == "grpo") return arguments.grpo;
  if (arguments.routing == "zipf") return arguments.zipf;
  if (arguments.routing == "dirichlet") return arguments.dirichlet;
  if (const auto workload = stress_workload_named(arguments.routing)) return *workload;
  throw InputError({.field = "routing"},
                   fmt::format("'{}', expected grpo, zipf, dirichlet or w0 to w7", arguments.routing));
}

// The shape's numbers, but those that were given beside it.
SynthesisOptions options_of(const SynthArguments& arguments) {
  SynthesisOptions options = arguments.options;
  if (!arguments.shape.empty()) {
    const auto shape = find_model_shape(arguments.shape);
    if (!shape) {
      throw InputError({.field = "shape"},
                       fmt::format("'{}', expected one of {}", arguments.shape, fmt::join(model_names(), ", ")));
    }
    options = with_shape(options, *shape);
  }
  options.num_layers = arguments.layers.value_or(options.num_layers);
  options.num_experts = arguments.experts.value_or(options.num_experts);
  options.top_k = arguments.top_k.value_or(options.top_k);
  return options;
}

int run(const SynthArguments& arguments) {
  const SynthesisOptions options = options_of(arguments);
  const RoutingModel model = model_of(arguments);
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
    fmt::print("{}: a {} of {} micro-steps × {} layers, top-{} of {} experts on {} ranks; {}\n", arguments.out,
               arguments.kind, options.num_micro_steps, options.num_layers, options.top_k, options.num_experts,
               options.num_ranks, name);
  }
  return kOk;
}

}  // namespace

Command synth_command() {
  auto a = std::make_shared<SynthArguments>();
  SynthesisOptions& o = a->options;
  constexpr IntegerRange kCount{1, std::numeric_limits<int>::max()};
  const auto shaped = [&](const char* name, std::optional<int>& value, int initial, const char* help) {
    return integer_option(
        {.name = name, .value = "N", .help = help, .initial = fmt::format("{}, or the shape's", initial), .main = true},
        value, kCount);
  };
  const auto count = [&](const char* name, auto& value, const char* help) {
    return integer_option({.name = name, .value = "N", .help = help}, value, kCount);
  };
  const auto number = [&](const char* name, double& value, double most, const char* help) {
    return number_option({.name = name, .value = "X", .help = help}, value, {.least = 0, .most = most});
  };
  Option out = out_option(a->out, "FILE", "Write it here; it appears whole or not at all");
  out.required = true;
  Option kind = word_option({.name = "kind",
                             .value = "load|trace",
                             .help = "load: counts alone. trace: the route of every token",
                             .initial = "load",
                             .main = true},
                            {"load", "trace"}, [a](std::size_t i) { a->kind = i == 0 ? "load" : "trace"; });
  Option ranks = count("ranks", o.num_ranks, "Ranks of the expert-parallel group");
  ranks.main = true;
  Option per_node = count("ranks_per_node", o.ranks_per_node, "Ranks of a node");
  per_node.initial = "8, or all if fewer";
  return {
      .name = "synth",
      .summary = "Draw a trace or a load from a model of routing",
      .examples = std::string(kExamples),
      .meaning = meaning(),
      .options =
          {std::move(out),
           std::move(kind),
           text_option({.name = "routing", .value = "NAME", .help = "Routing model, see --help-all", .main = true},
                       a->routing),
           text_option({.name = "shape",
                        .value = "MODEL",
                        .help = "Take layers, experts and top-k of a model, see --help-all",
                        .main = true},
                       a->shape),
           shaped("layers", a->layers, o.num_layers, "MoE layers"),
           shaped("experts", a->experts, o.num_experts, "Experts of a layer"),
           shaped("top_k", a->top_k, o.top_k, "Experts that a token chooses"),
           count("micro_steps", o.num_micro_steps, "Micro-steps of the step"),
           std::move(ranks),
           std::move(per_node),
           count("tokens_per_rank", o.tokens_per_rank, "Tokens of a rank in a micro-step. A token counts once"),
           count("sequences_per_rank", o.sequences_per_rank, "Sequences of a rank in a micro-step"),
           count("group_size", o.group_size, "Sequences of a GRPO group"),
           number("length_spread", o.length_spread, 10, "Sequence lengths are proportional to exp(this · normal)"),
           word_option<Layout>({.name = "layout",
                                .value = "grouped|shuffled",
                                .help = "grouped: a group's sequences share a micro-step. shuffled: they are anywhere"},
                               o.layout, {{"grouped", Layout::kGrouped}, {"shuffled", Layout::kShuffled}}),
           number("step_spread", a->grpo.step_spread, 20, "grpo: how skewed the step is"),
           number("group_spread", a->grpo.group_spread, 20, "grpo: how much groups differ"),
           number("skew", a->zipf.skew, 100, "zipf: 0 is uniform"),
           number("permute_probability", a->zipf.permute_probability, 1,
                  "zipf: probability that a micro-step draws anew which experts are popular"),
           number("concentration", a->dirichlet.concentration, 1e9, "dirichlet: of a layer, above 0"),
           number("sequence_concentration", a->dirichlet.sequence_concentration, 1e9,
                  "dirichlet: of a sequence around its layer. 0: all sequences alike"),
           seed_option(
               {.name = "seed", .value = "N", .help = "Random seed. The same seed and options give the same bytes"},
               o.seed),
           json_option(a->json, "Print what was made as JSON")},
      .run = [a](const Given&) { return cli::run(*a); }};
}

}  // namespace foremoe::cli

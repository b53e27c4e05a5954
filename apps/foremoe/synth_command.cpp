// foremoe synth: traces and loads drawn from a model of routing.

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "command.h"
#include "foremoe/core/error.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/synthesis/synthesis.h"
#include "foremoe/rollout/trace_file.h"
#include "help_text.h"
#include "input_options.h"
#include "messages.h"
#include "option_checks.h"
#include "output_file.h"

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
  throw InputError({.file = "--routing", .field = {}, .index = {}},
                   fmt::format("'{}', expected grpo, zipf, dirichlet or w0 to w7", arguments.routing));
}

// The library names its fields; the user knows them as options.
std::string option_of(const std::string& field) {
  if (field == "num_layers") return "--layers";
  if (field == "num_experts") return "--experts";
  if (field == "num_micro_steps") return "--micro-steps";
  if (field == "num_ranks") return "--ranks";
  std::string option = "--" + field;
  for (char& c : option) {
    if (c == '_') c = '-';
  }
  return option;
}

template <class Synthesise>
auto naming_options(Synthesise&& synthesise) {
  try {
    return synthesise();
  } catch (const InputError& error) {
    const std::string& field = error.where().field;
    if (field.empty()) throw;
    const std::string message = error.what();
    throw InputError({.file = option_of(field), .field = {}, .index = {}}, message.substr(field.size() + 2));
  }
}

// The shape's numbers, but those that were given beside it.
SynthesisOptions options_of(const SynthArguments& arguments) {
  SynthesisOptions options = arguments.options;
  if (!arguments.shape.empty()) {
    const auto shape = find_model_shape(arguments.shape);
    if (!shape) {
      std::string names;
      for (const ModelShape& s : model_shapes()) names += fmt::format("{}{}", names.empty() ? "" : ", ", s.name);
      throw InputError({.file = "--shape", .field = {}, .index = {}},
                       fmt::format("'{}', expected one of {}", arguments.shape, names));
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
      RoutingTrace trace = naming_options([&] { return synthesize_trace(options, model); });
      trace.model = arguments.shape;
      write_trace(trace, arguments.out);
    } else {
      const LoadTable load = naming_options([&] { return synthesize_load(options, model); });
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

Command synth_command(CLI::App& parent) {
  auto arguments = std::make_shared<SynthArguments>();
  SynthesisOptions& options = arguments->options;
  CLI::App* const command = parent.add_subcommand("synth", "Draw a trace or a load from a model of routing");
  command->add_option("-o,--out", arguments->out, "Write it here; it appears whole or not at all")
      ->type_name("FILE")
      ->required();
  command->add_option("--kind", arguments->kind, "load: counts alone. trace: the route of every token")
      ->type_name("load|trace")
      ->capture_default_str()
      ->check(CLI::IsMember({"load", "trace"}).description(""));
  command->add_option("--routing", arguments->routing, "Routing model, see below")
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--shape", arguments->shape, "Layers, experts and top-k of a model, see below")
      ->type_name("MODEL");
  const auto shaped = [&](const char* name, std::optional<int>& value, int initial, const char* text) {
    command->add_option(name, value, text)
        ->type_name("N")
        ->default_str(fmt::format("{}, or the shape's", initial))
        ->check(at_least(1));
  };
  shaped("--layers", arguments->layers, options.num_layers, "MoE layers");
  shaped("--experts", arguments->experts, options.num_experts, "Experts of a layer");
  shaped("--top-k", arguments->top_k, options.top_k, "Experts that a token chooses");
  const auto count = [&](const char* name, auto& value, const char* text) {
    command->add_option(name, value, text)->type_name("N")->capture_default_str()->check(at_least(1));
  };
  count("--micro-steps", options.num_micro_steps, "Micro-steps of the step");
  count("--ranks", options.num_ranks, "Accelerators of the expert-parallel group");
  command->add_option("--ranks-per-node", options.ranks_per_node, "Ranks of a node (default: 8, or all if fewer)")
      ->type_name("N")
      ->check(at_least(1));
  count("--tokens-per-rank", options.tokens_per_rank, "Tokens of a rank in a micro-step, before they choose experts");
  count("--sequences-per-rank", options.sequences_per_rank, "Sequences of a rank in a micro-step");
  count("--group-size", options.group_size, "Sequences of a GRPO group");
  const auto number = [&](const char* name, double& value, double most, const char* text) {
    command->add_option(name, value, text)->type_name("X")->capture_default_str()->check(fraction(most));
  };
  number("--length-spread", options.length_spread, 10, "Lengths ∝ exp(this · normal)");
  command
      ->add_option_function<std::string>(
          "--layout",
          [&options](const std::string& text) {
            options.layout = text == "shuffled" ? Layout::kShuffled : Layout::kGrouped;
          },
          "grouped: a group's sequences share a micro-step. shuffled: they are anywhere")
      ->type_name("grouped|shuffled")
      ->default_str("grouped")
      ->check(CLI::IsMember({"grouped", "shuffled"}).description(""));
  number("--step-spread", arguments->grpo.step_spread, 20, "grpo: how skewed the step is");
  number("--group-spread", arguments->grpo.group_spread, 20, "grpo: how much groups differ");
  number("--skew", arguments->zipf.skew, 100, "zipf: 0 is uniform");
  number("--permute-probability", arguments->zipf.permute_probability, 1,
         "zipf: that a micro-step draws anew which experts are popular");
  number("--concentration", arguments->dirichlet.concentration, 1e9, "dirichlet: of a layer, above 0");
  number("--sequence-concentration", arguments->dirichlet.sequence_concentration, 1e9,
         "dirichlet: of a sequence around its layer; 0: all sequences alike");
  command->add_option("--seed", options.seed, "Same seed and options, same bytes")
      ->type_name("N")
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Print what was made as JSON");
  teach(*command, kExamples, meaning());
  return {command, [arguments] { return run(*arguments); }};
}

}  // namespace foremoe::cli

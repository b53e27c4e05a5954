// foremoe inspect: shows the contents and the imbalance of a trace, a load or a plan.

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "command.h"
#include "console.h"
#include "foremoe/core/error.h"
#include "foremoe/core/safetensors.h"
#include "foremoe/evaluate/evaluation_json.h"
#include "foremoe/evaluate/workload.h"
#include "foremoe/plan/homes_file.h"
#include "foremoe/plan/plan_file.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/count_routes.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/load_statistics.h"
#include "foremoe/rollout/trace_file.h"
#include "load_picture.h"
#include "plot.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kInspectExamples =
    R"(  foremoe inspect step.trace.safetensors --ranks 8       how imbalanced is this rollout on 8 ranks?
  foremoe inspect step.load.safetensors --layer 0        draw layer 0
  foremoe inspect step.load.safetensors --plot hot.png   which experts are hot, and do they stay hot?
  foremoe inspect plan.safetensors                       show the loads after planning
)";

constexpr std::string_view kInspectMeaning =
    R"(The picture shows the tokens that each rank serves in one layer, over the whole step and in each micro-step. --layer
selects the layer (default: the most imbalanced). The load of a whole RL step is skewed but steady. The loads of its
micro-steps differ widely.
Columns of the table per layer, with experts at home:
  step, mean, max   imbalance ρ, busiest rank ÷ mean rank: of the whole step, and mean and max over its micro-steps
  max_vio …         verl's violations of the experts' loads over the step, d = load ÷ mean − 1: the largest d, the smallest
                    (−1: an expert without tokens), and the mean of |d|
  fluctuation       variation of an expert's share over the micro-steps: standard deviation ÷ mean, mean over experts
  micro-steps       ρ of each micro-step, from 1 (▁) to the largest ρ of all layers (█)
For a plan file, the loads are those after planning.
--plot draws two maps of each expert's load ÷ mean of its layer: over the step, and the value that it reaches in at
least three of four micro-steps. Experts well above 1 in both maps stay hot: one copy per step suffices for them.
)";

struct InspectArguments {
  InputOptions input;
  std::optional<int> layer;  // to draw; none: the most imbalanced
  int rows = 64;             // micro-steps to draw
  bool json = false;
  std::string plot;
};

// Returns the layer to draw.
int layer_to_draw(const InspectArguments& arguments, int num_layers, int most_uneven) {
  const int layer = arguments.layer.value_or(most_uneven);
  if (layer >= num_layers && arguments.layer) {
    throw InputError({.field = "layer"},
                     fmt::format("{}, but {} has {}", layer, arguments.input.path, counted(num_layers, "layer")));
  }
  return layer;
}

void print_picture(const Array<Tokens, 3>& rank_loads, int layer, const InspectArguments& arguments) {
  LoadPicture picture{.title = fmt::format("Layer {}: tokens served by each of {} ranks", layer, rank_loads.extent(2)),
                      .rank_loads = Array<Tokens, 2>({rank_loads.extent(0), rank_loads.extent(2)}),
                      .max_rows = arguments.rows,
                      .columns = terminal_columns(),
                      .color = wants_color()};
  for (std::size_t m = 0; m < rank_loads.extent(0); ++m) {
    std::ranges::copy(rank_loads.row(m, layer), picture.rank_loads.row(m).begin());
  }
  fmt::print("{}", draw(picture));
}

using Json = nlohmann::ordered_json;

Json to_json(const LoadViolation& v) {
  return {{"max_vio", v.max_vio}, {"min_vio", v.min_vio}, {"avg_vio", v.avg_vio}};
}

Json to_json(const LayerStatistics& s, int layer, std::span<const double> rho) {
  return {{"layer", layer},
          {"rho", {{"step", s.step_ratio}, {"mean", s.mean_ratio}, {"max", s.max_ratio}}},
          {"step", to_json(s.step)},
          {"mean_micro_step", to_json(s.mean_micro_step)},
          {"worst_micro_step", to_json(s.worst_micro_step)},
          {"fluctuation", s.fluctuation},
          {"micro_step_rho", rho}};
}

Json describe_trace(const RoutingTrace& trace) {
  std::int64_t longest = 0;
  for (int s = 0; s < trace.num_sequences(); ++s) longest = std::max(longest, trace.sequence_length(s));
  Json json{{"kind", "trace"},
            {"model", trace.model},
            {"origin", trace.origin},
            {"sequences", trace.num_sequences()},
            {"tokens", trace.num_tokens},
            {"longest_sequence", longest},
            {"layers", trace.num_layers},
            {"layer_ids", trace.layer_ids},
            {"experts", trace.num_experts},
            {"top_k", trace.top_k},
            {"weightless_experts", trace.weightless_experts},
            {"experts_of_layer", trace.experts_of_layer},
            {"top_k_of_layer", trace.top_k_of_layer},
            {"route_bytes", static_cast<std::int64_t>(shape_of(trace).token_bytes()) * trace.num_tokens},
            {"recorded_ranks", trace.ranks}};
  return json;
}

// Returns the size of the load's routes in bytes if ids are stored in the narrowest type.
std::int64_t route_bytes(const LoadTable& load) {
  return num_assignments(load) * static_cast<std::int64_t>(size_of(narrowest_route_type(load.num_experts())));
}

void print_route_bytes(const Json& json) {
  fmt::print("its routes: {:.1f} MB\n", 1e-6 * json["route_bytes"].get<double>());
}

void print_trace(const Json& trace, const std::string& path) {
  const auto number = [&](const char* key) { return trace[key].get<std::int64_t>(); };
  print_values("{}: a trace of {} in {} (the longest {}), {}, top-{} of {}\n", path, counted(number("tokens"), "token"),
               counted(number("sequences"), "sequence"), number("longest_sequence"), counted(number("layers"), "layer"),
               number("top_k"), counted(number("experts"), "expert"));
  print_route_bytes(trace);
  if (number("weightless_experts") > 0) fmt::print("weightless ids: {}\n", number("weightless_experts"));
  for (const char* key : {"experts_of_layer", "top_k_of_layer"}) {
    if (!trace[key].empty()) fmt::print("{}: {}\n", key, trace[key].dump());
  }
  for (const char* key : {"model", "origin"}) {
    if (!trace[key].get<std::string>().empty()) print_values("{}: {}\n", key, trace[key].get<std::string>());
  }
}

// Returns the tokens of each rank's home experts: [micro_step][layer][rank].
Array<Tokens, 3> loads_at_home(const LoadTable& table, ArrayView<const RankId, 2> home) {
  const auto& shape = table.load.shape();
  Array<Tokens, 3> loads({shape[0], shape[1], shape[2]});
  std::vector<std::int64_t> of_expert(shape[3]);
  for (std::size_t m = 0; m < shape[0]; ++m) {
    for (std::size_t l = 0; l < shape[1]; ++l) {
      table.expert_loads(MicroStepId{m}, LayerId{l}, of_expert);
      for (std::size_t e = 0; e < of_expert.size(); ++e) loads(m, l, home(l, e)) += Tokens{of_expert[e]};
    }
  }
  return loads;
}

void print_layers(const std::vector<LayerStatistics>& layers, const std::vector<std::vector<double>>& rho) {
  double largest = 1;
  for (const LayerStatistics& s : layers) largest = std::max(largest, s.max_ratio);
  TextTable table(
      {"layer", "ρ step", "ρ mean", "ρ max", "max_vio", "min_vio", "avg_vio", "fluctuation", "micro-steps"});
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const LayerStatistics& s = layers[l];
    table.add({fmt::format("{}", l), fmt::format("{:.3f}", s.step_ratio), fmt::format("{:.3f}", s.mean_ratio),
               fmt::format("{:.3f}", s.max_ratio), fmt::format("{:.3f}", s.step.max_vio),
               fmt::format("{:.3f}", s.step.min_vio), fmt::format("{:.3f}", s.step.avg_vio),
               fmt::format("{:.3f}", s.fluctuation), sparkline(rho[l], 1, largest, 32)});
  }
  fmt::print("{}\n", table.to_string());
}

void print_json(const Json& json) { fmt::print("{}\n", json.dump(2)); }

// Describes a trace or a load, and draws it if requested.
void inspect_rollout(const Safetensors& file, const InspectArguments& arguments) {
  const bool is_trace = file_kind(file) == FileKind::kTrace;
  Json json{{"kind", "load"}};
  InputOptions input = arguments.input;
  if (is_trace) {
    const RoutingTrace trace = read_trace(file);
    json = describe_trace(trace);
    if (!trace.has_batching() && input.ranks == 0) {
      input.ranks = std::gcd(8, trace.num_experts);
      note(fmt::format("{}: no batching recorded; assuming {} (change with --ranks R)", input.path,
                       counted(input.ranks, "rank")));
    }
  }
  ThreadPool pool;
  const Workload read = read_load_or_trace(input, pool);
  note_all(read.remarks);
  const LoadTable& load = read.load;
  const Array<RankId, 2> homes = initial_homes(input.homes, load);
  const std::vector<LayerStatistics> layers = layer_statistics(load, homes);
  const Array<double, 2> ratios = imbalance_ratios(load, homes);  // [micro_step][layer]

  std::vector<std::vector<double>> rho(layers.size());  // [layer][micro_step]
  json.update(shape_json(load));
  if (!is_trace) json["route_bytes"] = route_bytes(load);
  json["load_digest"] = load_digest(load);
  json["layer_statistics"] = Json::array();
  for (std::size_t l = 0; l < layers.size(); ++l) {
    for (std::size_t m = 0; m < ratios.extent(0); ++m) rho[l].push_back(ratios(m, l));
    json["layer_statistics"].push_back(to_json(layers[l], static_cast<int>(l), rho[l]));
  }
  const auto worst = std::ranges::max_element(layers, {}, &LayerStatistics::mean_ratio);
  const int layer = layer_to_draw(arguments, load.num_layers(), static_cast<int>(worst - layers.begin()));
  if (arguments.json) {
    print_json(json);
    return draw_heat(arguments.plot, load);
  }
  if (is_trace) print_trace(json, input.path);
  print_values("{}{}, top-{}\n", is_trace ? "as batched: " : fmt::format("{}: a load of ", input.path), describe(load),
               load.top_k);
  if (!is_trace) print_route_bytes(json);
  if (std::ranges::all_of(load.load.flat(), [](Tokens tokens) { return tokens == Tokens{0}; })) {
    fmt::print("no load\n");
  } else {
    fmt::print("\n");
    print_layers(layers, rho);
    print_picture(loads_at_home(load, homes), layer, arguments);
  }
  draw_heat(arguments.plot, load);
}

struct LayerSummary {
  std::vector<double> rho;  // [micro_step], 1 without load
  double mean_rho = 1;
  double max_rho = 1;
  double copies_per_event = 0;
  double guests_per_event = 0;  // only guests with a quota
};

std::vector<LayerSummary> summarise(const StepPlan& plan, const Array<Tokens, 3>& loads) {
  std::vector<LayerSummary> layers(loads.extent(1));
  for (std::size_t l = 0; l < layers.size(); ++l) {
    LayerSummary& layer = layers[l];
    int with_load = 0;
    double sum = 0;
    for (std::size_t m = 0; m < loads.extent(0); ++m) {
      const std::optional<double> rho = imbalance(loads.row(m, l));
      layer.rho.push_back(rho.value_or(1));
      layer.max_rho = std::max(layer.max_rho, layer.rho.back());
      if (rho) {
        ++with_load;
        sum += *rho;
      }
    }
    if (with_load > 0) layer.mean_rho = sum / with_load;
    CopyFinder copies(plan, LayerId{l});
    for (int t = 0; t < plan.num_events(); ++t) {
      for (int r = 0; r < plan.num_ranks(); ++r) {
        layer.copies_per_event += static_cast<double>(copies.into(EventId{t}, RankId{r}).size()) / plan.num_events();
        for (int s = 0; s < plan.num_slots(); ++s) {
          const ExpertId e = plan.slot_expert(t, l, r, s);
          const bool serves =
              e != kNoExpert && plan.home(l, e) != RankId{r} && plan.slot_tokens(t, l, r, s) > Tokens{0};
          if (serves) layer.guests_per_event += 1.0 / plan.num_events();
        }
      }
    }
  }
  return layers;
}

// Describes a plan: policy and options, copies, and loads of the ranks.
void inspect_plan(const Safetensors& file, const InspectArguments& arguments) {
  const StepPlan plan = read_plan(file);
  const Array<Tokens, 3> loads = planned_loads(plan);
  const std::vector<LayerSummary> layers = summarise(plan, loads);
  Json json{{"kind", "plan"},
            {"policy", plan.policy},
            {"residency", to_string(plan.residency)},
            {"guest_slots", plan.guest_slots},
            {"in_flight", plan.in_flight},
            {"events", plan.num_events()},
            {"micro_steps", plan.num_micro_steps()},
            {"layers", plan.num_layers()},
            {"ranks", plan.num_ranks()},
            {"ranks_per_node", plan.ranks_per_node},
            {"experts", plan.num_experts()},
            {"load_digest", plan.load_digest},
            {"options", Json::parse(plan.options)},
            {"layer_statistics", Json::array()}};
  for (std::size_t l = 0; l < layers.size(); ++l) {
    json["layer_statistics"].push_back({{"layer", l},
                                        {"rho", {{"mean", layers[l].mean_rho}, {"max", layers[l].max_rho}}},
                                        {"copies_per_event", layers[l].copies_per_event},
                                        {"guests_per_event", layers[l].guests_per_event},
                                        {"micro_step_rho", layers[l].rho}});
  }
  const auto worst = std::ranges::max_element(layers, {}, &LayerSummary::mean_rho);
  const int layer = layer_to_draw(arguments, plan.num_layers(), static_cast<int>(worst - layers.begin()));
  if (arguments.json) return print_json(json);

  print_values("{}: a plan by {}, residency {}, {} per rank and layer, {} in flight\n", arguments.input.path,
               plan.policy, to_string(plan.residency), counted(plan.guest_slots, "guest slot"),
               counted(plan.in_flight, "micro-step"));
  fmt::print("{} of {} × {}, {} on {}, {} to a node\n", counted(plan.num_events(), "event"),
             counted(plan.num_micro_steps(), "micro-step"), counted(plan.num_layers(), "layer"),
             counted(plan.num_experts(), "expert"), counted(plan.num_ranks(), "rank"), plan.ranks_per_node);
  print_values("options: {}\nfor the load {}\n\n", plan.options, plan.load_digest);
  if (std::ranges::all_of(loads.flat(), [](Tokens tokens) { return tokens == Tokens{0}; })) {
    fmt::print("no load\n");
    return;
  }

  const double largest = std::ranges::max_element(layers, {}, &LayerSummary::max_rho)->max_rho;
  TextTable table({"layer", "ρ mean", "ρ max", "copies per event", "guests per event", "micro-steps"});
  for (std::size_t l = 0; l < layers.size(); ++l) {
    table.add({fmt::format("{}", l), fmt::format("{:.4f}", layers[l].mean_rho),
               fmt::format("{:.4f}", layers[l].max_rho), fmt::format("{:.2f}", layers[l].copies_per_event),
               fmt::format("{:.2f}", layers[l].guests_per_event), sparkline(layers[l].rho, 1, largest, 32)});
  }
  fmt::print("{}\n", table.to_string());
  print_picture(loads, layer, arguments);
}

void inspect_homes(const Safetensors& file, const InspectArguments& arguments) {
  const Homes homes = read_homes(file);
  const auto [layers, experts] = homes.home.shape();
  Json json{{"kind", "homes"},          {"layers", layers},
            {"ranks", homes.num_ranks}, {"ranks_per_node", homes.ranks_per_node},
            {"experts", experts},       {"homes_digest", homes_digest(homes.home)},
            {"origin", homes.origin}};
  if (arguments.json) return print_json(json);
  print_values("{}: homes of {} × {} on {}, {} to a node\n", arguments.input.path,
               counted(static_cast<std::int64_t>(layers), "layer"),
               counted(static_cast<std::int64_t>(experts), "expert"), counted(homes.num_ranks, "rank"),
               homes.ranks_per_node);
  print_values("origin: {}\ndigest {}\n", homes.origin, json["homes_digest"].get<std::string>());
}

int run(const InspectArguments& arguments) {
  expect_plot(arguments.plot, {arguments.input.path});
  const Safetensors file = open_input(arguments.input.path);
  const FileKind kind = file_kind(file);
  const bool has_loads = kind != FileKind::kPlan && kind != FileKind::kHomes;
  if (!arguments.plot.empty() && !has_loads) {
    throw InputError({.field = "plot"}, fmt::format("draws a trace or a load, and {} has none", arguments.input.path));
  }
  if (has_loads) {
    inspect_rollout(file, arguments);
  } else if (kind == FileKind::kPlan) {
    inspect_plan(file, arguments);
  } else {
    inspect_homes(file, arguments);
  }
  return kOk;
}

}  // namespace

Command inspect_command() {
  auto a = std::make_shared<InspectArguments>();
  constexpr IntegerRange kFrom0{0, std::numeric_limits<int>::max()};
  return {
      .name = "inspect",
      .summary = "Show the contents of a file and the imbalance of its loads",
      .examples = std::string(kInspectExamples),
      .meaning = std::string(kInspectMeaning),
      .options = joined({{input_option(a->input.path, "Trace, load or plan file")},
                         without(options_of(a->input), {"previous", "previous_load"}),
                         {plot_option(a->plot, "loads of experts by layer", ""),
                          integer_option({.name = "layer",
                                          .value = "L",
                                          .help = "Layer to draw",
                                          .initial = "the most imbalanced",
                                          .main = true},
                                         a->layer, kFrom0),
                          integer_option({.name = "rows", .value = "N", .help = "Micro-steps to draw", .main = true},
                                         a->rows, kFrom0),
                          json_option(a->json, "Print all figures as one JSON object")}}),
      .run = [a](const Given&) { return cli::run(*a); },
      .any_process = true};
}

}  // namespace foremoe::cli

// What a plan holds: who made it and how, what it copies, and the loads that it gives the ranks.

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "foremoe/plan/plan_file.h"
#include "foremoe/plan/step_plan.h"
#include "inspection.h"
#include "load_picture.h"
#include "text_table.h"
#include "wording.h"

namespace foremoe::cli {
namespace {

struct LayerSummary {
  std::vector<double> rho;  // [micro_step], 1 without load
  double mean_rho = 1;
  double max_rho = 1;
  double copies_per_event = 0;
  double guests_per_event = 0;  // with quota
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

}  // namespace

nlohmann::ordered_json inspect_plan(const Safetensors& file, const InspectArguments& arguments) {
  using Json = nlohmann::ordered_json;
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
  if (arguments.json) return json;

  fmt::print("{}: a plan by {}, residency {}, {} per rank and layer, {} in flight\n", arguments.input.path, plan.policy,
             to_string(plan.residency), counted(plan.guest_slots, "guest slot"), counted(plan.in_flight, "micro-step"));
  fmt::print("{} of {} × {}, {} on {}, {} to a node\n", counted(plan.num_events(), "event"),
             counted(plan.num_micro_steps(), "micro-step"), counted(plan.num_layers(), "layer"),
             counted(plan.num_experts(), "expert"), counted(plan.num_ranks(), "rank"), plan.ranks_per_node);
  fmt::print("options: {}\nfor the load {}\n\n", plan.options, plan.load_digest);
  if (std::ranges::all_of(loads.flat(), [](Tokens tokens) { return tokens == Tokens{0}; })) {
    fmt::print("no load\n");
    return json;
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
  return json;
}

}  // namespace foremoe::cli

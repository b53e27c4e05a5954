#include "foremoe/evaluate/layout_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

namespace foremoe {
namespace {

// Megatron-LM's option for stages with different numbers of layers; empty if all have the same. It refuses the option
// for hybrid models.
std::string layers_of_stages(const ModelShape& model, int stages) {
  std::string layers;
  const bool hybrid = std::ranges::count(model.layer_kinds, LayerKind::kNone) > 0;
  bool equal = true;
  for (int s = 0; s < stages; ++s) {
    const int of_stage = stage_of(model, s, stages).layers();
    equal = equal && of_stage * stages == model.layers();
    layers += fmt::format("{}t*{}", s == 0 ? "" : "|", of_stage);
  }
  if (equal) return "";
  if (hybrid) return fmt::format(" (stages of these layers: {})", layers);
  return fmt::format(" --pipeline-model-parallel-layout 'E{}L' (with MTP layers, m before L)", layers);
}

}  // namespace

std::string describe_plan(const PlannerOptions& planner) {
  return fmt::format("{}, {}, {}", counted(planner.guest_slots, "guest slot"), to_string(planner.residency),
                     to_string(preference(planner)));
}

std::vector<std::string> trainer_options(const LayoutChoice& choice, const ModelShape& model) {
  const LayoutResult& best = choice.best_layout();
  std::vector<std::string> options{
      fmt::format("Megatron-LM: --expert-model-parallel-size {} --pipeline-model-parallel-size {}{}", best.layout.ep,
                  best.layout.stages, layers_of_stages(model, best.layout.stages))};
  if (!choice.planned) {
    options.emplace_back("ForeMoE: no plan");
  } else {
    const PlannerOptions& planner = best.planned->planner;
    options.push_back(fmt::format("ForeMoE: guest_slots={}, residency=\"{}\", prefer=\"{}\"", planner.guest_slots,
                                  to_string(planner.residency), to_string(preference(planner))));
    if (planner.copy_price) options.back() += fmt::format(", copy_price={:.4g}", *planner.copy_price);
    if (planner.free_copies) options.back() += fmt::format(", free_copies={:.4g}", *planner.free_copies);
  }
  return options;
}

std::string recommendation(const LayoutChoice& choice) {
  const LayoutResult& best = choice.best_layout();
  const double seconds = choice.best_step().seconds;
  const std::string plan =
      choice.planned ? fmt::format("planned ({})", describe_plan(best.planned->planner)) : "without a plan";
  std::string text = fmt::format("{}, {}: {:.4g} s per step", describe(best.layout), plan, seconds);
  if (!choice.unplanned) return text + "; no layout fits without a plan";
  const LayoutResult& unplanned = choice.layouts[*choice.unplanned];
  if (!choice.planned) return text + ", the fastest that fits; no plan is faster";
  return fmt::format("{}, {:.3f}× as fast as the fastest that fits without a plan, {}: {:.4g} s", text,
                     unplanned.unplanned.seconds / seconds, describe(unplanned.layout), unplanned.unplanned.seconds);
}

std::vector<std::string> layout_remarks(const Workload& whole, const CostModel& cost) {
  std::vector<std::string> remarks{
      "Tensor and context parallelism are not modelled. Nor is the reduction of gradients outside the experts, which "
      "more stages make smaller"};
  if (whole.origin.starts_with("synthetic")) remarks.emplace_back("The routes are synthetic, not recorded");
  if (whole.load.num_layers() < cost.model().moe_layers) {
    remarks.push_back(fmt::format("The input has {} of the model's {} MoE layers, so all stages see the same layers",
                                  whole.load.num_layers(), cost.model().moe_layers));
  }
  return remarks;
}

nlohmann::ordered_json to_json(const LayoutChoice& choice, const Workload& whole, const CostModel& cost) {
  using Object = nlohmann::ordered_json;
  const auto step_json = [&](const LayoutStep& step) {
    return Object{{"seconds", step.seconds}, {"memory_bytes", step.memory.value}, {"fits", choice.fits(step)}};
  };
  const auto name_json = [](const JobLayout& layout) {
    return Object{{"ep", layout.ep}, {"stages", layout.stages}, {"groups", layout.groups}};
  };
  Object layouts = Object::array();
  for (const LayoutResult& result : choice.layouts) {
    Object json = name_json(result.layout);
    json["micro_steps"] = result.micro_steps;
    json["unplanned"] = step_json(result.unplanned);
    json["balanced_seconds"] = result.balanced_seconds;
    json["planned"] = nullptr;
    json["not_planned"] = result.not_planned;
    if (result.planned) {
      const PlannerOptions& planner = result.planned->planner;
      json["planned"] = step_json(result.planned->step);
      json["planned"].update({{"gain", speedup(result.unplanned.seconds, result.planned->step.seconds)},
                              {"guest_slots", planner.guest_slots},
                              {"residency", to_string(planner.residency)},
                              {"prefer", to_string(preference(planner))}});
    }
    layouts.push_back(std::move(json));
  }
  Object best = name_json(choice.best_layout().layout);
  best.update({{"planned", choice.planned}, {"seconds", choice.best_step().seconds}});
  Object unplanned;
  if (choice.unplanned) {
    const LayoutResult& result = choice.layouts[*choice.unplanned];
    unplanned = name_json(result.layout);
    unplanned["seconds"] = result.unplanned.seconds;
  }
  return {{"gpus", whole.load.num_ranks()},
          {"cluster", cost.cluster().name},
          {"model", cost.model().name},
          {"memory_limit_bytes", choice.limit.value},
          {"mean_tokens_per_rank", choice.mean_tokens.value},
          {"layouts", std::move(layouts)},
          {"best", std::move(best)},
          {"best_unplanned", std::move(unplanned)},
          {"recommendation", recommendation(choice)},
          {"options", trainer_options(choice, cost.model())},
          {"remarks", layout_remarks(whole, cost)}};
}

}  // namespace foremoe

#include "plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "console.h"
#include "foremoe/core/error.h"
#include "foremoe/rollout/load_statistics.h"
#include "planning_arguments.h"
#include "run_in_python.h"

namespace foremoe::cli {
namespace {

using Json = nlohmann::ordered_json;

void add_parts(const PhaseSeconds& parts, Json& json) {
  for (const PhasePart& part : phase_parts()) {
    std::string name(part.name);
    std::ranges::replace(name, '_', ' ');
    json[name] = json.value(name, 0.0) + parts.*part.seconds;
  }
}

Json parts_of_step(const SimulatedStep& step) {
  Json parts = {{"homes moved", step.home_move_seconds}, {"placement, measured here", step.exposed_placement_seconds}};
  add_parts(step.recompute.parts, parts);
  add_parts(step.policy_update.parts, parts);
  return parts;
}

Json parts_of_phases(const SimulatedStep& step) {
  Json recompute = Json::object();
  Json update = {{"homes moved", step.home_move_seconds}};
  add_parts(step.recompute.parts, recompute);
  add_parts(step.policy_update.parts, update);
  return {std::move(recompute), std::move(update)};
}

// Lines below the title.
std::vector<std::string> facts_of(const PlotRequest& plot) {
  const LoadTable& load = plot.groups.front().load;
  std::vector<std::string> facts{fmt::format("{}: {}", load.name, describe(plot.groups)), describe(plot.options)};
  if (const std::string layers = describe_layers(load, plot.cost); !layers.empty()) facts.back() += "; " + layers;
  if (plot.panels == Panels::kPhases) facts.emplace_back("speedup: of the whole step over vanilla");
  return facts;
}

Json peaks_of(const std::string& name, const FitOfPlan& plan) {
  Json rows = Json::array();
  Json gigabytes = Json::array();
  for (const FitPeak& peak : plan.micro_steps) {
    rows.push_back(peak.rows.value);
    gigabytes.push_back(static_cast<double>(peak.memory.value) / 1e9);
  }
  return {{"name", name}, {"rows", std::move(rows)}, {"gigabytes", std::move(gigabytes)}};
}

// Returns a text per layer. Each digit is the number of kHeatBounds that the hottest expert of a cell reaches.
Json digits_of(const Array<double, 2>& heat, std::size_t experts_in_cell) {
  Json rows = Json::array();
  for (std::size_t l = 0; l < heat.extent(0); ++l) {
    std::string row;
    for (std::size_t e = 0; e < heat.extent(1); e += experts_in_cell) {
      const auto cell = heat.row(l).subspan(e, std::min(experts_in_cell, heat.extent(1) - e));
      const auto reached = std::ranges::upper_bound(kHeatBounds, std::ranges::max(cell)) - kHeatBounds.begin();
      row += static_cast<char>('0' + reached);
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

// command: begins error messages.
void draw_in_python(const char* command, Json request, const std::string& path) {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) return;
  request["command"] = command;
  run_in_python("_plot", request.dump(-1, ' ', false, Json::error_handler_t::replace), {path});
}

}  // namespace

Option plot_option(std::string& path, const std::string& shows, const std::string& needs) {
  return text_option(
      {.name = "plot",
       .value = "FILE",
       .help =
           fmt::format("Draw the {} as a .png or .svg file. Needs {}the Python package and matplotlib", shows, needs),
       .main = true},
      path);
}

void expect_plot(const std::string& path, const std::vector<std::string>& inputs) {
  if (path.empty()) return;
  if (!path.ends_with(".png") && !path.ends_with(".svg")) {
    throw InputError({.field = "plot"}, fmt::format("'{}', expected a name that ends in .png or .svg", path));
  }
  expect_output(path, inputs, "plot");
  expect_in_python("plot", "matplotlib");
}

void draw_plot(const PlotRequest& plot, std::span<const Evaluation> evaluations, int exit_code) {
  if (plot.path.empty()) return;
  const bool whole = plot.panels == Panels::kStep;
  Json bars = Json::array();
  Json left_out = Json::array();
  const SimulatedStep* any = nullptr;
  for (const Evaluation& e : evaluations) {
    if (!e.step) {
      left_out.push_back(e.planned() ? fmt::format("{}: WRONG plan: {}", e.policy, e.check.violations.front().message)
                                     : fmt::format("{}: {}", e.policy, e.skipped));
      continue;
    }
    any = &*e.step;
    bars.push_back(whole
                       ? Json{{"policy", e.policy},
                              {"note", fmt::format("{:.3f}", e.figures.rho.mean)},
                              {"parts", Json::array({parts_of_step(*e.step)})}}
                       : Json{{"policy", e.policy},
                              {"note", fmt::format("{:.4g} s, {:.3f}×", e.step->step_seconds, e.speedup_over_vanilla)},
                              {"parts", parts_of_phases(*e.step)}});
  }
  if (any == nullptr) throw InputError({.field = "plot"}, "has nothing to show: no policy has a plan");
  const Json shown = whole
                         ? Json::array({Json{{"name", "step"}, {"ideal", any->ideal_step_seconds}}})
                         : Json::array({Json{{"name", "recompute"}, {"ideal", any->recompute.ideal_seconds}},
                                        Json{{"name", "policy update"}, {"ideal", any->policy_update.ideal_seconds}}});
  Json request = {
      {"title", fmt::format("Modelled training step: {} on {}", plot.cost.model().name, plot.cost.cluster().name)},
      {"facts", facts_of(plot)},
      {"panels", shown},
      {"note", whole ? "mean ρ" : "step, speedup"},
      {"bars", std::move(bars)},
      {"left_out", std::move(left_out)},
      {"exit_code", exit_code}};
  draw_in_python(whole ? "compare" : "simulate", std::move(request), plot.path);
}

void draw_fit(const PlotRequest& plot, const Fit& fit, int exit_code) {
  if (plot.path.empty()) return;
  const std::string& policy = fit.planned.evaluation.policy;
  draw_in_python("fit",
                 {{"title", fmt::format("Busiest rank: {} on {}", plot.cost.model().name, plot.cost.cluster().name)},
                  {"facts", facts_of(plot)},
                  {"series", {peaks_of("now: vanilla", fit.now), peaks_of("planned: " + policy, fit.planned)}},
                  {"limit", static_cast<double>(fit.limit.value) / 1e9},
                  {"exit_code", exit_code}},
                 plot.path);
}

void draw_layout(const std::string& path, const LayoutChoice& choice, const Workload& whole, const CostModel& cost) {
  if (path.empty()) return;
  Json request = {{"title", fmt::format("Modelled step by layout: {} on {} × {}", cost.model().name,
                                        whole.load.num_ranks(), cost.cluster().name)},
                  {"facts", {fmt::format("{}: {}", whole.load.name, describe(whole.load)), recommendation(choice)}},
                  {"exit_code", kOk}};
  for (const std::string& remark : layout_remarks(whole, cost)) request["facts"].push_back(remark + ".");
  request["layouts"] = to_json(choice, whole, cost)["layouts"];
  draw_in_python("layout", std::move(request), path);
}

void draw_heat(const std::string& path, const LoadTable& load) {
  if (path.empty()) return;
  constexpr std::size_t kMostCells = 50'000;  // of a map: a command's argument is shorter than 128 KiB
  const ExpertHeat heat = expert_heat(load);
  const std::span<const double> step = heat.step.flat();
  const auto hottest = static_cast<std::size_t>(std::ranges::max_element(step) - step.begin());
  if (step[hottest] == 0) throw InputError({.field = "plot"}, "has nothing to show: the load has no tokens");
  const std::size_t experts = heat.step.extent(1);
  const std::size_t in_cell = (step.size() + kMostCells - 1) / kMostCells;
  draw_in_python("inspect",
                 {{"title", "Loads of experts ÷ mean of their layer"},
                  {"facts",
                   {fmt::format("{}: {}", load.name, describe(load)),
                    fmt::format("hottest: expert {} of layer {}, {:.2f} times the mean over the step",
                                hottest % experts, hottest / experts, step[hottest])}},
                  {"bounds", kHeatBounds},
                  {"experts_in_cell", in_cell},
                  {"heat",
                   {{"whole step", digits_of(heat.step, in_cell)},
                    {"reached in at least three of four micro-steps", digits_of(heat.steady, in_cell)}}},
                  {"exit_code", kOk}},
                 path);
}

}  // namespace foremoe::cli

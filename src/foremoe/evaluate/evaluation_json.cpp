#include "foremoe/evaluate/evaluation_json.h"

#include <nlohmann/json.hpp>

#include "foremoe/plan/plan_json.h"

namespace foremoe {
namespace {

using Json = nlohmann::ordered_json;

Json parts_json(const PhaseSeconds& parts) {
  Json json;
  for (const PhasePart& part : phase_parts()) json[std::string(part.name)] = parts.*part.seconds;
  return json;
}

Json memory_json(const RankMemory& memory) {
  return {{"state", memory.state.value},
          {"guest_weights", memory.guest_weights.value},
          {"guest_gradients", memory.guest_gradients.value},
          {"activations", memory.activations.value}};
}

Json place_json(const FitPlace& place) {
  return {{"phase", to_string(place.phase)}, {"micro_step", place.micro_step.value},
          {"layer", place.layer.value},      {"rank", place.rank.value},
          {"rows", place.rows.value},        {"bytes", place.memory.value}};
}

Json peaks_json(const std::vector<FitPeak>& peaks) {
  Json json = Json::array();
  for (const FitPeak& peak : peaks) json.push_back({{"rows", peak.rows.value}, {"bytes", peak.memory.value}});
  return json;
}

Json number_or_null(std::optional<double> number) { return number ? Json(*number) : Json(); }

Json capacities_json(const std::vector<Capacity>& capacities) {
  Json json = Json::array();
  for (const Capacity& one : capacities) {
    json.push_back({{"trainer", one.trainer},
                    {"option", one.option},
                    {"smallest", number_or_null(one.smallest)},
                    {"rounded", number_or_null(one.rounded())}});
  }
  return json;
}

Json fit_json(const FitOfPlan& f) {
  const StepPlan& plan = f.evaluation.plan;
  return {{"policy", f.evaluation.policy},
          {"residency", to_string(plan.residency)},
          {"guest_slots", plan.guest_slots},
          {"most_rows", place_json(f.most_rows)},
          {"most_memory", place_json(f.most_memory)},
          {"memory",
           {{"state", f.terms.state.value},
            {"guest_weights", f.terms.guest_weights.value},
            {"guest_gradients", f.terms.guest_gradients.value},
            {"kept_activations", f.activations.kept.value},
            {"running_layer", f.activations.working.value}}},
          {"exceeds", f.exceeds ? place_json(*f.exceeds) : Json()},
          {"largest_micro_batch_tokens", f.largest_micro_batch.value},
          {"ranks", peaks_json(f.ranks)},
          {"layers", peaks_json(f.layers)},
          {"micro_steps", peaks_json(f.micro_steps)},
          {"capacities", capacities_json(f.capacities)}};
}

Json choice_json(const PlanChoice& choice) {
  Json trials = Json::array();
  for (const PlanTrial& trial : choice.trials) {
    trials.push_back({{"plan", to_string(trial)}, {"seconds", trial.seconds}, {"memory_bytes", trial.memory.value}});
  }
  return {{"plan", to_string(choice.best())}, {"fits", choice.fits}, {"trials", std::move(trials)}};
}

void add_step(const Evaluation& e, Json& json) {
  const SimulatedStep& step = *e.step;
  json["dispatch"] = to_string(step.policy_update.dispatch);
  json["dispatch_estimated"] = step.policy_update.dispatch_estimated;
  json["rows"] = to_string(step.policy_update.rows);
  json["attention"] = to_string(step.policy_update.attention);
  const NetworkRows& rows = step.policy_update.network_rows;
  json["pairs"] = rows.pairs;
  json["nic_rows"] = {{"mean", rows.mean}, {"max", rows.max}};
  json["step_seconds"] = step.step_seconds;
  json["speedup_over_vanilla"] = e.speedup_over_vanilla;
  if (e.homes_speedup) json["homes_speedup"] = *e.homes_speedup;
  json["ideal_step_seconds"] = step.ideal_step_seconds;
  json["fraction_of_ideal"] = e.fraction_of_ideal();
  json["exposed_copy_seconds"] = step.exposed_copy_seconds;
  json["home_move_seconds"] = step.home_move_seconds;
  json["peak_tokens_per_rank"] = step.peak_tokens_per_rank.value;
  json["memory_bytes_per_rank"] = step.memory_bytes_per_rank.value;
  json["placement"] = {{"seconds", e.placement_seconds},
                       {"planners", e.planners},
                       {"exposed_seconds", step.exposed_placement_seconds},
                       {"step_seconds", step.placed_step_seconds},
                       {"speedup_over_vanilla", e.placed_speedup}};
  json["rl_step_seconds"] = step.rl_step_seconds;
  json["rl_step_speedup"] = e.rl_step_speedup;
  if (e.framework_step_seconds) {
    json["framework"] = {{"seconds_per_layer", kFrameworkSeconds},
                         {"step_seconds", *e.framework_step_seconds},
                         {"speedup_over_vanilla", e.framework_speedup}};
  }
  if (e.largest_micro_batch_tokens) json["largest_micro_batch_tokens"] = e.largest_micro_batch_tokens->value;
  json["phases"] = Json::array({to_json(step.recompute), to_json(step.policy_update)});
}

// Adds `ep` and `groups`, [{group, first_rank, …}]. to_json(g) returns the other keys of group g.
void add_groups(const auto& job, const auto& to_json, Json& json) {
  json["ep"] = job.ep;
  json["groups"] = Json::array();
  for (std::size_t g = 0; g < job.groups.size(); ++g) {
    json["groups"].push_back({{"group", g}, {"first_rank", static_cast<int>(g) * job.ep}});
    json["groups"].back().update(to_json(g));
  }
}

}  // namespace

Json to_json(const SimulatedPhase& phase) {
  Json traffic = Json::array();
  for (const LinkTraffic& link : phase.traffic) {
    traffic.push_back({{"link", link.link},
                       {"row_bytes", link.rows.value},
                       {"copy_bytes", link.copies.value},
                       {"gradient_bytes", link.gradients.value},
                       {"busiest_bytes", link.busiest.value},
                       {"busiest_use", link.busiest_use}});
  }
  Json between = Json::array();
  for (std::size_t from = 0; from < phase.between_nodes.extent(0); ++from) {
    Json row = Json::array();
    for (const Bytes bytes : phase.between_nodes.row(from)) row.push_back(bytes.value);
    between.push_back(std::move(row));
  }
  return {{"phase", to_string(phase.phase)},
          {"path", to_string(phase.path)},
          {"seconds", phase.seconds},
          {"ideal_seconds", phase.ideal_seconds},
          {"ideal_exchange_seconds", phase.ideal_exchange_seconds},
          {"mean_expert_seconds", phase.mean_expert_seconds},
          {"utilisation", phase.utilisation},
          {"parts", parts_json(phase.parts)},
          {"peak_tokens", phase.peak_tokens.value},
          {"copies", phase.copies},
          {"memory", memory_json(phase.memory)},
          {"arena_bytes", phase.arena.value},
          {"traffic", std::move(traffic)},
          {"between_nodes", std::move(between)}};
}

Json to_json(const Evaluation& e, bool checked) {
  if (!e.planned()) return {{"policy", e.policy}, {"skipped", e.skipped}};
  if (e.figures.layers == 0) {  // too broken to measure
    return {{"policy", e.policy}, {"ok", e.check.ok()}, {"violations", to_json(e.check)["violations"]}};
  }
  Json json = to_json(e.figures);
  json["policy"] = e.policy;  // the plan is vanilla's if foremoe chose not to plan
  json["plan_seconds"] = e.times.wall_seconds;
  json["plan_us_per_layer_micro_step"] = e.us_per_layer_micro_step();
  json["threads"] = e.threads;
  if (e.choice) json["choice"] = choice_json(*e.choice);
  if (checked || !e.check.ok()) json["ok"] = e.check.ok();
  if (!e.check.ok()) json["violations"] = to_json(e.check)["violations"];
  if (e.step) add_step(e, json);
  return json;
}

Json to_json(const JobEvaluation& job, bool checked) {
  Json array = Json::array();
  for (std::size_t p = 0; p < job.policies.size(); ++p) {
    array.push_back(to_json(job.policies[p], checked));
    if (job.groups.empty()) continue;
    array.back()["slowest_group"] = job.slowest[p].group;
    add_groups(
        job, [&](std::size_t g) { return to_json(job.groups[g][p], checked); }, array.back());
  }
  return array;
}

static Json to_json(const Fit& fit, std::optional<Bytes> budget) {
  Json tried = Json::array();
  for (const FitTrial& trial : fit.tried) {
    tried.push_back({{"guest_slots", trial.guest_slots}, {"bytes", trial.memory.value}});
  }
  Json paths = Json::array();
  for (const BreakEven& even : fit.break_even) {
    paths.push_back({{"path", even.path},
                     {"copy_seconds", even.copy_seconds},
                     {"return_seconds", even.return_seconds},
                     {"recompute_rows", even.recompute_rows.value},
                     {"policy_update_rows", even.policy_update_rows.value},
                     {"hiding_tokens", even.hiding_tokens ? Json(even.hiding_tokens->value) : Json()}});
  }
  return {{"fits", !fit.planned.exceeds},
          {"limit_bytes", fit.limit.value},
          {"budget_bytes", budget ? Json(budget->value) : Json()},
          {"mean_tokens_per_rank", fit.mean_tokens.value},
          {"now", fit_json(fit.now)},
          {"planned", fit_json(fit.planned)},
          {"fewest_guest_slots", fit.fewest_guest_slots ? Json(*fit.fewest_guest_slots) : Json()},
          {"tried", std::move(tried)},
          {"break_even", std::move(paths)}};
}

Json to_json(const JobFit& fit, std::optional<Bytes> budget) {
  Json json = to_json(fit.whole, budget);
  if (!fit.groups.empty())
    add_groups(
        fit, [&](std::size_t g) { return to_json(fit.groups[g], budget); }, json);
  return json;
}

Json shape_json(const LoadTable& load) {
  return {{"micro_steps", load.num_micro_steps()}, {"layers", load.num_layers()},   {"ranks", load.num_ranks()},
          {"ranks_per_node", load.ranks_per_node}, {"experts", load.num_experts()}, {"top_k", load.top_k}};
}

}  // namespace foremoe

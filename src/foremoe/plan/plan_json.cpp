#include "foremoe/plan/plan_json.h"

#include <nlohmann/json.hpp>

namespace foremoe {

nlohmann::ordered_json to_json(const PlanFigures& figures) {
  const auto mean_max = [](const Spread& s) { return nlohmann::ordered_json{{"mean", s.mean}, {"max", s.max}}; };
  nlohmann::ordered_json json{
      {"policy", figures.policy},
      {"events", figures.events},
      {"micro_steps", figures.micro_steps},
      {"layers", figures.layers},
      {"ranks", figures.ranks},
      {"ranks_per_node", figures.ranks_per_node},
      {"experts", figures.experts},
      {"guest_slots", figures.guest_slots},
      {"residency", to_string(figures.residency)},
      {"in_flight", figures.in_flight},
      {"max_vio", figures.max_vio},
      {"avg_vio", figures.avg_vio},
      {"rho", {{"mean", figures.rho.mean}, {"p99", figures.rho.p99}, {"max", figures.rho.max}}},
      {"rho_lower_bound", {{"mean", figures.rho_lower_bound_mean}}},
      {"rho_padded", mean_max(figures.rho_padded)},
      {"align", figures.align},
      {"max_rank_tokens", figures.max_rank_tokens},
      {"copies", figures.copies},
      {"copies_per_layer_event", figures.copies_per_layer_event},
      {"copies_max_per_rank", figures.copies_max_per_rank},
      {"home_moves", figures.home_moves},
      {"guests_per_layer", figures.guests_per_layer},
      {"node_link_tokens", mean_max(figures.node_link_tokens)},
  };
  if (figures.node_link_rows) json["node_link_rows"] = mean_max(*figures.node_link_rows);
  return json;
}

nlohmann::ordered_json to_json(const Violation& violation) {
  nlohmann::ordered_json json{{"kind", to_string(violation.kind)}};
  if (violation.event) json["event"] = violation.event->value;
  if (violation.layer) json["layer"] = violation.layer->value;
  if (violation.rank) json["rank"] = violation.rank->value;
  if (violation.slot) json["slot"] = violation.slot->value;
  if (violation.expert) json["expert"] = violation.expert->value;
  json["message"] = violation.message;
  return json;
}

nlohmann::ordered_json to_json(const CheckReport& report) {
  nlohmann::ordered_json violations = nlohmann::ordered_json::array();
  for (const Violation& v : report.violations) violations.push_back(to_json(v));
  nlohmann::ordered_json json{{"ok", report.ok()},
                              {"violations", std::move(violations)},
                              {"num_violations", report.num_violations()},
                              {"not_checked", report.not_checked}};
  if (report.figures) json["figures"] = to_json(*report.figures);
  return json;
}

}  // namespace foremoe

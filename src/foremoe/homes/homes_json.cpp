#include "foremoe/homes/homes_json.h"

#include <nlohmann/json.hpp>

namespace foremoe {
namespace {

nlohmann::ordered_json to_json(const HomeCosts& costs, const Homes& homes) {
  const auto ratio = [](double a, double b) { return b == 0 ? 0.0 : a / b; };
  const Topology topology{homes.num_ranks, homes.ranks_per_node};
  const auto assignments = static_cast<double>(costs.assignments);
  return {{"pairs", costs.pairs},
          {"pairs_per_token", ratio(static_cast<double>(costs.pairs), static_cast<double>(costs.tokens))},
          {"busiest_node_pairs", ratio(static_cast<double>(costs.busiest_node_pairs) * topology.num_nodes(),
                                       static_cast<double>(costs.pairs))},
          {"node_load", ratio(static_cast<double>(costs.busiest_node) * topology.num_nodes(), assignments)},
          {"rank_load", ratio(static_cast<double>(costs.busiest_rank) * topology.num_ranks, assignments)}};
}

nlohmann::ordered_json to_json(const HomesJudgement& judgement, const Homes& homes) {
  return {{"sequences", judgement.num_sequences},
          {"tokens", judgement.chosen.tokens},
          {"contiguous", to_json(judgement.contiguous, homes)},
          {"chosen", to_json(judgement.chosen, homes)}};
}

}  // namespace

nlohmann::ordered_json to_json(const ChosenHomes& chosen) {
  const Homes& homes = chosen.homes;
  nlohmann::ordered_json json{
      {"layers", homes.home.extent(0)},         {"experts", homes.home.extent(1)},          {"ranks", homes.num_ranks},
      {"ranks_per_node", homes.ranks_per_node}, {"homes_digest", homes_digest(homes.home)}, {"moved", chosen.num_moved},
      {"fitted", to_json(chosen.fitted, homes)}};
  json["held_out"] = chosen.held_out ? to_json(*chosen.held_out, homes) : nlohmann::ordered_json();
  return json;
}

}  // namespace foremoe

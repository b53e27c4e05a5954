// Recomputes the figures of a plan from their definitions and compares reported figures with them.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "foremoe/plan/check_rules.h"

namespace foremoe::check {
namespace {

double mean_of(const std::vector<double>& samples) {
  double sum = 0;
  for (const double x : samples) sum += x / static_cast<double>(samples.size());
  return sum;
}

// numpy.percentile(samples, q) with its default method, linear interpolation.
double percentile(std::vector<double> samples, double q) {
  std::ranges::sort(samples);
  const double position = q / 100 * static_cast<double>(samples.size() - 1);
  const double below = samples[static_cast<std::size_t>(std::floor(position))];
  const double above = samples[static_cast<std::size_t>(std::ceil(position))];
  return below + (above - below) * (position - std::floor(position));
}

Spread spread(const std::vector<double>& samples, double when_empty) {
  if (samples.empty()) return {when_empty, when_empty, when_empty};
  return {mean_of(samples), percentile(samples, 99), std::ranges::max(samples)};
}

std::int64_t up_to_multiple(std::int64_t n, std::int64_t of) { return n % of == 0 ? n : n + of - n % of; }

// Returns the most tokens or rows that a node sends to or receives from other nodes. crossing[a][b]: from a to b.
std::int64_t busiest_link(const std::vector<std::vector<std::int64_t>>& crossing) {
  std::int64_t busiest = 0;
  for (std::size_t node = 0; node < crossing.size(); ++node) {
    std::int64_t sent = 0;
    std::int64_t received = 0;
    for (std::size_t other = 0; other < crossing.size(); ++other) {
      if (other == node) continue;
      sent += crossing[node][other];
      received += crossing[other][node];
    }
    busiest = std::max({busiest, sent, received});
  }
  return busiest;
}

// deliveries() fills replicas on a source's own rank and node first, which maximises tokens that stay on their node.
std::int64_t link_tokens(const Subject& subject, EventId t, LayerId l, int num_nodes) {
  std::vector<std::vector<std::int64_t>> crossing(num_nodes, std::vector<std::int64_t>(num_nodes));
  for (const std::vector<Delivery>& of_expert : deliveries(subject, t, l)) {
    for (const Delivery& d : of_expert) {
      crossing[d.source.value / subject.plan.ranks_per_node][d.replica.value / subject.plan.ranks_per_node] += d.rows;
    }
  }
  return busiest_link(crossing);
}

std::int64_t link_rows(const Subject& subject, EventId t, LayerId l, int num_nodes) {
  const StepPlan& plan = subject.plan;
  const std::size_t top_k = static_cast<std::size_t>(subject.tokens->top_k());
  const std::vector<std::vector<Delivery>> delivered = deliveries(subject, t, l);
  std::vector<std::vector<std::int64_t>> crossing(num_nodes, std::vector<std::int64_t>(num_nodes));
  for (int source = 0; source < plan.num_ranks(); ++source) {
    std::vector<std::vector<int>> nodes_of_rows(plan.num_experts());  // [expert][row of this source, in row order]
    for (int e = 0; e < plan.num_experts(); ++e) {
      for (const Delivery& d : delivered[e]) {
        if (d.source != RankId{source}) continue;
        nodes_of_rows[e].insert(nodes_of_rows[e].end(), d.rows, d.replica.value / plan.ranks_per_node);
      }
    }
    std::vector<ExpertId> routes;
    subject.tokens->gather(plan.event_micro_step[t.index()], RankId{source}, l, routes);
    std::vector<std::size_t> seen(plan.num_experts());  // [expert], rows so far
    for (std::size_t token = 0; token < routes.size(); token += top_k) {
      std::set<int> nodes;
      for (std::size_t k = 0; k < top_k; ++k) {
        const ExpertId e = routes[token + k];
        if (e < ExpertId{0}) continue;
        const std::vector<int>& nodes_of_expert = nodes_of_rows[e.index()];
        expect_counted(seen[e.index()] < nodes_of_expert.size(), RankId{source});
        nodes.insert(nodes_of_expert[seen[e.index()]++]);
      }
      for (const int node : nodes) ++crossing[source / plan.ranks_per_node][node];
    }
  }
  return busiest_link(crossing);
}

void balance_and_traffic(const Subject& subject, PlanFigures& figures) {
  const auto& [plan, load, options, tokens] = subject;
  const int num_nodes = (plan.num_ranks() + plan.ranks_per_node - 1) / plan.ranks_per_node;
  // [pair with load]
  std::vector<double> max_vio, avg_vio, rho, rho_lower_bound, rho_padded, node_link_tokens, node_link_rows;
  const std::vector<EventId> forward = first_events(subject);
  for (int m = 0; m < load.num_micro_steps(); ++m) {
    const EventId t = forward[m];
    for (int l = 0; l < load.num_layers(); ++l) {
      subject.throw_if_cancelled();
      std::int64_t total = 0;
      for (const Tokens count : load.load[m][l].flat()) total += count.value;
      if (total == 0) continue;
      double most = 0;  // load of an expert
      double distances = 0;
      const int experts = load.experts_in(LayerId{l});
      for (int e = 0; e < experts; ++e) {
        std::int64_t of_expert = 0;
        for (int r = 0; r < load.num_ranks(); ++r) of_expert += load.load(m, l, r, e).value;
        const double times_mean = static_cast<double>(of_expert) * experts / static_cast<double>(total);
        most = std::max(most, times_mean);
        distances += std::abs(times_mean - 1);
      }
      max_vio.push_back(most - 1);
      avg_vio.push_back(distances / experts);
      std::int64_t largest = 0;
      std::int64_t largest_padded = 0;
      for (int r = 0; r < plan.num_ranks(); ++r) {
        std::int64_t of_rank = 0;
        std::int64_t padded = 0;
        for (const Tokens quota : plan.slot_tokens.row(t, l, r)) {
          of_rank += quota.value;
          padded += up_to_multiple(quota.value, options.align);
        }
        largest = std::max(largest, of_rank);
        largest_padded = std::max(largest_padded, padded);
      }
      const double mean = static_cast<double>(total) / plan.num_ranks();
      rho.push_back(static_cast<double>(largest) / mean);
      rho_lower_bound.push_back(std::ceil(mean) / mean);
      rho_padded.push_back(static_cast<double>(largest_padded) / mean);
      figures.max_rank_tokens = std::max(figures.max_rank_tokens, largest);
      node_link_tokens.push_back(static_cast<double>(link_tokens(subject, t, LayerId{l}, num_nodes)));
      if (tokens == nullptr) continue;
      node_link_rows.push_back(static_cast<double>(link_rows(subject, t, LayerId{l}, num_nodes)));
    }
  }
  figures.max_vio = spread(max_vio, 0).mean;
  figures.avg_vio = spread(avg_vio, 0).mean;
  figures.rho = spread(rho, 1);
  figures.rho_lower_bound_mean = spread(rho_lower_bound, 1).mean;
  figures.rho_padded = spread(rho_padded, 1);
  figures.node_link_tokens = spread(node_link_tokens, 0);
  if (tokens != nullptr) figures.node_link_rows = spread(node_link_rows, 0);
}

void copies_and_guests(const StepPlan& plan, PlanFigures& figures) {
  std::int64_t guests_with_quota = 0;
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      for (int r = 0; r < plan.num_ranks(); ++r) {
        int into_rank = 0;
        for (int s = 0; s < plan.num_slots(); ++s) {
          if (is_copy(plan, EventId{t}, LayerId{l}, RankId{r}, SlotId{s})) ++into_rank;
          const ExpertId e = plan.slot_expert(t, l, r, s);
          const bool guest = e != kNoExpert && plan.home(l, e) != RankId{r};
          if (guest && plan.slot_tokens(t, l, r, s) > Tokens{0}) ++guests_with_quota;
        }
        figures.copies += into_rank;
        figures.copies_max_per_rank = std::max(figures.copies_max_per_rank, into_rank);
      }
    }
  }
  const double layer_events = static_cast<double>(plan.num_events()) * plan.num_layers();
  if (layer_events == 0) return;
  figures.copies_per_layer_event = static_cast<double>(figures.copies) / layer_events;
  figures.guests_per_layer = static_cast<double>(guests_with_quota) / layer_events;
}

int moved_homes(const Subject& subject) {
  const StepPlan& plan = subject.plan;
  const ArrayView<const RankId, 2> given = subject.options.initial_home;
  int moves = 0;
  for (int l = 0; l < plan.num_layers(); ++l) {
    for (int e = 0; e < plan.num_experts(); ++e) {
      const RankId contiguous = subject.load.contiguous_home(LayerId{l}, ExpertId{e});
      if (plan.home(l, e) != (given.data() ? given(l, e) : contiguous)) ++moves;
    }
  }
  return moves;
}

}  // namespace

PlanFigures recompute_figures(const Subject& subject) {
  const auto& [plan, load, options, tokens] = subject;
  PlanFigures figures{.policy = plan.policy,
                      .residency = plan.residency,
                      .events = plan.num_events(),
                      .micro_steps = load.num_micro_steps(),
                      .layers = load.num_layers(),
                      .ranks = load.num_ranks(),
                      .ranks_per_node = plan.ranks_per_node,
                      .experts = load.num_experts(),
                      .guest_slots = plan.guest_slots,
                      .in_flight = plan.in_flight,
                      .align = options.align,
                      .home_moves = moved_homes(subject)};
  balance_and_traffic(subject, figures);
  copies_and_guests(plan, figures);
  return figures;
}

void reported_figures(const PlanFigures& reported, const PlanFigures& recomputed, Findings& findings) {
  const auto differs = [&](std::string_view name, const auto& a, const auto& b) {
    findings.add(
        {.kind = ViolationKind::kFigure, .message = fmt::format("{} is reported as {}, recomputed as {}", name, a, b)});
  };
  const auto same = [&](std::string_view name, const auto& a, const auto& b) {
    if (a != b) differs(name, a, b);
  };
  const auto close = [&](std::string_view name, double a, double b) {  // the order of summation may differ
    if (!(std::abs(a - b) <= 1e-9 * std::max(std::abs(a), std::abs(b)))) differs(name, a, b);
  };
  const auto close_spread = [&](const std::string& name, const Spread& a, const Spread& b) {
    close(name + ".mean", a.mean, b.mean);
    close(name + ".p99", a.p99, b.p99);
    close(name + ".max", a.max, b.max);
  };
  same("policy", reported.policy, recomputed.policy);
  same("residency", to_string(reported.residency), to_string(recomputed.residency));
  same("events", reported.events, recomputed.events);
  same("micro_steps", reported.micro_steps, recomputed.micro_steps);
  same("layers", reported.layers, recomputed.layers);
  same("ranks", reported.ranks, recomputed.ranks);
  same("ranks_per_node", reported.ranks_per_node, recomputed.ranks_per_node);
  same("experts", reported.experts, recomputed.experts);
  same("guest_slots", reported.guest_slots, recomputed.guest_slots);
  same("in_flight", reported.in_flight, recomputed.in_flight);
  close("max_vio", reported.max_vio, recomputed.max_vio);
  close("avg_vio", reported.avg_vio, recomputed.avg_vio);
  close_spread("rho", reported.rho, recomputed.rho);
  close("rho_lower_bound.mean", reported.rho_lower_bound_mean, recomputed.rho_lower_bound_mean);
  same("align", reported.align, recomputed.align);
  close_spread("rho_padded", reported.rho_padded, recomputed.rho_padded);
  same("max_rank_tokens", reported.max_rank_tokens, recomputed.max_rank_tokens);
  same("copies", reported.copies, recomputed.copies);
  close("copies_per_layer_event", reported.copies_per_layer_event, recomputed.copies_per_layer_event);
  same("copies_max_per_rank", reported.copies_max_per_rank, recomputed.copies_max_per_rank);
  same("home_moves", reported.home_moves, recomputed.home_moves);
  close("guests_per_layer", reported.guests_per_layer, recomputed.guests_per_layer);
  close_spread("node_link_tokens", reported.node_link_tokens, recomputed.node_link_tokens);
  if (reported.node_link_rows && recomputed.node_link_rows) {
    close_spread("node_link_rows", *reported.node_link_rows, *recomputed.node_link_rows);
  } else if (reported.node_link_rows) {
    findings.not_checked("node_link_rows, because the tokens are unknown");
  }
}

}  // namespace foremoe::check

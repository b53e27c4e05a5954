// Checks quotas, their equality in both passes, and the recorded loads and bounds. Checks route_tokens and assign_rows
// against an independent implementation of the sweeps, replica by replica.

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "foremoe/plan/check_rules.h"

namespace foremoe::check {

namespace {

// Quota of an expert on a rank, summed over its slots.
std::int64_t quota_of(const StepPlan& plan, int t, int l, int r, int e) {
  std::int64_t sum = 0;
  for (int s = 0; s < plan.num_slots(); ++s) {
    if (plan.slot_expert(t, l, r, s) == ExpertId{e}) sum += plan.slot_tokens(t, l, r, s).value;
  }
  return sum;
}

}  // namespace

std::int64_t load_of(const Subject& subject, MicroStepId m, LayerId l, ExpertId e) {
  std::int64_t sum = 0;
  for (int s = 0; s < subject.load.num_ranks(); ++s) sum += subject.load.load(m, l, s, e).value;
  return sum;
}

std::vector<EventId> first_events(const Subject& subject) {
  std::vector<EventId> first(subject.load.num_micro_steps());
  for (int t = subject.plan.num_events(); t-- > 0;) first[subject.plan.event_micro_step[t].index()] = EventId{t};
  return first;
}

void quotas(const Subject& subject, Findings& findings) {
  const StepPlan& plan = subject.plan;
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      std::vector<std::int64_t> left(plan.num_experts());  // load not yet covered by a quota
      for (int e = 0; e < plan.num_experts(); ++e) {
        left[e] = load_of(subject, plan.event_micro_step[t], LayerId{l}, ExpertId{e});
      }
      for (int r = 0; r < plan.num_ranks(); ++r) {
        for (int s = 0; s < plan.num_slots(); ++s) {
          const ExpertId e = plan.slot_expert(t, l, r, s);
          const std::int64_t quota = plan.slot_tokens(t, l, r, s).value;
          const bool fits = e == kNoExpert ? quota == 0 : quota >= 0 && quota <= left[e.index()];
          if (fits) {
            if (e != kNoExpert) left[e.index()] -= quota;
            continue;
          }
          Violation violation{.kind = ViolationKind::kQuota,
                              .event = EventId{t},
                              .layer = LayerId{l},
                              .rank = RankId{r},
                              .slot = SlotId{s}};
          if (e == kNoExpert) {
            violation.message = fmt::format("the slot is empty, but has a quota of {}", quota);
          } else {
            violation.expert = e;
            violation.message =
                quota < 0 ? fmt::format("the quota is {}", quota)
                          : fmt::format("the quota is {}, but lower slots and ranks leave {} of the expert's load",
                                        quota, left[e.index()]);
          }
          findings.add(std::move(violation));
        }
      }
      for (int e = 0; e < plan.num_experts(); ++e) {
        if (left[e] == 0) continue;
        findings.add({.kind = ViolationKind::kQuota,
                      .event = EventId{t},
                      .layer = LayerId{l},
                      .expert = ExpertId{e},
                      .message = fmt::format("{} tokens of the expert's load are in no quota", left[e])});
      }
    }
  }
}

void passes(const Subject& subject, Findings& findings) {
  const StepPlan& plan = subject.plan;
  if (plan.in_flight == 1) return;
  const std::vector<EventId> first = first_events(subject);
  for (int backward = 0; backward < plan.num_events(); ++backward) {
    if (plan.event_pass[backward] != Pass::kBackward) continue;
    const int forward = first[plan.event_micro_step[backward].index()].value;
    for (int l = 0; l < plan.num_layers(); ++l) {
      for (int r = 0; r < plan.num_ranks(); ++r) {
        for (int e = 0; e < plan.num_experts(); ++e) {
          const std::int64_t before = quota_of(plan, forward, l, r, e);
          const std::int64_t after = quota_of(plan, backward, l, r, e);
          if (before == after) continue;
          findings.add({.kind = ViolationKind::kPasses,
                        .event = EventId{backward},
                        .layer = LayerId{l},
                        .rank = RankId{r},
                        .expert = ExpertId{e},
                        .message = fmt::format("quota {}, but {} in the forward at event {}", after, before, forward)});
        }
      }
    }
  }
}

void bounds(const Subject& subject, Findings& findings) {
  const StepPlan& plan = subject.plan;
  const std::vector<EventId> first = first_events(subject);  // later events have the same quotas
  for (int m = 0; m < subject.load.num_micro_steps(); ++m) {
    const EventId t = first[m];
    for (int l = 0; l < plan.num_layers(); ++l) {
      std::int64_t largest = 0;
      std::int64_t total = 0;
      for (int r = 0; r < plan.num_ranks(); ++r) {
        std::int64_t of_rank = 0;
        for (const Tokens quota : plan.slot_tokens.row(t, l, r)) of_rank += quota.value;
        largest = std::max(largest, of_rank);
        total += of_rank;
      }
      const std::int64_t mean = (total + plan.num_ranks() - 1) / plan.num_ranks();  // rounded up
      if (!plan.max_load.empty() && plan.max_load(m, l).value != largest) {
        findings.add({.kind = ViolationKind::kMaxLoad,
                      .event = t,
                      .layer = LayerId{l},
                      .message = fmt::format("max_load is recorded as {}, the largest rank load is {}",
                                             plan.max_load(m, l).value, largest)});
      }
      if (!plan.lower_bound.empty() && plan.lower_bound(m, l).value != mean) {
        findings.add({.kind = ViolationKind::kLowerBound,
                      .event = t,
                      .layer = LayerId{l},
                      .message = fmt::format("lower_bound is recorded as {}, the mean rank load rounded up is {}",
                                             plan.lower_bound(m, l).value, mean)});
      }
    }
  }
}

namespace {

void shipped_rows(const Subject& subject, EventId t, LayerId l, const RoutedLayer& routed, Findings& findings) {
  using RowsByPlace = std::map<std::pair<RankId, RankId>, std::int64_t>;  // (source, replica)
  std::vector<RowsByPlace> shipped(subject.plan.num_experts());
  for (const Shipment& s : routed.shipments) shipped[s.expert.index()][{s.source, s.replica}] += s.rows.value;
  const std::vector<std::vector<Delivery>> expected = deliveries(subject, t, l);
  for (int e = 0; e < subject.plan.num_experts(); ++e) {
    RowsByPlace right;
    for (const Delivery& d : expected[e]) right[{d.source, d.replica}] += d.rows;
    if (shipped[e] == right) continue;
    findings.add({.kind = ViolationKind::kRoutes,
                  .event = t,
                  .layer = l,
                  .expert = ExpertId{e},
                  .message = "route_tokens does not ship the expert's rows as the three sweeps do"});
  }
}

void assigned_rows(const Subject& subject, EventId t, LayerId l, const RoutedLayer& routed, Findings& findings) {
  const std::vector<std::vector<Delivery>> expected = deliveries(subject, t, l);
  RouteWorkspace workspace;
  std::vector<ExpertId> routes;  // [row]
  std::vector<RankId> replica;   // [row]
  for (int source = 0; source < subject.plan.num_ranks(); ++source) {
    std::vector<std::vector<RankId>> right(subject.plan.num_experts());  // [expert][row of this source, in row order]
    for (int e = 0; e < subject.plan.num_experts(); ++e) {
      for (const Delivery& d : expected[e]) {
        if (d.source == RankId{source}) right[e].insert(right[e].end(), d.rows, d.replica);
      }
    }
    subject.tokens->gather(subject.plan.event_micro_step[t.index()], RankId{source}, l, routes);
    replica.resize(routes.size());
    assign_rows(routed, {RankId{source}, routes}, workspace, replica);

    std::vector<std::size_t> seen(subject.plan.num_experts());  // [expert], rows so far
    for (std::size_t row = 0; row < routes.size(); ++row) {
      const ExpertId e = routes[row];
      const RankId expected_replica = e < ExpertId{0} ? kNoReplica : right[e.index()][seen[e.index()]++];
      if (replica[row] == expected_replica) continue;
      findings.add({.kind = ViolationKind::kRoutes,
                    .event = t,
                    .layer = l,
                    .rank = RankId{source},
                    .expert = e,
                    .message = fmt::format("row {} of the source is assigned to rank {}, not {}", row,
                                           replica[row].value, expected_replica.value)});
    }
  }
}

}  // namespace

// Reduces rows of the sources [first, last) to their shares of `quota`, by divide_fairly()'s definition
// (plan/route_tokens.h). due: [rank], shares due and not received so far, in 2⁻³² rows.
static void limit_to_shares(std::int64_t quota, int first, int last, std::vector<std::int64_t>& due,
                            std::vector<std::int64_t>& rows) {
  std::int64_t total = 0;
  for (int s = first; s < last; ++s) total += rows[s];
  if (total <= quota) return;
  std::vector<char> may_round_up(static_cast<std::size_t>(last));
  std::int64_t rest = quota;
  for (int s = first; s < last; ++s) {
    // All digits of quota · rows ÷ total by long division: first the whole rows, then 32 binary digits.
    __extension__ using Wide = unsigned __int128;
    const Wide product = static_cast<Wide>(quota) * static_cast<Wide>(rows[s]);
    const Wide remainder = product % static_cast<Wide>(total);
    rows[s] = static_cast<std::int64_t>(product / static_cast<Wide>(total));
    rest -= rows[s];
    may_round_up[s] = remainder > 0;
    due[s] += static_cast<std::int64_t>((remainder << 32) / static_cast<Wide>(total));
  }
  for (; rest > 0; --rest) {
    int most = -1;
    for (int s = first; s < last; ++s) {
      if (may_round_up[s] && (most < 0 || due[s] > due[most])) most = s;
    }
    ++rows[most];
    due[most] -= std::int64_t{1} << 32;
    may_round_up[most] = 0;
  }
}

std::vector<std::vector<Delivery>> deliveries(const Subject& subject, EventId t, LayerId l) {
  const StepPlan& plan = subject.plan;
  const MicroStepId m = plan.event_micro_step[t.index()];
  const auto node_of = [&](RankId r) { return r.value / plan.ranks_per_node; };

  struct Replica {
    RankId rank;
    std::int64_t left;
  };
  std::vector<std::vector<Replica>> replicas(plan.num_experts());  // [expert], ranks ascending
  for (int r = 0; r < plan.num_ranks(); ++r) {
    for (int s = 0; s < plan.num_slots(); ++s) {
      const ExpertId e = plan.slot_expert(t, l, r, s);
      if (e != kNoExpert) replicas[e.index()].push_back({RankId{r}, plan.slot_tokens(t, l, r, s).value});
    }
  }

  enum Sweep { kOwnRank, kOwnNode, kAnywhere };
  const auto in_reach = [&](Sweep sweep, RankId source, RankId replica) {
    if (sweep == kOwnRank) return source == replica;
    if (sweep == kOwnNode) return node_of(source) == node_of(replica);
    return true;
  };

  std::vector<std::vector<Delivery>> result(plan.num_experts());
  std::vector<std::int64_t> due(plan.num_ranks());
  for (int e = 0; e < plan.num_experts(); ++e) {
    std::vector<std::int64_t> rows_left(plan.num_ranks());
    for (int s = 0; s < plan.num_ranks(); ++s) rows_left[s] = subject.load.load(m, l, s, e).value;
    for (const Sweep sweep : {kOwnRank, kOwnNode, kAnywhere}) {
      std::vector<std::int64_t> may_send = rows_left;
      if (sweep == kOwnNode) {
        for (int n = 0; n * plan.ranks_per_node < plan.num_ranks(); ++n) {
          std::int64_t quota = 0;
          for (const Replica& replica : replicas[e]) quota += node_of(replica.rank) == n ? replica.left : 0;
          limit_to_shares(quota, n * plan.ranks_per_node, std::min((n + 1) * plan.ranks_per_node, plan.num_ranks()),
                          due, may_send);
        }
      }
      for (int s = 0; s < plan.num_ranks(); ++s) {
        for (Replica& replica : replicas[e]) {
          if (!in_reach(sweep, RankId{s}, replica.rank)) continue;
          const std::int64_t rows = std::min(may_send[s], replica.left);
          if (rows == 0) continue;
          result[e].push_back({RankId{s}, replica.rank, rows});
          may_send[s] -= rows;
          rows_left[s] -= rows;
          replica.left -= rows;
        }
      }
    }
  }
  return result;
}

bool trace_matches_load(const Subject& subject) {
  const LoadTable& load = subject.load;
  const auto& [trace, batching] = *subject.options.tokens;
  if (trace.num_layers != load.num_layers() || trace.num_experts != load.num_experts() ||
      batching.num_ranks != load.num_ranks() || batching.num_micro_steps != load.num_micro_steps() ||
      batching.rank.size() != static_cast<std::size_t>(trace.num_sequences())) {
    return false;
  }
  Array<Tokens, 4> counted(load.load.shape());
  std::vector<ExpertId> route(trace.top_k);
  for (int s = 0; s < trace.num_sequences(); ++s) {
    subject.throw_if_cancelled();
    for (std::int64_t token = trace.cu_seqlens[s]; token < trace.cu_seqlens[s + 1]; ++token) {
      for (int l = 0; l < trace.num_layers; ++l) {
        trace.route(token, LayerId{l}, route);
        for (const ExpertId e : route) {
          if (e >= ExpertId{0}) counted(batching.micro_step[s], l, batching.rank[s], e) += Tokens{1};
        }
      }
    }
  }
  return counted == load.load;
}

void routes(const Subject& subject, Findings& findings) {
  const StepPlan& plan = subject.plan;
  const Topology topology{.num_ranks = plan.num_ranks(), .ranks_per_node = plan.ranks_per_node};
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      subject.throw_if_cancelled();
      const LayerQuotas quotas = layer_quotas(plan, EventId{t}, LayerId{l});
      const RoutedLayer routed = route_tokens({subject.load.load[plan.event_micro_step[t]][l], quotas, topology});
      shipped_rows(subject, EventId{t}, LayerId{l}, routed, findings);
      if (subject.tokens != nullptr) assigned_rows(subject, EventId{t}, LayerId{l}, routed, findings);
    }
  }
}

}  // namespace foremoe::check

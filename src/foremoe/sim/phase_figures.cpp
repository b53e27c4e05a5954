#include "foremoe/sim/phase_figures.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace foremoe {

namespace {

std::int64_t round_trips(const ReplayProblem& phase) {
  const CostModel& cost = phase.input.cost;
  const bool updates = phase.options.phase == Phase::kPolicyUpdate;
  return cost.round_trips(Pass::kForward) + (updates ? cost.round_trips(Pass::kBackward) : 0);
}

// Rows or their gradients return over the same links, so both directions carry the same bytes. For rows that homes
// forward to guests, OnlineWork::results_return determines whether results return, as in the replay.
std::vector<Bytes> bytes_of_rows(const ReplayProblem& phase) {
  const ClusterLinks& links = phase.links;
  std::vector<Bytes> bytes(static_cast<std::size_t>(links.size()));
  const std::int64_t per_row = phase.input.cost.row().value * round_trips(phase);
  const auto carry = [&](LinkKind kind, std::size_t rank, std::int64_t rows) {
    for (const LinkSide side : {LinkSide::kIn, LinkSide::kOut}) {
      bytes[links.of_rank(kind, side, RankId{rank}).index()] += Bytes{rows * per_row};
    }
  };
  for (const LayerProfile& layer : phase.profile.layers) {
    for (std::size_t r = 0; r < layer.rows.size(); ++r) {
      const RankRows& rows = layer.rows[r];
      const std::int64_t network = rows.sent_to_nodes + rows.received_from_nodes;
      carry(LinkKind::kPeers, r, rows.sent_to_peers + rows.received_from_peers);
      carry(LinkKind::kNetwork, r, network);
      if (links.shares_uplink()) carry(LinkKind::kHost, r, network);
    }
    for (const LayerProfile::PassedOn& rows : layer.passed_on) {
      const bool near = links.topology().same_node(rows.home, rows.guest);
      const auto send = [&](LinkKind kind, RankId from, RankId to) {
        bytes[links.of_rank(kind, LinkSide::kOut, from).index()] += Bytes{rows.rows * per_row};
        bytes[links.of_rank(kind, LinkSide::kIn, to).index()] += Bytes{rows.rows * per_row};
      };
      const auto pass_on = [&](LinkKind kind) {
        send(kind, rows.home, rows.guest);
        if (phase.options.online.results_return) send(kind, rows.guest, rows.home);
      };
      pass_on(near ? LinkKind::kPeers : LinkKind::kNetwork);
      if (!near && links.shares_uplink()) pass_on(LinkKind::kHost);
    }
  }
  return bytes;
}

// Activations of one rank.
class RankActivations {
 public:
  RankActivations(const ReplayProblem& problem, RankId rank) : problem_(problem), rank_(rank) {}

  // activations: [event][rank]; sets the elements of this rank.
  void set(Array<Activations, 2>& activations) const {
    const StepPlan& plan = problem_.input.plan;
    Bytes kept;
    for (std::size_t t = 0; t < plan.event_micro_step.size(); ++t) {
      const MicroStepId m = plan.event_micro_step[t];
      const bool forward = plan.event_pass[t] == Pass::kForward;
      if (forward) kept += kept_by(m);
      activations(t, rank_) = {.kept = kept, .working = working(m)};
      if (!forward || plan.in_flight == 1) kept -= kept_by(m);
    }
  }

 private:
  bool backward() const { return problem_.options.phase == Phase::kPolicyUpdate; }

  Bytes kept_by(MicroStepId m) const {
    const CostModel& cost = problem_.input.cost;
    const std::int64_t of_tokens = problem_.profile.tokens(m, rank_).value * cost.activations_per_token().value;
    if (!backward()) return Bytes{of_tokens};
    const Bytes of_rows{problem_.profile.total_rows(m, rank_).value * cost.activations_per_row().value};
    return Bytes{of_tokens * cost.model().layers()} + scaled(of_rows, problem_.layer_scale);
  }

  Bytes working(MicroStepId m) const {
    const Pass direction = backward() ? Pass::kBackward : Pass::kForward;
    return Bytes{problem_.profile.most_rows(m, rank_).value *
                 problem_.input.cost.working_memory_per_row(direction).value};
  }

  const ReplayProblem& problem_;
  RankId rank_;
};

}  // namespace

NetworkRows network_rows(const PhaseProfile& profile, const Topology& topology) {
  NetworkRows found;
  std::vector<std::int64_t> sent, received;  // [rank]
  for (const LayerProfile& layer : profile.layers) {
    sent.clear();
    received.clear();
    for (const RankRows& rows : layer.rows) {
      sent.push_back(rows.sent_to_nodes);
      received.push_back(rows.received_from_nodes);
    }
    for (const LayerProfile::PassedOn& rows : layer.passed_on) {
      if (topology.same_node(rows.home, rows.guest)) continue;
      sent[rows.home.index()] += rows.rows;
      received[rows.guest.index()] += rows.rows;
    }
    found.pairs = std::accumulate(sent.begin(), sent.end(), found.pairs);
    found.max += static_cast<double>(std::max(std::ranges::max(sent), std::ranges::max(received)));
  }
  if (profile.layers.empty()) return found;
  const auto dispatches = static_cast<double>(profile.layers.size());
  found.mean = static_cast<double>(found.pairs) / (dispatches * topology.num_ranks);
  found.max /= dispatches;
  return found;
}

std::vector<LinkTraffic> link_traffic(const TrafficProblem& problem) {
  const ClusterLinks& links = problem.phase.links;
  const std::vector<Bytes> rows = bytes_of_rows(problem.phase);
  std::vector<LinkTraffic> traffic;
  for (int k = 0; k < kNumLinkKinds; ++k) traffic.push_back({.link = std::string(to_string(static_cast<LinkKind>(k)))});
  for (std::size_t l = 0; l < static_cast<std::size_t>(links.size()); ++l) {
    const ClusterLinks::Named named = links[LinkId{l}];
    LinkTraffic& kind = traffic[static_cast<std::size_t>(named.kind)];
    const Bytes copies = problem.replay.copy_bytes[l] + problem.arena.bytes[l];
    const Bytes gradients = problem.replay.gradient_bytes[l];
    const double scale = problem.phase.layer_scale;
    const Bytes all = scaled(rows[l] + copies + gradients, scale);
    // Bytes that leave one rank enter another, so count one side. Bytes to an arena only leave a rank.
    const bool host = named.kind == LinkKind::kHost || named.kind == LinkKind::kSwitch;
    if (named.side == LinkSide::kIn) {
      kind.rows += scaled(rows[l], scale);
      kind.copies += scaled(copies, scale);
      kind.gradients += scaled(gradients, scale);
    } else if (host) {
      kind.copies += scaled(problem.arena.bytes[l], scale);
    }
    kind.busiest = std::max(kind.busiest, all);
    if (problem.seconds > 0) {
      kind.busiest_use = std::max(kind.busiest_use, links.seconds(LinkId{l}, all) / problem.seconds);
    }
  }
  return traffic;
}

Array<Bytes, 2> bytes_between_nodes(const TrafficProblem& problem) {
  const ReplayProblem& phase = problem.phase;
  Array<Bytes, 2> bytes = problem.replay.copies_between;
  const std::int64_t per_row = phase.input.cost.row().value * round_trips(phase);
  const auto& rows = phase.profile.rows_between;
  const Topology& topology = phase.links.topology();
  for (const LayerProfile& layer : phase.profile.layers) {
    for (const LayerProfile::PassedOn& passed : layer.passed_on) {
      const NodeId from = topology.node_of(passed.home);
      const NodeId to = topology.node_of(passed.guest);
      if (from == to) continue;
      bytes(from, to) += Bytes{passed.rows * per_row};
      if (phase.options.online.results_return) bytes(to, from) += Bytes{passed.rows * per_row};
    }
  }
  for (std::size_t from = 0; from < bytes.extent(0); ++from) {
    for (std::size_t to = 0; to < bytes.extent(1); ++to) {
      const std::int64_t both_ways = rows.empty() ? 0 : rows(from, to) + rows(to, from);
      bytes(from, to) += problem.arena.between_nodes(from, to) + Bytes{both_ways * per_row};
      bytes(from, to) = scaled(bytes(from, to), phase.layer_scale);
    }
  }
  return bytes;
}

// The number of guest experts for whose weights and gradients a rank has memory.
struct GuestBuffers {
  std::int64_t weights = 0;
  std::int64_t gradients = 0;
};

// Gradients of experts away from home accumulate separately, in home slots too. Returns the maximum over ranks, summed
// over layers.
static std::int64_t most_away_from_home(const StepPlan& plan) {
  std::int64_t most = 0;
  for (int r = 0; r < plan.num_ranks(); ++r) {
    std::int64_t of_rank = 0;
    for (int l = 0; l < plan.num_layers(); ++l) {
      std::int64_t of_layer = 0;
      for (int t = 0; t < plan.num_events(); ++t) {
        of_layer = std::max(of_layer, std::ranges::count_if(plan.slot_expert.row(t, l, r), [&](ExpertId e) {
                              return e != kNoExpert && plan.home(l, e) != RankId{r};
                            }));
      }
      of_rank += of_layer;
    }
    most = std::max(most, of_rank);
  }
  return most;
}

static GuestBuffers guest_buffers(const ReplayProblem& problem) {
  const StepPlan& plan = problem.input.plan;
  const PhaseTransfers& transfers = problem.transfers;
  if (problem.options.online.shards_experts) {
    const std::int64_t whole = std::int64_t{transfers.depth} * plan.num_slots();
    return {.weights = whole, .gradients = whole};
  }
  const std::int64_t all_layers =
      transfers.has_guests ? std::int64_t{plan.guest_slots} * problem.input.cost.model().moe_layers : 0;
  if (plan.residency == Residency::kFree) {
    return {.weights = all_layers + transfers.staging_buffers,
            .gradients = std::llround(static_cast<double>(most_away_from_home(plan)) * problem.layer_scale)};
  }
  if (plan.residency != Residency::kShared) return {.weights = all_layers, .gradients = all_layers};
  if (!transfers.has_guests) return {};
  return {
      .weights = transfers.guests_stay ? all_layers * plan.in_flight : std::int64_t{plan.guest_slots} * transfers.depth,
      .gradients = plan.guest_slots};
}

Array<Activations, 2> activations(const ReplayProblem& problem) {
  const StepPlan& plan = problem.input.plan;
  Array<Activations, 2> activations({plan.event_micro_step.size(), static_cast<std::size_t>(plan.num_ranks())});
  for (int r = 0; r < plan.num_ranks(); ++r) RankActivations(problem, RankId{r}).set(activations);
  return activations;
}

RankMemory rank_memory(const ReplayProblem& problem, const Array<Activations, 2>& activations) {
  const StepPlan& plan = problem.input.plan;
  const CostModel& cost = problem.input.cost;
  RankMemory memory{.state = cost.rank_state(plan.num_experts() / plan.num_ranks(), plan.num_ranks())};
  const GuestBuffers guests = guest_buffers(problem);
  memory.guest_weights = Bytes{guests.weights * cost.expert_weights().value};
  if (problem.options.phase == Phase::kPolicyUpdate) {
    memory.guest_gradients = Bytes{guests.gradients * cost.expert_gradient().value};
  }
  for (const Activations& one : activations.flat()) memory.activations = std::max(memory.activations, one.sum());
  return memory;
}

}  // namespace foremoe

#include "foremoe/sim/phase_replay.h"

#include <algorithm>
#include <cmath>

#include "foremoe/sim/simulated_spans.h"
#include "foremoe/sim/transfer_queues.h"

namespace foremoe {

namespace {

class Replayer {
 public:
  explicit Replayer(const ReplayProblem& problem)
      : problem_(problem),
        cost_(problem.input.cost),
        num_layers_(problem.input.plan.num_layers()),
        num_ranks_(problem.input.plan.num_ranks()),
        queues_(problem.links.size()),
        spans_(problem),
        wait_(static_cast<std::size_t>(num_ranks_)) {
    const auto nodes = static_cast<std::size_t>(problem.links.topology().num_nodes());
    result_.copy_bytes.resize(static_cast<std::size_t>(problem.links.size()));
    result_.gradient_bytes.resize(static_cast<std::size_t>(problem.links.size()));
    result_.copies_between = Array<Bytes, 2>({nodes, nodes});
    if (problem.options.timeline != nullptr) queues_.keep_times();
    now_ = problem.start_seconds;
  }

  Replay replay() {
    const TurnOrder& order = problem_.transfers.order;
    for (int t = 0; t < order.size(); ++t) {
      const Turn& turn = order[TurnId{t}];
      const bool last_backward = turn.pass == Pass::kBackward && turn.micro_step == order.turns.back().micro_step;
      begin(TurnId{t}, Moment::kTurn);
      if (last_backward) reduce_gradients(1 - 1 / problem_.layer_scale);  // of the layers before the turn's last
      if (turn.pass == Pass::kForward) {
        forward(TurnId{t});
      } else {
        backward(TurnId{t});
      }
      if (last_backward) reduce_gradients(1 / problem_.layer_scale);
    }
    finish();
    return std::move(result_);
  }

 private:
  void forward(TurnId t) {
    const Turn& turn = problem_.transfers.order[t];
    const LayerProfile& layer = problem_.profile.of(turn.micro_step, turn.layer, num_layers_);
    dense(turn);
    plan_online(turn, layer);
    begin(t, Moment::kRouter);
    exchange(turn, layer, Sweep::kDispatch, result_.parts.dispatch);
    begin(t, Moment::kDispatched);
    experts(t, layer);
    begin(t, Moment::kExpertsDone);
    return_results(t, layer);
    exchange(turn, layer, Sweep::kCombine, result_.parts.combine);
  }

  // If activations are recomputed, rows are dispatched and combined first. Gradients of combined rows then travel like
  // dispatched rows, and gradients of dispatched rows travel back.
  void backward(TurnId t) {
    const Turn& turn = problem_.transfers.order[t];
    const LayerProfile& layer = problem_.profile.of(turn.micro_step, turn.layer, num_layers_);
    for (int trip = 1; trip < cost_.round_trips(Pass::kBackward); ++trip) {
      exchange(turn, layer, Sweep::kDispatch, result_.parts.dispatch);
      exchange(turn, layer, Sweep::kCombine, result_.parts.combine);
    }
    exchange(turn, layer, Sweep::kDispatch, result_.parts.combine);
    begin(t, Moment::kRouter);
    experts(t, layer);
    begin(t, Moment::kExpertsDone);
    return_results(t, layer);
    exchange(turn, layer, Sweep::kCombine, result_.parts.dispatch);
    dense(turn);
  }

  void begin(TurnId t, Moment moment) {
    for (const Transfer& transfer : problem_.transfers.beginning(t, moment)) {
      const Bytes bytes = transfer.bytes;
      problem_.links.cross(transfer.way, bytes, crossings_);
      auto& carried = transfer.gradient ? result_.gradient_bytes : result_.copy_bytes;
      for (const ClusterLinks::Crossing& crossing : crossings_) {
        queues_.add(crossing.link, transfer.deadline.value, crossing.seconds);
        carried[crossing.link.index()] += bytes;
      }
      const Topology& topology = problem_.links.topology();
      if (transfer.way.path == Path::kPeer && !topology.same_node(transfer.way.from, transfer.way.to)) {
        result_.copies_between(topology.node_of(transfer.way.from), topology.node_of(transfer.way.to)) += bytes;
      }
      if (spans_.wanted()) spans_.begun(transfer, now_);
    }
  }

  // Attention and the other layers that process every token on its own rank.
  void dense(const Turn& turn) {
    const Pass direction = turn.pass == Pass::kForward ? Pass::kForward : Pass::kBackward;
    // Parts of the model outside the MoE layers run once, with the first layer, however many that one represents.
    const double others = turn.layer == LayerId{0} ? 1 / problem_.layer_scale : 0;
    double slowest = 0;
    double sum = 0;
    seconds_.clear();
    for (int r = 0; r < num_ranks_; ++r) {
      const Tokens tokens = problem_.profile.tokens(turn.micro_step, r);
      const double squares = problem_.profile.squared_lengths(turn.micro_step, r);
      seconds_.push_back(cost_.dense(tokens, squares, direction) +
                         (others > 0 ? others * cost_.other_layers(tokens, squares, direction) : 0));
      slowest = std::max(slowest, seconds_.back());
      sum += seconds_.back();
    }
    spans_.dense(turn, seconds_, now_);
    result_.computing_seconds += sum;
    result_.ideal_seconds += slowest;
    result_.parts.dense += slowest;
    pass(slowest);
  }

  // Adds the planning time that sorting and the exchange of unplanned rows do not hide, and the latency of
  // the second exchange.
  void plan_online(const Turn& turn, const LayerProfile& layer) {
    const OnlineWork& online = problem_.options.online;
    if (online.plans_after_dispatch) return;
    const double sorting = online.plans_beside_sorting ? layer.sorting : 0;
    double seconds = std::max(0.0, online.planning_seconds - sorting - online.dispatched_unplanned * layer.exchange);
    if (online.dispatched_unplanned > 0 && online.dispatched_unplanned < 1) {
      seconds +=
          cost_.exchange({.sent_to_peers = 1, .sent_to_nodes = problem_.links.topology().num_nodes() > 1 ? 1 : 0});
    }
    if (seconds <= 0) return;
    spans_.planning(turn, seconds, now_);
    result_.parts.planning += seconds;
    pass(seconds);
  }

  enum class Sweep : std::uint8_t { kDispatch, kCombine };

  void exchange(const Turn& turn, const LayerProfile& layer, Sweep sweep, double& part) {
    spans_.exchange(turn, layer.exchange, now_);
    part += layer.exchange;
    result_.ideal_seconds += layer.ideal_exchange;
    result_.ideal_exchange_seconds += layer.ideal_exchange;
    queues_.pass(now_, layer.exchange, [&](LinkId link) {
      return layer.exchange > 0 ? std::max(0.0, 1 - row_seconds(link, layer, sweep) / layer.exchange) : 1.0;
    });
    now_ += layer.exchange;
  }

  // Seconds that rows occupy a link in one exchange.
  double row_seconds(LinkId link, const LayerProfile& layer, Sweep sweep) const {
    const ClusterLinks::Named named = problem_.links[link];
    const bool shared = named.kind == LinkKind::kHost && problem_.links.shares_uplink();
    if (named.kind != LinkKind::kPeers && named.kind != LinkKind::kNetwork && !shared) return 0;
    const RankRows& rows = layer.rows[static_cast<std::size_t>(named.index)];
    const bool as_sent = (named.side == LinkSide::kOut) == (sweep == Sweep::kDispatch);
    std::int64_t count = 0;
    if (named.kind == LinkKind::kPeers) {
      count = as_sent ? rows.sent_to_peers : rows.received_from_peers;
    } else {
      count = as_sent ? rows.sent_to_nodes : rows.received_from_nodes;
    }
    return problem_.links.seconds(link, Bytes{count * cost_.row().value});
  }

  void experts(TurnId t, const LayerProfile& layer) {
    const Pass pass_of_turn = problem_.transfers.order[t].pass;
    const LayerProfile::Experts& experts = pass_of_turn == Pass::kForward ? layer.forward : layer.backward;
    std::ranges::fill(wait_, 0.0);
    pass_rows_on(t, layer);
    double with_copies = experts.slowest;
    for (const LayerProfile::PassedOn& rows : layer.passed_on) {
      double& wait = wait_[rows.guest.index()];
      const double planning = pass_of_turn == Pass::kForward ? problem_.options.online.planning_seconds : 0;
      const double passing = planning + problem_.links.latency(to_guest(rows));
      wait = std::max(wait, passing + pending(to_guest(rows), t) - experts.before_guests(rows.guest));
      with_copies = std::max(with_copies, wait + experts.seconds[rows.guest.index()]);
    }
    double with_all = with_copies;
    for (const bool gradients : {false, true}) {  // copies first; any further wait is due to gradients
      for (const std::size_t i : problem_.transfers.due(t)) {
        const Transfer& transfer = problem_.transfers.transfers[i];
        if (transfer.gradient != gradients) continue;
        const RankId waiting = gradients ? transfer.way.from : transfer.way.to;
        double& wait = wait_[waiting.index()];
        wait = std::max(wait, still_takes(transfer, t) - experts.before_guests(waiting));
        double& end = gradients ? with_all : with_copies;
        end = std::max(end, wait + experts.seconds[waiting.index()]);
      }
      with_all = std::max(with_all, with_copies);
    }
    if (spans_.wanted()) spans_.experts(t, wait_, experts, now_);
    result_.parts.experts += experts.slowest;
    result_.parts.exposed_copies += with_copies - experts.slowest;
    result_.parts.exposed_gradients += with_all - with_copies;
    result_.computing_seconds += experts.sum;
    result_.mean_expert_seconds += experts.sum / num_ranks_;
    result_.ideal_seconds += experts.ideal;
    pass(with_all);
    if (spans_.wanted()) {
      spans_.arrived(t, queues_);
      queues_.forget(t.value);
    }
  }

  // ---- rows that homes forward to guests after dispatch, all at once with one latency, and their results ----

  static Way to_guest(const LayerProfile::PassedOn& rows) {
    return {.path = Path::kPeer, .from = rows.home, .to = rows.guest};
  }
  static Way to_home(const LayerProfile::PassedOn& rows) {
    return {.path = Path::kPeer, .from = rows.guest, .to = rows.home};
  }

  // A backward that recomputes the forward sends rows twice.
  Bytes bytes_of(const LayerProfile::PassedOn& rows, TurnId t) const {
    return Bytes{rows.rows * cost_.row().value * cost_.round_trips(problem_.transfers.order[t].pass)};
  }

  void pass_rows_on(TurnId t, const LayerProfile& layer) {
    for (const LayerProfile::PassedOn& rows : layer.passed_on) send(to_guest(rows), bytes_of(rows, t), t);
  }

  // Like every exchange, this collective begins when the slowest rank has finished computing.
  void return_results(TurnId t, const LayerProfile& layer) {
    if (!problem_.options.online.results_return) return;
    for (const LayerProfile::PassedOn& rows : layer.passed_on) send(to_home(rows), bytes_of(rows, t), t);
    double seconds = 0;
    for (const LayerProfile::PassedOn& rows : layer.passed_on) {
      seconds = std::max(seconds, problem_.links.latency(to_home(rows)) + pending(to_home(rows), t));
    }
    if (seconds <= 0) return;
    spans_.exchange(problem_.transfers.order[t], seconds, now_);
    result_.parts.exposed_copies += seconds;
    pass(seconds);
  }

  // ---- gradients that expert-parallel groups reduce at the end, after all other transfers of the phase ----

  // share: of the layers that a plan layer represents. Rank r of each group has the same experts, so all ranks send and
  // receive equally many bytes.
  void reduce_gradients(double share) {
    const CostModel::Collective reduction = cost_.reduce_gradients(problem_.home_experts());
    if (share <= 0 || reduction.bytes <= 0) return;
    const double weights = cost_.gather_weights(problem_.home_experts()).bytes;  // follow over the same links
    const auto add = [&](LinkKind kind, double seconds) {
      for (int r = 0; r < num_ranks_; ++r) {
        for (const LinkSide side : {LinkSide::kIn, LinkSide::kOut}) {
          const LinkId link = problem_.links.of_rank(kind, side, RankId{r});
          queues_.add(link, after_end(), share * seconds);
          result_.gradient_bytes[link.index()] += Bytes{std::llround(share * (reduction.bytes + weights))};
        }
      }
    };
    const bool near = cost_.options().groups_share_node;
    add(near ? LinkKind::kPeers : LinkKind::kNetwork, reduction.seconds);
    if (!near && problem_.links.shares_uplink()) {
      add(LinkKind::kHost, reduction.bytes / problem_.links.bytes_per_second(LinkKind::kHost));
    }
  }

  int after_end() const { return problem_.transfers.order.size() + 1; }

  void send(const Way& way, Bytes bytes, TurnId t) {
    problem_.links.cross_without_latency(way, bytes, crossings_);
    for (const auto& crossing : crossings_) queues_.add(crossing.link, t.value, crossing.seconds);
  }

  double pending(const Way& way, TurnId t) {
    problem_.links.cross(way, Bytes{0}, crossings_);
    double seconds = 0;
    for (const ClusterLinks::Crossing& crossing : crossings_) {
      seconds = std::max(seconds, queues_.pending(crossing.link, t.value));
    }
    return seconds;
  }

  // If planning begins after dispatch, copies begin after planning.
  double still_takes(const Transfer& transfer, TurnId t) {
    const OnlineWork& online = problem_.options.online;
    const bool planned_now = online.plans_after_dispatch && transfer.moment == Moment::kDispatched;
    const double planning = planned_now ? online.planning_seconds : 0;
    return pending(transfer.way, t) + planning;
  }

  // Advances time; transfers use the links alone, without rows.
  void pass(double seconds) {
    queues_.pass(now_, seconds, [](LinkId) { return 1.0; });
    now_ += seconds;
  }

  void finish() {
    const TurnId end{problem_.transfers.order.size()};
    double copies = 0;
    for (const std::size_t i : problem_.transfers.due(end)) {
      const Transfer& transfer = problem_.transfers.transfers[i];
      if (!transfer.gradient) copies = std::max(copies, still_takes(transfer, end));
    }
    const double all = queues_.most_pending(end.value);
    result_.parts.exposed_copies += copies;
    result_.parts.exposed_gradients += all - copies;
    pass(all);
    if (spans_.wanted()) spans_.arrived(end, queues_);
    result_.parts.data_parallel = queues_.most_pending(after_end());
  }

  const ReplayProblem& problem_;
  const CostModel& cost_;
  int num_layers_;
  int num_ranks_;
  TransferQueues queues_;
  SimulatedSpans spans_;
  Replay result_;
  double now_ = 0;
  std::vector<double> wait_;                       // [rank], in the current turn
  std::vector<double> seconds_;                    // [rank]
  std::vector<ClusterLinks::Crossing> crossings_;  // of the current transfer
};

}  // namespace

Replay replay_phase(const ReplayProblem& problem) { return Replayer(problem).replay(); }

}  // namespace foremoe

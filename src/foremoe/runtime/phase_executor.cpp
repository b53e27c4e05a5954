#include "foremoe/runtime/phase_executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/runtime/gradient_returns.h"
#include "foremoe/runtime/peer_homes.h"
#include "foremoe/runtime/phase_checks.h"
#include "foremoe/runtime/row_exchange.h"
#include "foremoe/runtime/slot_pool.h"

namespace foremoe {
namespace {

class Directory : public ExpertDirectory {
 public:
  Directory(const SlotPool& pool, PeerHomes& homes) : pool_(pool), homes_(homes) {}
  std::span<std::byte* const> buffer(int buffer) const override { return pool_.buffer(buffer); }
  std::span<const std::byte* const> source(const ScheduledCopy& copy) const override {
    return copy.staged() ? homes_.slot(copy.source, copy.source_buffer) : homes_.home(copy.layer, copy.expert);
  }
  std::uint64_t published(RankId owner) const override { return homes_.published(owner); }
  void put_in_place(TurnId before) override { homes_.put_in_place(before); }
  bool in_place(RankId owner, TurnId before) const override { return homes_.in_place(owner, before); }

 private:
  const SlotPool& pool_;
  PeerHomes& homes_;
};

class Span {
 public:
  Span(Timeline* timeline, RankId rank, Lane lane, const char* name)
      : timeline_(timeline), rank_(rank), lane_(lane), name_(name), begin_(timeline ? Timeline::now_ns() : 0) {}
  ~Span() {
    if (timeline_ != nullptr) timeline_->add(rank_, lane_, name_, begin_, Timeline::now_ns());
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  Timeline* timeline_;
  RankId rank_;
  Lane lane_;
  const char* name_;
  std::int64_t begin_;
};

}  // namespace

struct PhaseExecutor::State {
  State(PhaseParts phase_parts, const HomeExperts& lent, Communicator& phase_communicator, PhaseOptions phase_options);
  ~State();

  void reserve_rows();
  void fill_arena();
  void start_engine();

  bool backward() const { return returns.has_value(); }
  bool has_unrouted(const Turn& turn) const;
  bool wait(TurnId turn);
  ExpertsOf experts_of(TurnId turn);
  void send_home(LayerId layer, std::span<const GradientReturn> guests);
  void end_turn(TurnId turn);

  void zero_home_gradients();
  void restore_homes();
  void fill_lent_homes_with_nan();

  const PhaseParts parts;
  const HomeExperts& homes;
  Communicator& communicator;
  const PhaseOptions options;
  const RankId rank;

  // Location of experts.
  SlotPool pool;
  PeerHomes peer_homes;
  Directory directory;
  std::optional<HostArena> arena;

  // Exchange of rows and gradients.
  RowExchange rows;
  UnroutedRows unrouted;
  DispatchWorkspace workspace;
  KeptLayers kept_layers;
  std::optional<GradientReturns> returns;  // policy_update only
  std::vector<int> backwards_left;         // [layer], remaining backward turns
  std::vector<char> drained;               // [layer]

  PhaseFigures figures;
  bool finished = false;                       // if false at destruction, undo the step
  std::optional<ExpertTransferEngine> engine;  // last, so destroyed first: it writes to members above
};

PhaseExecutor::State::State(PhaseParts phase_parts, const HomeExperts& lent, Communicator& phase_communicator,
                            PhaseOptions phase_options)
    : parts(std::move(phase_parts)),
      homes(lent),
      communicator(phase_communicator),
      options(std::move(phase_options)),
      rank(communicator.rank()),
      pool(parts, homes),
      peer_homes(parts, homes, pool, communicator),
      directory(pool, peer_homes),
      arena(open_arena(parts, communicator)),
      rows(communicator,
           {.shape = parts.shape, .top_k = parts.load().top_k, .position_independent = options.position_independent}),
      unrouted(communicator, parts.plan()),
      kept_layers(parts),
      backwards_left(static_cast<std::size_t>(parts.plan().num_layers())),
      drained(backwards_left.size()) {
  for (const Turn& turn : parts.schedule().order.turns) {
    if (turn.pass == Pass::kBackward) ++backwards_left[turn.layer.index()];
  }
  if (parts.schedule().phase == Phase::kPolicyUpdate) returns.emplace(parts, pool, communicator);
  figures.turns.resize(parts.schedule().order.turns.size());
  figures.arena = arena ? arena->bytes() : Bytes{};
  figures.guest_weights = pool.guest_weights();
  figures.guest_gradients = pool.guest_gradients();
  reserve_rows();
  fill_arena();
  start_engine();
}

void PhaseExecutor::State::reserve_rows() {
  const std::int64_t most_computed = most_rows_computed(parts, rank);
  const std::int64_t most_sent = options.most_tokens * parts.load().top_k;
  rows.reserve(most_sent, most_computed);
  for (KeptLayer& layer : kept_layers.all()) {
    layer.planned.x.reserve(most_computed, parts.shape.hidden);
    layer.planned.gate_up.reserve(most_computed, 2 * parts.shape.intermediate);
    layer.planned.returned.reserve(most_sent, parts.shape.hidden);
  }
}

void PhaseExecutor::State::fill_arena() {
  const auto begin = std::chrono::steady_clock::now();
  refresh_arena(parts, peer_homes, arena ? &*arena : nullptr, options.engine.version, communicator);
  figures.arena_refresh_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  peer_homes.publish(options.engine.version);
  communicator.barrier();  // every arena is complete, so under `free` copies may overwrite homes from now on
}

void PhaseExecutor::State::start_engine() {
  EngineOptions engine_options = options.engine;
  engine_options.eager = options.overlap;
  engine_options.must_arrive = parts.plan().residency == Residency::kFree;
  PeerAccess& peers = communicator.peers();
  std::unique_ptr<CopyLink> host = std::make_unique<MemcpyLink>();
  std::unique_ptr<CopyLink> peer = peers.make_peer_link(parts.schedule(), parts.layout, directory);
  if (options.decorate) {
    host = options.decorate(std::move(host), rank, Path::kHost);
    peer = options.decorate(std::move(peer), rank, Path::kPeer);
  }
  engine.emplace(EngineParts{.schedule = parts.schedule(),
                             .layout = parts.layout,
                             .rank = rank,
                             .directory = directory,
                             .arena = arena ? &*arena : nullptr,
                             .host = std::move(host),
                             .peer = std::move(peer),
                             .ballot = peers.make_ballot(),
                             .timeline = options.timeline},
                 engine_options);
}

PhaseExecutor::State::~State() {
  engine.reset();  // stop writes to buffers before freeing them
  if (finished) return;
  peer_homes.stop_sharing();  // before modifying homes
  zero_home_gradients();
  restore_homes();
  fill_lent_homes_with_nan();
}

void PhaseExecutor::State::zero_home_gradients() {
  if (!backward()) return;
  for (const HomeExpert& expert : homes.experts.flat()) {
    for (std::size_t i = 0; i < expert.gradients.size(); ++i) {
      std::fill_n(expert.gradients[i], parts.layout.segments()[i].elements, 0.0F);
    }
  }
}

// Under `free`, home slots may contain other experts. Restores homes from the arena if finish() was not reached.
void PhaseExecutor::State::restore_homes() {
  if (!arena) return;
  for (const ScheduledCopy& copy : parts.schedule().arriving(TurnId{parts.schedule().order.size()})) {
    const int at = arena->index_of({copy.layer, copy.expert});
    if (copy.rank != rank || at < 0 || arena->version(at) != options.engine.version) continue;
    const std::span<std::byte* const> home = pool.buffer(copy.buffer);
    for (std::size_t i = 0; i < home.size(); ++i) {
      std::memcpy(home[i], arena->segment(at, i), static_cast<std::size_t>(parts.layout.segments()[i].bytes().value));
    }
  }
}

// With copies from peers, no source remains to restore homes. Overwrites every lent home with NaN, in any floating
// point type, so that training cannot continue with the weights of another expert.
void PhaseExecutor::State::fill_lent_homes_with_nan() {
  for (const ScheduledCopy& copy : parts.schedule().copies) {
    if (copy.rank != rank || !copy.staged() || copy.slot.value >= pool.homes_per_rank()) continue;
    if (!peer_homes.in_place(rank, TurnId{copy.arrives.value + 1})) continue;
    for (std::size_t i = 0; i < parts.layout.num_segments(); ++i) {
      std::memset(pool.buffer(copy.buffer)[i], 0xFF,
                  static_cast<std::size_t>(parts.layout.segments()[i].bytes().value));
    }
  }
}

bool PhaseExecutor::State::has_unrouted(const Turn& turn) const {
  if (parts.without_route.empty()) return false;
  const auto layers = static_cast<std::size_t>(parts.plan().num_layers());
  return parts.without_route[turn.micro_step.index() * layers + turn.layer.index()] != 0;
}

bool PhaseExecutor::State::wait(TurnId turn) {
  const Span span(options.timeline, rank, Lane::kWait, "wait for experts");
  return engine->wait(turn);
}

// Maps a slot of the forward to its expert's weights in this turn, and in a backward turn also to the gradients.
ExpertsOf PhaseExecutor::State::experts_of(TurnId turn) {
  return [this, turn, &at = parts.turns.order()[turn]](SlotId of_rows) {
    const SlotId slot = parts.turns.slot_of_forward(turn, of_rows);
    const auto weights = pool.weights(turn, slot);
    cpu::ExpertRows rows_of_expert{.gate_up = reinterpret_cast<const float*>(weights[0]),
                                   .down = reinterpret_cast<const float*>(weights[1])};
    if (at.pass == Pass::kBackward) {
      const auto gradients = pool.gradients(at.layer, slot);
      rows_of_expert.gate_up_gradient = gradients[0];
      rows_of_expert.down_gradient = gradients[1];
      rows_of_expert.fresh_gradient = slot.value >= pool.homes_per_rank() && returns->begins(at.layer, slot);
    }
    return rows_of_expert;
  };
}

void PhaseExecutor::State::send_home(LayerId layer, std::span<const GradientReturn> guests) {
  if (!guests.empty()) figures.gradient_returns += returns->send_home(layer, guests);
}

void PhaseExecutor::State::end_turn(TurnId turn) {
  engine->release(turn);
  const Turn& at = parts.turns.order()[turn];
  if (at.pass == Pass::kBackward) --backwards_left[at.layer.index()];
  if (backward()) send_home(at.layer, parts.turns.returning(turn, RankTurns::Whose::kAll));
}

PhaseExecutor::PhaseExecutor(const PhaseParts& parts, const HomeExperts& homes, Communicator& communicator,
                             const PhaseOptions& options) {
  check_phase(parts, homes, options.engine.version, communicator);
  state_ = std::make_unique<State>(parts, homes, communicator, options);
}

PhaseExecutor::~PhaseExecutor() = default;

const TurnOrder& PhaseExecutor::order() const { return state_->parts.schedule().order; }

void PhaseExecutor::begin(TurnId turn) { state_->engine->submit(turn); }

void PhaseExecutor::forward(TurnId turn, const LayerForward& layer) {
  State& s = *state_;
  const Turn& at = order()[turn];
  assert(at.pass == Pass::kForward);
  KeptLayer& kept = s.kept_layers[at];
  kept.at_homes = !s.wait(turn);
  s.figures.fallbacks += kept.at_homes ? 1 : 0;
  kept.any_unrouted = s.has_unrouted(at);
  if (!kept.any_unrouted && std::ranges::find(layer.routes, kNoExpert) != layer.routes.end()) {
    throw InputError(
        {.field = "routes"},
        fmt::format("micro-step {}, layer {} has rows without a route, but `without_route` says that it has none",
                    at.micro_step.value, at.layer.value));
  }

  const Span span(s.options.timeline, s.rank, Lane::kExperts, "experts, forward");
  const int top_k = s.parts.load().top_k;
  const ExpertsOf experts = s.experts_of(turn);
  TurnFigures& figures = s.figures.turns[turn.index()] = {};
  LayerDispatch& planned = kept.planned.dispatch;
  if (kept.at_homes) {
    s.parts.turns.rows_at_homes(turn, s.workspace.rows, planned.rows);
  } else {
    s.parts.turns.rows(turn, s.workspace.rows, planned.rows);
  }
  find_sent_rows(layer.routes, top_k, s.workspace, planned);
  s.rows.forward(experts, layer, kept.planned, figures);
  if (kept.any_unrouted) {
    s.unrouted.dispatch(at, {.routes = layer.routes, .picked = layer.picked, .top_k = top_k}, kept.unrouted.dispatch);
    s.rows.forward(experts, layer, kept.unrouted, figures);
  }
  s.end_turn(turn);
}

void PhaseExecutor::backward(TurnId turn, const LayerBackward& layer) {
  State& s = *state_;
  const Turn& at = order()[turn];
  assert(at.pass == Pass::kBackward && s.backward());
  KeptLayer& kept = s.kept_layers[at];
  if (!s.wait(turn) && !kept.at_homes) {
    throw PhaseFailed(
        fmt::format("micro-step {}, layer {}: experts that the backward pass reads could not be fetched "
                    "from their homes nor from an arena",
                    at.micro_step.value, at.layer.value));
  }

  const Span span(s.options.timeline, s.rank, Lane::kExperts, "experts, backward");
  const ExpertsOf experts = s.experts_of(turn);
  TurnFigures& figures = s.figures.turns[turn.index()] = {};
  s.rows.backward(experts, layer, kept.planned, figures);
  if (kept.any_unrouted) s.rows.backward(experts, layer, kept.unrouted, figures);
  s.end_turn(turn);
}

void PhaseExecutor::drain(std::span<const LayerId> layers) {
  State& s = *state_;
  for (const LayerId layer : layers) {
    assert(s.backwards_left[layer.index()] == 0);
    if (!s.backward() || std::exchange(s.drained[layer.index()], 1) != 0) continue;
    s.send_home(layer, s.parts.turns.draining(layer, RankTurns::Whose::kAll));
  }
}

void PhaseExecutor::finish() {
  for (int l = 0; l < state_->parts.plan().num_layers(); ++l) {  // drain the remaining layers
    const LayerId layer{l};
    drain({&layer, 1});
  }
  state_->engine->finish();
  state_->communicator.barrier();  // no rank reads homes from here on; the caller may change them
  state_->finished = true;
}

PhaseFigures PhaseExecutor::figures() const {
  PhaseFigures figures = state_->figures;
  figures.transfer = state_->engine->figures();
  return figures;
}

}  // namespace foremoe

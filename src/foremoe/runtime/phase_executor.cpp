#include "foremoe/runtime/phase_executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <chrono>
#include <optional>

#include "foremoe/core/error.h"
#include "foremoe/runtime/arena_refresh.h"
#include "foremoe/runtime/gradient_returns.h"
#include "foremoe/runtime/phase_checks.h"
#include "foremoe/runtime/row_exchange.h"
#include "foremoe/runtime/slot_pool.h"
#include "foremoe/runtime/unrouted_rows.h"

namespace foremoe {
namespace {

class Directory : public ExpertDirectory {
 public:
  Directory(const SlotPool& pool, const PeerHomes& homes) : pool_(pool), homes_(homes) {}
  std::span<std::byte* const> buffer(int buffer) const override { return pool_.buffer(buffer); }
  std::span<const std::byte* const> home(LayerId layer, ExpertId expert) const override {
    return homes_.home(layer, expert);
  }
  std::uint64_t published(RankId owner) const override { return homes_.published(owner); }

 private:
  const SlotPool& pool_;
  const PeerHomes& homes_;
};

class PinnedMemory {
 public:
  PinnedMemory(Device& device, std::span<const std::byte> memory) : device_(device), memory_(memory) {
    device_.pin(memory_);
  }
  ~PinnedMemory() { device_.unpin(memory_); }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

 private:
  Device& device_;
  std::span<const std::byte> memory_;
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
  State(PhaseParts parts, const HomeExperts& homes, Communicator& communicator, Device& device, PhaseOptions options);
  ~State();

  // What one layer of a micro-step keeps from forward to backward.
  struct Kept {
    ForwardRows planned;
    ForwardRows unrouted;
    const float* weight = nullptr;
    bool at_homes = false;  // fallen back
    bool any_unrouted = false;
  };
  Kept& kept(const Turn& turn);
  bool has_unrouted(const Turn& turn) const;
  ExpertRows expert_rows(TurnId turn, const Kept& kept, ExpertId expert, bool planned) const;
  void dispatch_forward(const Turn& turn, const LayerForward& layer, Kept& kept);
  void end_turn(TurnId turn);
  void zero_home_gradients();
  void restore_homes();
  TurnFigures& figures_of(TurnId turn) { return turns[turn.index()]; }

  const PhaseParts parts;
  const HomeExperts& homes;
  Communicator& communicator;
  Device& device;
  const PhaseOptions options;
  const RankId rank;

  SlotPool pool;
  PeerHomes peer_homes;
  Directory directory;
  std::optional<HostArena> arena;
  std::optional<PinnedMemory> pinned;  // the arena's
  RowExchange rows;
  UnroutedRows unrouted;
  GuestGradients guest_gradients;
  std::optional<GradientReturns> returns;  // policy update alone
  std::optional<ExpertTransferEngine> engine;

  std::vector<Kept> kept_of;  // [micro-step in flight · layers + layer]; one for all where there is no backward
  int ring = 1;               // micro-steps in flight
  DispatchWorkspace workspace;
  Array<ExpertId, 2> home_experts;  // [rank][home slot] of the layer at hand, for fallbacks
  Array<Tokens, 2> home_tokens;
  std::vector<TurnFigures> turns;
  double arena_refresh_seconds = 0;
  Bytes returned;
  std::int64_t fallbacks = 0;
  bool finished = false;  // else nothing of the step may be left
};

PhaseExecutor::State::State(PhaseParts phase_parts, const HomeExperts& home_experts_lent,
                            Communicator& phase_communicator, Device& phase_device, PhaseOptions phase_options)
    : parts(std::move(phase_parts)),
      homes(home_experts_lent),
      communicator(phase_communicator),
      device(phase_device),
      options(std::move(phase_options)),
      rank(communicator.rank()),
      pool((expect_float32(parts.layout, parts.shape), expect_fitting(parts, communicator), parts), homes, device),
      peer_homes((expect_same_phase(parts, options.engine.version, communicator), parts), homes, communicator),
      directory(pool, peer_homes),
      arena(open_arena(parts, communicator)),
      rows(communicator, device, parts.shape, parts.load.top_k),
      unrouted(communicator, parts.plan),
      guest_gradients(parts.plan),
      turns(parts.schedule.order.turns.size()) {
  const bool backward = parts.schedule.phase == Phase::kPolicyUpdate;
  if (backward) {
    returns.emplace(parts, pool, communicator, device);
    ring = std::min(parts.plan.in_flight, parts.plan.num_micro_steps());
    kept_of.resize(static_cast<std::size_t>(ring) * static_cast<std::size_t>(parts.plan.num_layers()));
  } else {
    kept_of.resize(1);
  }
  const std::int64_t most_computed = most_rows_computed(parts, rank);
  const std::int64_t most_sent = options.most_tokens * parts.load.top_k;
  rows.reserve(most_sent, most_computed);
  for (Kept& layer : kept_of) {
    layer.planned.x.reserve(device, most_computed, parts.shape.hidden);
    layer.planned.gate_up.reserve(device, most_computed, 2 * parts.shape.intermediate);
    layer.planned.returned.reserve(device, most_sent, parts.shape.hidden);
  }

  if (arena) pinned.emplace(device, arena->memory());
  const auto begin = std::chrono::steady_clock::now();
  refresh_arena(parts, peer_homes, arena ? &*arena : nullptr, options.engine.version, communicator, device);
  arena_refresh_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  peer_homes.publish(options.engine.version);
  communicator.barrier();  // under `free` copies may overwrite homes from now on: every arena has been written

  const auto decorated = [&](std::unique_ptr<CopyLink> link, Path path) {
    return options.decorate ? options.decorate(std::move(link), rank, path) : std::move(link);
  };
  EngineOptions engine_options = options.engine;
  engine_options.eager = options.overlap;
  engine_options.must_arrive = parts.plan.residency == Residency::kFree;
  engine_options.verify &= device.is_host_memory();
  engine.emplace(
      EngineParts{.schedule = parts.schedule,
                  .layout = parts.layout,
                  .rank = rank,
                  .directory = directory,
                  .arena = arena ? &*arena : nullptr,
                  .host = decorated(device.make_copy_link(), Path::kHost),
                  .peer = decorated(communicator.make_peer_link(parts.schedule, parts.layout, directory), Path::kPeer),
                  .ballot = communicator.make_ballot(),
                  .timeline = options.timeline},
      engine_options);
}

PhaseExecutor::State::~State() {
  engine.reset();  // nothing writes to buffers any more, before they go
  if (finished) return;
  try {
    zero_home_gradients();
    restore_homes();
  } catch (...) {  // the device itself has failed: what ended the phase is told already
  }
}

// Under `free` homes are lent to other experts: without finish() they come back here.
void PhaseExecutor::State::restore_homes() {
  if (!arena) return;
  for (const ScheduledCopy& copy : parts.schedule.arriving(TurnId{parts.schedule.order.size()})) {
    const int at = arena->index_of({copy.layer, copy.expert});
    if (copy.rank != rank || at < 0 || arena->version(at) != options.engine.version) continue;
    const std::span<std::byte* const> home = pool.buffer(copy.buffer);
    for (std::size_t i = 0; i < home.size(); ++i) {
      device.upload(home[i],
                    {arena->segment(at, i), static_cast<std::size_t>(parts.layout.segments()[i].bytes().value)});
    }
  }
}

PhaseExecutor::State::Kept& PhaseExecutor::State::kept(const Turn& turn) {
  if (parts.schedule.phase == Phase::kRecompute) return kept_of.front();
  const auto layers = static_cast<std::size_t>(parts.plan.num_layers());
  return kept_of[static_cast<std::size_t>(turn.micro_step.value % ring) * layers + turn.layer.index()];
}

bool PhaseExecutor::State::has_unrouted(const Turn& turn) const {
  if (parts.without_route.empty()) return false;
  const auto layers = static_cast<std::size_t>(parts.plan.num_layers());
  return parts.without_route[turn.micro_step.index() * layers + turn.layer.index()] != 0;
}

void PhaseExecutor::State::dispatch_forward(const Turn& turn, const LayerForward& layer, Kept& kept) {
  const ArrayView<const Tokens, 2> load = parts.load.load[turn.micro_step][turn.layer];
  LayerQuotas quotas = layer_quotas(parts.plan, turn.event, turn.layer);
  if (kept.at_homes) {
    const auto ranks = static_cast<std::size_t>(parts.plan.num_ranks());
    home_experts = Array<ExpertId, 2>({ranks, static_cast<std::size_t>(pool.homes_per_rank())}, kNoExpert);
    home_tokens = Array<Tokens, 2>(home_experts.shape());
    std::vector<std::int64_t> total(static_cast<std::size_t>(parts.plan.num_experts()));
    parts.load.expert_loads(turn.micro_step, turn.layer, total);
    std::vector<std::size_t> next(ranks);
    for (int e = 0; e < parts.plan.num_experts(); ++e) {
      const RankId owner = parts.plan.home(turn.layer, e);
      const std::size_t slot = next[owner.index()]++;
      home_experts(owner, slot) = ExpertId{e};
      home_tokens(owner, slot) = Tokens{total[static_cast<std::size_t>(e)]};
    }
    quotas = {home_experts, home_tokens};
  }
  dispatch_planned_rows({.routing = {.load = load, .quotas = quotas, .topology = communicator.topology()},
                         .rank = rank,
                         .routes = layer.routes,
                         .top_k = parts.load.top_k},
                        workspace, kept.planned.dispatch);
}

// Weights and gradients of an expert in this turn: of the slot that holds it, or of its home.
ExpertRows PhaseExecutor::State::expert_rows(TurnId turn, const Kept& layer_kept, ExpertId expert, bool planned) const {
  const Turn& at = parts.schedule.order[turn];
  const bool in_slots = parts.plan.residency == Residency::kFree || (planned && !layer_kept.at_homes);
  SlotId slot;
  if (in_slots) {
    const auto slots = parts.plan.slot_expert.row(at.event, at.layer, rank);
    slot = SlotId{std::ranges::find(slots, expert) - slots.begin()};
    assert(slot.value < parts.plan.num_slots());
  } else {
    slot = pool.home_slot(at.layer, expert);
  }
  const auto weights = in_slots ? pool.weights(turn, slot) : pool.home_weights(at.layer, slot);
  ExpertRows rows_of_expert{.gate_up = reinterpret_cast<const float*>(weights[0]),
                            .down = reinterpret_cast<const float*>(weights[1])};
  if (at.pass == Pass::kBackward) {
    const auto gradients = pool.gradients(at.layer, slot);
    rows_of_expert.gate_up_gradient = gradients[0];
    rows_of_expert.down_gradient = gradients[1];
    rows_of_expert.fresh_gradient = slot.value >= pool.homes_per_rank() && !guest_gradients.dirty(at.layer, rank, slot);
  }
  return rows_of_expert;
}

void PhaseExecutor::State::end_turn(TurnId turn) {
  engine->release(turn, device.stream().record());
  if (!returns) return;
  const Turn& at = parts.schedule.order[turn];
  if (parts.schedule.order.last(at.event, at.layer) != turn) return;
  const std::vector<GuestGradients::Guest> guests = guest_gradients.take_leaving(at.event, at.layer);
  if (!guests.empty()) returned += returns->send_home(at.layer, guests);
}

void PhaseExecutor::State::zero_home_gradients() {
  if (!returns) return;
  for (const HomeExpert& expert : homes.experts.flat()) {
    for (std::size_t i = 0; i < expert.gradients.size(); ++i) {
      device.zero(reinterpret_cast<std::byte*>(expert.gradients[i]),
                  static_cast<std::size_t>(parts.layout.segments()[i].elements) * sizeof(float));
    }
  }
}

PhaseExecutor::PhaseExecutor(const PhaseParts& parts, const HomeExperts& homes, Communicator& communicator,
                             Device& device, const PhaseOptions& options)
    : state_(std::make_unique<State>(parts, homes, communicator, device, options)) {}

PhaseExecutor::~PhaseExecutor() = default;

const TurnOrder& PhaseExecutor::order() const { return state_->parts.schedule.order; }

void PhaseExecutor::begin(TurnId turn) { state_->engine->submit(turn); }

void PhaseExecutor::forward(TurnId turn, const LayerForward& layer) {
  State& s = *state_;
  const Turn& at = order()[turn];
  assert(at.pass == Pass::kForward);
  State::Kept& kept = s.kept(at);
  {
    const Span span(s.options.timeline, s.rank, Lane::kWait, "wait for experts");
    kept.at_homes = !s.engine->wait(turn);
  }
  s.fallbacks += kept.at_homes ? 1 : 0;
  kept.weight = layer.weight;
  kept.any_unrouted = s.has_unrouted(at);
  if (!kept.any_unrouted && std::ranges::find(layer.routes, kNoExpert) != layer.routes.end()) {
    throw InputError({.file = {}, .field = "routes", .index = {}},
                     fmt::format("micro-step {}, layer {} has rows without a route, which `without_route` denies",
                                 at.micro_step.value, at.layer.value));
  }

  const Span span(s.options.timeline, s.rank, Lane::kExperts, "experts, forward");
  const double before = s.rows.compute_cpu_seconds();
  s.dispatch_forward(at, layer, kept);
  s.rows.forward([&](const ComputedExpert& e) { return s.expert_rows(turn, kept, e.expert, true); }, layer.x,
                 layer.weight, layer.y, kept.planned);
  s.figures_of(turn).rows = kept.planned.dispatch.rows_computed();
  if (kept.any_unrouted) {
    s.unrouted.dispatch(at, layer.routes, layer.picked, s.parts.load.top_k, kept.unrouted.dispatch);
    s.rows.forward([&](const ComputedExpert& e) { return s.expert_rows(turn, kept, e.expert, false); }, layer.x,
                   layer.weight, layer.y, kept.unrouted);
    s.figures_of(turn).rows += kept.unrouted.dispatch.rows_computed();
  }
  s.figures_of(turn).compute_cpu_seconds = s.rows.compute_cpu_seconds() - before;
  s.end_turn(turn);
}

void PhaseExecutor::backward(TurnId turn, const LayerBackward& layer) {
  State& s = *state_;
  const Turn& at = order()[turn];
  assert(at.pass == Pass::kBackward && s.returns);
  State::Kept& kept = s.kept(at);
  {
    const Span span(s.options.timeline, s.rank, Lane::kWait, "wait for experts");
    if (!s.engine->wait(turn) && !kept.at_homes) {
      throw PhaseFailed(
          fmt::format("micro-step {}, layer {}: experts that the backward pass reads could not be fetched "
                      "from their homes nor from an arena",
                      at.micro_step.value, at.layer.value));
    }
  }
  const Span span(s.options.timeline, s.rank, Lane::kExperts, "experts, backward");
  const double before = s.rows.compute_cpu_seconds();
  s.rows.backward([&](const ComputedExpert& e) { return s.expert_rows(turn, kept, e.expert, true); }, layer.dy,
                  kept.weight, layer.dx, layer.d_weight, kept.planned);
  s.figures_of(turn).rows = kept.planned.dispatch.rows_computed();
  if (!kept.at_homes) s.guest_gradients.ran_backward(at.event, at.layer);
  if (kept.any_unrouted) {
    s.rows.backward([&](const ComputedExpert& e) { return s.expert_rows(turn, kept, e.expert, false); }, layer.dy,
                    kept.weight, layer.dx, layer.d_weight, kept.unrouted);
    s.figures_of(turn).rows += kept.unrouted.dispatch.rows_computed();
  }
  s.figures_of(turn).compute_cpu_seconds = s.rows.compute_cpu_seconds() - before;
  s.end_turn(turn);
}

void PhaseExecutor::drain(std::span<const LayerId> layers) {
  State& s = *state_;
  if (!s.returns) return;
  for (const LayerId layer : layers) {
    const std::vector<GuestGradients::Guest> guests = s.guest_gradients.take_all(layer);
    if (!guests.empty()) s.returned += s.returns->send_home(layer, guests);
  }
}

void PhaseExecutor::finish() {
  for (int l = 0; l < state_->parts.plan.num_layers(); ++l) {  // what the caller has not drained
    const LayerId layer{l};
    drain({&layer, 1});
  }
  state_->engine->finish();
  state_->device.stream().synchronize();
  state_->communicator.barrier();  // nobody reads homes any more: the caller may change them
  state_->finished = true;
}

PhaseFigures PhaseExecutor::figures() const {
  const State& s = *state_;
  return {.turns = s.turns,
          .transfer = s.engine->figures(),
          .arena = s.arena ? s.arena->bytes() : Bytes{},
          .arena_refresh_seconds = s.arena_refresh_seconds,
          .guest_weights = s.pool.guest_weights(),
          .guest_gradients = s.pool.guest_gradients(),
          .gradient_returns = s.returned,
          .fallbacks = s.fallbacks};
}

}  // namespace foremoe

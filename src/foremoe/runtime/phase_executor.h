#pragma once

// Executes a plan for one phase on one rank, from bind to unbind. Owns the guest memory and the transfer engine. The
// caller runs its own work (attention, router) and calls forward and backward for every turn in order. Between these
// calls, the executor transfers experts. RankTurns determines the actions of each turn. No address, thread or
// registration outlives the object.
//
//   PhaseExecutor phase(parts, homes, communicator, options);
//   for each turn t:  phase.begin(t);  … attention …;  phase.forward(t, …) or phase.backward(t, …);
//   phase.drain(layers);  … the framework's own gradient reduction …
//   phase.finish();
//
// If a copy of a turn fails on any rank, the turn falls back: both passes of that micro-step and layer run at homes.
// Guests' gradients accumulate in their slots. A gradient is sent home when the guest leaves or at drain(), as zeros if
// all turns of the guest fell back. The home adds each gradient exactly once, in (layer, expert, rank) order. The
// caller's gradients are zero at bind. Destruction before finish() zeroes the caller's gradients and leaves homes
// unchanged, so no step is half applied. Exception: under residency `free` with copies from peers, a lent home has no
// other copy. Destruction fills such homes with NaN, and the caller must reload the weights.

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "foremoe/core/timeline.h"
#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/cpu/experts.h"
#include "foremoe/transfer/rank_turns.h"
#include "foremoe/transfer/transfer_engine.h"

namespace foremoe {

// Home experts of one rank, which the caller lends for the phase: [layer][home slot], homes ascending.
struct HomeExpert {
  std::vector<std::byte*> weights;  // [segment]
  std::vector<float*> gradients;    // [segment]; empty in a phase without backward
};
struct HomeExperts {
  Array<HomeExpert, 2> experts;
  std::vector<SharedRegion> regions;  // memory of the weights, shared with peers
};

// Wraps a link for tests and measurements: throttles it, delays it or makes it fail.
using LinkDecorator = std::function<std::unique_ptr<CopyLink>(std::unique_ptr<CopyLink> link, RankId rank, Path path)>;

struct PhaseOptions {
  EngineOptions engine = {};
  LinkDecorator decorate = {};  // empty: no wrapper
  Timeline* timeline = nullptr;
  bool overlap = true;                // false: a copy starts when its layer waits for it
  std::int64_t most_tokens = 0;       // most tokens of one source in one micro-step
  bool position_independent = false;  // forward bits of a row do not depend on its position (row_tiles.h)
};

// Identical on every rank except for the rank of `turns`.
struct PhaseParts {
  const RankTurns& turns;  // placement is final; a micro-step's quotas are final by its forward
  ExpertLayout layout;
  ExpertShape shape;
  // [micro_step·layers + layer]: nonzero if any source has rows without a route; empty if no source has any.
  std::vector<std::uint8_t> without_route = {};

  const StepPlan& plan() const { return turns.plan(); }
  const LoadTable& load() const { return turns.load(); }
  const TransferSchedule& schedule() const { return turns.schedule(); }
};

struct LayerForward {
  std::span<const ExpertId> routes;  // [token·k + j]; kNoExpert: no route, see `picked`; kUnassigned: adds nothing
  std::span<const ExpertId> picked;  // routes completed by the router; empty if every row has a route
  const float* x = nullptr;          // [tokens][hidden]
  const float* weight = nullptr;     // [token·k + j]; must not change until the backward
  float* y = nullptr;                // [tokens][hidden]; the layer's result is added to it
};

struct LayerBackward {
  const float* dy = nullptr;  // [tokens][hidden]
  float* dx = nullptr;        // [tokens][hidden]; adds the gradient, except the part through the router
  float* d_weight = nullptr;  // [token·k + j]; overwritten
};

struct TurnFigures {
  double compute_cpu_seconds = 0;  // of the rank's thread, in expert computation only
  std::int64_t calls = 0;          // experts that had rows
  std::int64_t rows = 0;           // rows that this rank's experts computed
};

struct PhaseFigures {
  std::vector<TurnFigures> turns;  // [turn]
  TransferFigures transfer;
  Bytes arena;  // of this rank's node
  double arena_refresh_seconds = 0;
  Bytes guest_weights;
  Bytes guest_gradients;
  Bytes gradient_returns;      // sent home by this rank
  std::int64_t fallbacks = 0;  // (micro-step, layer) pairs that ran at homes; equal on all ranks
};

class PhaseExecutor {
 public:
  // Collective. Throws InputError for inconsistent arguments before anything starts. Refreshes the arena and publishes
  // the homes' weights as `options.engine.version`.
  PhaseExecutor(const PhaseParts& parts, const HomeExperts& homes, Communicator& communicator,
                const PhaseOptions& options);
  ~PhaseExecutor();

  const TurnOrder& order() const;
  void begin(TurnId turn);
  void forward(TurnId turn, const LayerForward& layer);
  void backward(TurnId turn, const LayerBackward& layer);
  // Collective, once per layer, after the layer's last backward. Sends the gradients of the layer's guests home.
  void drain(std::span<const LayerId> layers);
  void finish();  // collective, after the last turn; drains the remaining layers
  PhaseFigures figures() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace foremoe

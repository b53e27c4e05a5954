#pragma once

// A phase bound on one rank: its plan, its guest memory, its engine and its communicator, between bind and unbind.
// The caller runs its own work (attention, router) and calls forward and backward for every turn in order; in
// between, experts travel. What it does in a turn, RankTurns says. No address, thread or registration outlives the
// object.
//
//   PhaseExecutor phase(parts, homes, communicator, options);
//   for each turn t:  phase.begin(t);  … attention …;  phase.forward(t, …) or phase.backward(t, …);
//   phase.drain(layers);  … the framework's own gradient reduction …
//   phase.finish();
//
// A turn whose copies failed on any rank falls back: both passes of that micro-step and layer run at homes. Guests'
// gradients accumulate in their slots, go home when the guest leaves or at drain(), zeros where all its turns fell
// back, and are added there in (layer, expert, rank) order, exactly once. The caller's gradients are zero at bind; a
// phase that goes before finish() was done leaves them zero, and homes as they were: nothing is half applied. Under
// residency `free` with copies from peers, which keeps no other copy of a home that it lends, such homes are NaN then,
// and the weights must be loaded again.

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

// One rank's home experts, lent by the caller for the time of the phase. [layer][home slot], homes ascending.
struct HomeExpert {
  std::vector<std::byte*> weights;  // [segment]
  std::vector<float*> gradients;    // [segment]; empty in a phase without backward
};
struct HomeExperts {
  Array<HomeExpert, 2> experts;
  std::vector<SharedRegion> regions;  // that the weights lie in, for peers
};

// A link around another, for tests and measurements: throttles, delays, fails.
using LinkDecorator = std::function<std::unique_ptr<CopyLink>(std::unique_ptr<CopyLink> link, RankId rank, Path path)>;

struct PhaseOptions {
  EngineOptions engine;
  LinkDecorator decorate;  // none: links as they are
  Timeline* timeline = nullptr;
  bool overlap = true;                // false: copies start when the layer waits for them
  std::int64_t most_tokens = 0;       // that any source has in one micro-step
  bool position_independent = false;  // a row's forward bits do not depend on where the row stands (row_tiles.h)
};

// The same on every rank, but for whose turns they are.
struct PhaseParts {
  const RankTurns& turns;  // the plan's placement is final; quotas of a micro-step when its forward begins
  ExpertLayout layout;
  ExpertShape shape;
  // [micro_step·layers + layer]: not 0 where any source has rows without a route; empty: nowhere.
  std::vector<std::uint8_t> without_route = {};

  const StepPlan& plan() const { return turns.plan(); }
  const LoadTable& load() const { return turns.load(); }
  const TransferSchedule& schedule() const { return turns.schedule(); }
};

struct LayerForward {
  std::span<const ExpertId> routes;  // [token·k + j]: kNoExpert: no route, see `picked`; kUnassigned adds nothing
  std::span<const ExpertId> picked;  // as routes, and the router's choice where there was none; empty: no such rows
  const float* x = nullptr;          // [tokens][hidden]
  const float* weight = nullptr;     // [token·k + j]; stays as it is until the backward
  float* y = nullptr;                // [tokens][hidden]: the layer's result is added
};

struct LayerBackward {
  const float* dy = nullptr;  // [tokens][hidden]
  float* dx = nullptr;        // [tokens][hidden]: added; not through the router
  float* d_weight = nullptr;  // [token·k + j]: set
};

struct TurnFigures {
  double compute_cpu_seconds = 0;  // of the rank's thread, expert computation alone
  std::int64_t calls = 0;          // experts that had rows
  std::int64_t rows = 0;           // that its experts ran
};

struct PhaseFigures {
  std::vector<TurnFigures> turns;  // [turn]
  TransferFigures transfer;
  Bytes arena;  // of this rank's node
  double arena_refresh_seconds = 0;
  Bytes guest_weights;
  Bytes guest_gradients;
  Bytes gradient_returns;      // sent home by this rank
  std::int64_t fallbacks = 0;  // (micro-step, layer) pairs run at homes; the same on all ranks
};

class PhaseExecutor {
 public:
  // Collective. Refuses, before anything starts, what does not fit: InputError. Refreshes the arena and publishes the
  // homes' weights as `options.engine.version`.
  PhaseExecutor(const PhaseParts& parts, const HomeExperts& homes, Communicator& communicator,
                const PhaseOptions& options);
  ~PhaseExecutor();

  const TurnOrder& order() const;
  void begin(TurnId turn);
  void forward(TurnId turn, const LayerForward& layer);
  void backward(TurnId turn, const LayerBackward& layer);
  // Collective, after the last backward of these layers, once: their guests' gradients go home.
  void drain(std::span<const LayerId> layers);
  void finish();  // collective, after the last turn; drains what was not
  PhaseFigures figures() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace foremoe

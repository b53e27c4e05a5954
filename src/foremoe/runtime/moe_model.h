#pragma once

// The caller's side of a run, on one rank: a stack of MoE layers with residual connections, x ← x + MoE(x), a
// replicated router per layer, and the regression loss Σ ½(x_L − target)²/(tokens of the step).

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/drawn_model.h"
#include "foremoe/runtime/expert_store.h"
#include "foremoe/runtime/phase_executor.h"
#include "foremoe/runtime/replay_routes.h"

namespace foremoe {

struct Optimizer {
  enum class Kind : std::uint8_t { kSgd, kAdam } kind = Kind::kSgd;
  float rate = 1e-2F;
};

class MoeModel {
 public:
  // Homes as `home` [layer][expert] says, in `memory`. Throws InputError when the homes are not E/R on each rank, and
  // when there is too little memory, naming how much.
  MoeModel(const ModelSize& size, ArrayView<const RankId, 2> home, Communicator& communicator,
           HomeMemory memory = HomeMemory::kShared);
  ~MoeModel();

  const HomeExperts& homes() const;
  void zero_gradients();
  // Collective: reduces router gradients, then steps experts and routers. On return the weights are final.
  void optimize(const Optimizer& optimizer);
  // Collective, while no phase is bound. Experts whose home changed travel with weights and optimizer state; the bytes
  // sent by all ranks. Gradients of the layers that change are zeroed.
  Bytes move_homes(ArrayView<const RankId, 2> home);

  struct StepTokens {
    const ReplayRoutes& routes;
    int micro_steps = 0;
    bool keep_results = false;  // outputs, input gradients and routes used, of all micro-steps
  };
  // Runs all turns of the bound phase with `work` before each layer, and ends the phase; the loss of the step, of all
  // ranks (0 when forward only). Throws InputError when the phase is of another number of layers or micro-steps.
  using Work = std::function<void(const Turn&)>;
  double run(PhaseExecutor& phase, const StepTokens& tokens, const Work& work);

  // Gradients add up until zero_gradients(); the first two and routes_used() are of the last run, if it
  // was to keep them.
  std::vector<float> output(MicroStepId m) const;                   // [tokens][hidden], after the last layer
  std::vector<float> input_gradient(MicroStepId m) const;           // [tokens][hidden]
  std::vector<float> expert_gradient(LayerId l, ExpertId e) const;  // gate_up, then down; of a home here
  std::vector<float> expert_weights(LayerId l, ExpertId e) const;   // likewise
  std::vector<float> router_gradient(LayerId l) const;              // [experts][hidden], of this rank's tokens
  std::vector<float> router_weights(LayerId l) const;
  std::vector<ExpertId> routes_used(MicroStepId m, LayerId l) const;  // [token·k + j], router's picks included
  const Array<RankId, 2>& home() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace foremoe

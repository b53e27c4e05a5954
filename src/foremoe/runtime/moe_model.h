#pragma once

// The caller's model in a run, on one rank: a stack of MoE layers with residual connections, x ← x + MoE(x), a
// replicated router per layer, and the regression loss Σ ½(x_L − target)²/(number of tokens in the step).

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
  // Places experts at `home`, [layer][expert], in memory of kind `memory`. Throws InputError if a rank is not home to
  // E/R experts per layer, or with the required size if memory is insufficient.
  MoeModel(const ModelSize& size, ArrayView<const RankId, 2> home, Communicator& communicator,
           HomeMemory memory = HomeMemory::kShared);
  ~MoeModel();

  const HomeExperts& homes() const;
  void zero_gradients();
  // Collective. Reduces router gradients, then updates experts and routers. Weights are final on return.
  void optimize(const Optimizer& optimizer);
  // Collective, only while no phase is bound. Moves experts whose home changed, with weights and optimizer state, and
  // zeroes the gradients of affected layers. Returns the number of bytes sent by all ranks.
  Bytes move_homes(ArrayView<const RankId, 2> home);

  struct StepTokens {
    const ReplayRoutes& routes;
    int micro_steps = 0;
    bool keep_results = false;  // outputs, input gradients and routes used, of all micro-steps
  };
  // Runs all turns of the bound phase, with `work` before each layer, then finishes it. Returns the loss of the step
  // over all ranks (0 if forward only). Throws InputError if the phase has another number of layers or micro-steps.
  using Work = std::function<void(const Turn&)>;
  double run(PhaseExecutor& phase, const StepTokens& tokens, const Work& work);

  // Gradients accumulate until zero_gradients(). output(), input_gradient() and routes_used() describe the last run and
  // require keep_results.
  std::vector<float> output(MicroStepId m) const;                   // [tokens][hidden], after the last layer
  std::vector<float> input_gradient(MicroStepId m) const;           // [tokens][hidden]
  std::vector<float> expert_gradient(LayerId l, ExpertId e) const;  // gate_up, then down; homes on this rank only
  std::vector<float> expert_weights(LayerId l, ExpertId e) const;   // gate_up, then down
  std::vector<float> router_gradient(LayerId l) const;              // [experts][hidden], from this rank's tokens
  std::vector<float> router_weights(LayerId l) const;
  std::vector<ExpertId> routes_used(MicroStepId m, LayerId l) const;  // [token·k + j], including the router's choices
  const Array<RankId, 2>& home() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace foremoe

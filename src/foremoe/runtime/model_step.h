#pragma once

// One step of a model on one rank: the loop over a phase's turns, and the activations kept from forward to backward.
//
// Memory. Micro-steps in flight share a ring buffer. Each entry stores the input of every layer, the router's weights
// and the routes. Forward-only phases reuse the memory of one layer and alternate between two inputs. The constructor
// allocates everything for the largest micro-step of this rank.

#include <vector>

#include "foremoe/runtime/cpu/router.h"
#include "foremoe/runtime/memory.h"
#include "foremoe/runtime/moe_model.h"

namespace foremoe {

// Results of all micro-steps.
struct StepResults {
  std::vector<std::vector<float>> output;          // [micro_step] → [tokens][hidden]
  std::vector<std::vector<float>> input_gradient;  // [micro_step] → [tokens][hidden]; empty without backward
  Array<std::vector<ExpertId>, 2> routes_used;     // [micro_step][layer] → [token·k + j]
};

struct RouterMemory {  // [layer][experts][hidden]
  const float* weights = nullptr;
  float* gradients = nullptr;
};

class ModelStep {
 public:
  struct Parts {
    const ModelSize& size;
    const MoeModel::StepTokens& tokens;
    RouterMemory router;
    const Communicator& communicator;
  };
  // Throws InputError if `order` has another number of layers or micro-steps, or if the routes have another top_k.
  ModelStep(const Parts& parts, const TurnOrder& order);

  // Runs all turns. Returns this rank's part of the loss.
  double run(PhaseExecutor& phase, const MoeModel::Work& work);
  StepResults take_results() { return std::move(results_); }

 private:
  struct Layer {
    std::vector<ExpertId> routes;  // [token·k + j], as recorded or dealt
    std::vector<ExpertId> picked;  // [token·k + j], completed by the router; empty if all rows have routes
    Memory weight;                 // [token·k + j]

    const std::vector<ExpertId>& used() const { return picked.empty() ? routes : picked; }
  };
  struct MicroStep {
    std::int64_t tokens = 0;
    std::vector<Memory> x;      // [layer + 1], or two that alternate; [token][hidden]
    std::vector<Layer> layers;  // [layer], or one for all
  };
  struct At {  // state used by one turn
    const Turn& turn;
    MicroStep& micro_step;
    Layer& layer;
    const float* router;  // [experts][hidden]
  };

  At at(const Turn& turn);
  float* x(const MicroStep& micro_step, int layer) const;
  std::size_t values(const MicroStep& micro_step) const;  // number of values in [tokens][hidden]
  void begin_micro_step(const At& at);
  void pick_missing(const At& at);
  void forward(PhaseExecutor& phase, TurnId turn, const At& at);
  double begin_backward(const At& at);
  void backward(PhaseExecutor& phase, TurnId turn, const At& at);
  cpu::RoutedTokens routed(const At& at) const;

  const Parts parts_;
  const TurnOrder& order_;
  const RankId rank_;
  std::int64_t step_tokens_ = 0;  // of all ranks

  std::vector<MicroStep> ring_;  // [micro_step mod its size]
  std::vector<std::int32_t> missing_, picks_;
  cpu::RouterWorkspace router_workspace_;
  Memory target_, dy_, dx_, d_weight_;  // only with backward
  StepResults results_;
};

}  // namespace foremoe

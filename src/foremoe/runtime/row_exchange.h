#pragma once

// Execution of one dispatch: sends rows to the ranks that compute them, runs their experts, and returns the results.
//
//   forward    gather ▸ all-to-all ▸ by expert ▸ experts ▸ by source ▸ all-to-all ▸ combine
//   backward   combine's gradient ▸ all-to-all ▸ by expert ▸ experts' gradient ▸ by source ▸ all-to-all ▸ add
//
// Both all-to-alls use the split sizes of the dispatch in both passes.

#include <algorithm>
#include <functional>
#include <span>
#include <vector>

#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/cpu/experts.h"
#include "foremoe/runtime/layer_dispatch.h"
#include "foremoe/runtime/memory.h"
#include "foremoe/runtime/phase_executor.h"

namespace foremoe {

// Matrix that grows on demand. Bind reserves it for the largest micro-step, so that later calls do not allocate.
class RowMatrix {
 public:
  float* reserve(std::int64_t rows, int width);
  float* data() const { return memory_.floats(); }

 private:
  Memory memory_;
};

// State that a forward saves for its backward.
struct ForwardRows {
  LayerDispatch dispatch;
  const float* weight = nullptr;  // [token·k + j], owned by the caller
  RowMatrix x;                    // [computed row][hidden]
  RowMatrix gate_up;              // [computed row][2·intermediate]
  RowMatrix returned;             // [sent row][hidden], returned results
};

// State that one layer of a micro-step saves from forward to backward.
struct KeptLayer {
  ForwardRows planned;
  ForwardRows unrouted;
  bool at_homes = false;  // the turn fell back
  bool any_unrouted = false;
};

// Saved layers of all micro-steps in flight. A phase without backward uses one entry for all layers.
class KeptLayers {
 public:
  explicit KeptLayers(const PhaseParts& parts) {
    if (parts.turns.schedule().phase != Phase::kPolicyUpdate) return;
    layers_ = static_cast<std::size_t>(parts.plan().num_layers());
    in_flight_ = static_cast<std::size_t>(std::min(parts.plan().in_flight, parts.plan().num_micro_steps()));
    kept_.resize(in_flight_ * layers_);
  }
  KeptLayer& operator[](const Turn& turn) {
    return kept_[turn.micro_step.index() % in_flight_ * layers_ + turn.layer.index() % layers_];
  }
  std::span<KeptLayer> all() { return kept_; }

 private:
  std::size_t in_flight_ = 1;
  std::size_t layers_ = 1;
  std::vector<KeptLayer> kept_ = std::vector<KeptLayer>(1);  // [micro-step mod in flight · layers + layer]
};

// Returns the weights (and gradients) of the expert in a slot, during a dispatch. Called only for slots with rows.
using ExpertsOf = std::function<cpu::ExpertRows(SlotId)>;

class RowExchange {
 public:
  struct Model {
    ExpertShape shape;
    int top_k = 1;
    bool position_independent = false;
  };
  RowExchange(Communicator& communicator, const Model& model)
      : communicator_(communicator), model_(model), workspace_(model.shape, model.position_independent) {}

  void reserve(std::int64_t rows_sent, std::int64_t rows_computed);

  // Adds the experts' results for the rows of rows.dispatch to layer.y, and the turn's figures to `figures`.
  void forward(const ExpertsOf& experts, const LayerForward& layer, ForwardRows& rows, TurnFigures& figures);
  // Adds the input gradient to layer.dx and sets layer.d_weight to the gradient of the routing weights.
  void backward(const ExpertsOf& experts, const LayerBackward& layer, const ForwardRows& rows, TurnFigures& figures);

 private:
  void to_experts(const float* sent, const LayerDispatch& dispatch, float* computed);
  void from_experts(const float* computed, const LayerDispatch& dispatch, float* sent);
  void find_experts(const ExpertsOf& experts, const RankDispatch& rows);
  template <class Compute>
  void compute(const LayerDispatch& dispatch, TurnFigures& figures, Compute compute);

  Communicator& communicator_;
  const Model model_;
  cpu::ExpertsWorkspace workspace_;
  RowMatrix sent_, received_, computed_, computed_gradient_;
  std::vector<cpu::ExpertRows> experts_;
  std::vector<std::int64_t> bytes_to_, bytes_from_;
};

}  // namespace foremoe

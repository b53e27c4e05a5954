#pragma once

// One dispatch carried out: rows travel to the ranks that compute them, through their experts, and back.
//
//   forward    gather ▸ all-to-all ▸ by expert ▸ experts ▸ by source ▸ all-to-all ▸ combine
//   backward   combine's gradient ▸ all-to-all ▸ by expert ▸ experts' gradient ▸ by source ▸ all-to-all ▸ add
//
// Both all-to-alls of both passes have the split sizes of the dispatch.

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

// A matrix that grows when it must: sized at bind so that it need not.
class RowMatrix {
 public:
  float* reserve(std::int64_t rows, int width);
  float* data() const { return memory_.floats(); }

 private:
  Memory memory_;
};

// What a forward leaves for its backward.
struct ForwardRows {
  LayerDispatch dispatch;
  const float* weight = nullptr;  // [token·k + j], the caller's
  RowMatrix x;                    // [computed row][hidden]
  RowMatrix gate_up;              // [computed row][2·intermediate]
  RowMatrix returned;             // [sent row][hidden], results as they came back
};

// What one layer of a micro-step keeps from forward to backward.
struct KeptLayer {
  ForwardRows planned;
  ForwardRows unrouted;
  bool at_homes = false;  // fallen back
  bool any_unrouted = false;
};

// The layers of the micro-steps in flight; a phase without backward keeps one for all.
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

// The weights (and gradients) of the expert in a slot of the rank, while a dispatch runs; asked for slots with rows.
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

  // layer.y += what the experts make of layer.x, for the rows of rows.dispatch. Adds to `figures`.
  void forward(const ExpertsOf& experts, const LayerForward& layer, ForwardRows& rows, TurnFigures& figures);
  // layer.dx += its gradient, layer.d_weight = that of the weights.
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

#pragma once

// One dispatch carried out: rows travel to the ranks that compute them, through their experts, and back.
//
//   forward    gather ▸ all-to-all ▸ by expert ▸ experts ▸ by source ▸ all-to-all ▸ combine
//   backward   combine's gradient ▸ all-to-all ▸ by expert ▸ experts' gradient ▸ by source ▸ all-to-all ▸ add
//
// Both all-to-alls of both passes have the split sizes of the dispatch.

#include <functional>
#include <span>

#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/device.h"
#include "foremoe/runtime/layer_dispatch.h"

namespace foremoe {

// A matrix that grows when it must: sized at bind so that it need not.
class RowMatrix {
 public:
  float* reserve(Device& device, std::int64_t rows, int width);
  float* data() const { return memory_.floats(); }

 private:
  DeviceMemory memory_;
};

// What a forward leaves for its backward.
struct ForwardRows {
  LayerDispatch dispatch;
  RowMatrix x;         // [computed row][hidden]
  RowMatrix gate_up;   // [computed row][2·intermediate]
  RowMatrix returned;  // [sent row][hidden], results as they came back
};

// The weights (and gradients) of the rank's experts while a dispatch runs: one entry per LayerDispatch::experts.
using ExpertsOf = std::function<ExpertRows(const ComputedExpert&)>;

class RowExchange {
 public:
  RowExchange(Communicator& communicator, Device& device, ExpertShape shape, int top_k)
      : communicator_(communicator), device_(device), shape_(shape), top_k_(top_k) {}

  void reserve(std::int64_t rows_sent, std::int64_t rows_computed);

  // y += what the experts say of x. [tokens][hidden]; weight [token·k + j].
  void forward(const ExpertsOf& experts, const float* x, const float* weight, float* y, ForwardRows& rows);
  // dx += its gradient, d_weight = that of the weights. The same weight as in the forward.
  void backward(const ExpertsOf& experts, const float* dy, const float* weight, float* dx, float* d_weight,
                const ForwardRows& rows);

  double compute_cpu_seconds() const { return compute_cpu_seconds_; }  // of expert computation, so far

 private:
  void to_experts(const float* sent, const LayerDispatch& dispatch, float* computed);
  void from_experts(const float* computed, const LayerDispatch& dispatch, float* sent);
  void find_experts(const ExpertsOf& experts, const LayerDispatch& dispatch);

  Communicator& communicator_;
  Device& device_;
  ExpertShape shape_;
  int top_k_;
  RowMatrix sent_, received_, computed_, computed_gradient_;
  std::vector<ExpertRows> experts_;
  std::vector<std::int64_t> bytes_to_, bytes_from_;
  double compute_cpu_seconds_ = 0;
};

}  // namespace foremoe

#pragma once

// The reference's forward and backward of one source in one micro-step, over all layers. reference_model.h sums the
// results. Values carry rounding variances if requested (reference_expert.h).
//
// Entries are [token·k + j]. An expert's rows are its entries in ascending order. Threads divide the tokens or the
// experts. Each thread writes only the results of its own tokens or experts.

#include <span>
#include <vector>

#include "foremoe/core/parallel.h"
#include "foremoe/reference/reference_expert.h"
#include "foremoe/runtime/moe_model.h"

namespace foremoe {

struct ReferenceWeights {
  Array<std::vector<double>, 2> expert;     // [layer][expert] → gate_up, then down
  std::vector<std::vector<double>> router;  // [layer] → [experts][hidden]
};

struct ReferenceTensors {
  Array<std::vector<double>, 2> output;              // [micro_step][rank] → [tokens][hidden]
  Array<std::vector<double>, 2> input_gradient;      // likewise; empty without backward
  Array<std::vector<double>, 2> expert_gradient;     // [layer][expert] → gate_up, then down
  std::vector<std::vector<double>> router_gradient;  // [layer] → [experts][hidden], summed over all tokens
};

struct RoundedTensors : ReferenceTensors {
  ReferenceTensors variance;  // float32 rounding, see reference_expert.h; empty unless requested
};

class ReferencePass {
 public:
  // `routes`: [layer][entry].
  ReferencePass(const ModelSize& size, const ReferenceWeights& weights, ThreadPool& pool,
                std::vector<std::vector<ExpertId>> routes);

  // Runs all layers on an exact input.
  Rounded forward(std::vector<double> input, bool variances);

  // Computes the input gradient from the output gradient. Adds the gradients of experts and routers, and their
  // variances if dy has variances. `rows` [layer][expert]: rows of the whole step.
  Rounded backward(Rounded dy, const Array<double, 2>& rows, RoundedTensors& sums);

 private:
  struct Layer {
    Rounded x;                                      // [token][hidden], input of the layer
    Rounded weight;                                 // [entry]
    std::vector<std::vector<std::size_t>> entries;  // [expert]
  };

  // Gradients of all entries of a layer.
  struct EntryGradients {
    Rounded dx;        // [entry][hidden], through the expert
    Rounded d_weight;  // [entry]
    Rounded d_logit;   // [entry]
  };

  Rounded forward(std::size_t l, Rounded x);
  void weigh(std::size_t l);
  void bound_weights(std::size_t l, std::size_t first);
  Rounded backward(std::size_t l, const Rounded& dy, std::span<const double> rows, RoundedTensors& sums);
  void backward_experts(std::size_t l, const Rounded& dy, std::span<const double> rows, EntryGradients& of_entry,
                        RoundedTensors& sums) const;
  void backward_weights(std::size_t l, std::size_t first, EntryGradients& of_entry) const;

  template <class F>
  void for_each_token(std::size_t l, const F& f) const;
  template <class F>
  void for_each_chosen(std::size_t l, std::size_t first, const F& f) const;
  Rounded gather(const Rounded& from, const std::vector<std::size_t>& entries) const;
  void scatter(const Rounded& rows, const std::vector<std::size_t>& entries, Rounded& of_entry) const;
  const double* router_row(std::size_t l, std::size_t entry) const;
  bool chosen(std::size_t l, std::size_t entry) const { return routes_[l][entry].value >= 0; }

  const ModelSize& size_;
  const ReferenceWeights& weights_;
  ThreadPool& pool_;
  std::size_t hidden_, k_;
  std::vector<std::vector<ExpertId>> routes_;
  std::vector<Layer> layers_;
};

}  // namespace foremoe

#pragma once

// The arithmetic of a rank: one object per rank over one compute stream that its caller owns. Every operation is
// enqueued on that stream; what pointers point to is in this device's memory, float32, row-major; what spans hold
// (indices, lists of experts) is in the host's, and free to change on return. Rows sum in different orders on different
// devices, so results agree to rounding; on one device they repeat bit for bit. cpu/ and cuda/ implement it, and
// device_conformance.h holds both to a float64 reference.

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "foremoe/core/units.h"
#include "foremoe/transfer/copy_link.h"
#include "foremoe/transfer/stream.h"

namespace foremoe {

struct ExpertShape {
  int hidden = 0;        // width of a token
  int intermediate = 0;  // width inside an expert
};

// Rows of one expert, contiguous in the row matrices of a call. An expert may have several such blocks in one call: the
// first of them alone may have a fresh gradient. SwiGLU: y = (silu(x·Gᵀ) ∘ (x·Uᵀ))·Dᵀ, where gate_up
// [2·intermediate][hidden] is G above U and down is D [hidden][intermediate].
struct ExpertRows {
  std::int64_t first_row = 0;
  std::int64_t rows = 0;
  const float* gate_up = nullptr;
  const float* down = nullptr;
  float* gate_up_gradient = nullptr;  // backward alone
  float* down_gradient = nullptr;
  bool fresh_gradient = false;  // overwrite what the gradient holds instead of adding to it
};

// Memory of a device, owned.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(std::byte* data, Bytes bytes, std::shared_ptr<void> owner)
      : data_(data), bytes_(bytes), owner_(std::move(owner)) {}
  std::byte* data() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }
  Bytes bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  Bytes bytes_;
  std::shared_ptr<void> owner_;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;
  virtual Stream& stream() = 0;
  virtual bool is_host_memory() const = 0;  // its memory is the host's: any host memory may be an operand

  virtual DeviceMemory allocate(
      Bytes bytes) = 0;  // 64-byte aligned, zeroed; throws InputError naming how much when there is too little
  virtual void upload(std::byte* to, std::span<const std::byte> from) = 0;  // host → device; `from` is free on return
  virtual void download(std::span<std::byte> to, const std::byte* from) = 0;       // device → host; done on return
  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes) = 0;  // within the device
  virtual void zero(std::byte* to, std::size_t bytes) = 0;

  // to[i] = from[row[i]], rows of `width`; row[i] < 0 leaves to[i] as it is.
  virtual void gather_rows(float* to, const float* from, std::span<const std::int32_t> row, int width) = 0;
  // to[row[i]] = from[i]; the rows are distinct; row[i] < 0 is left out.
  virtual void scatter_rows(float* to, const float* from, std::span<const std::int32_t> row, int width) = 0;

  // y[t] += Σ_j weight[t·k + j] · rows[row[t·k + j]], j ascending; row < 0 adds nothing. y [tokens][hidden].
  virtual void combine(float* y, const float* rows, const float* weight, std::span<const std::int32_t> row, int k,
                       int hidden) = 0;
  // Its gradient: d_rows[row[i]] = weight[i]·dy[t] and d_weight[i] = ⟨rows[row[i]], dy[t]⟩, in double; where row < 0
  // d_weight[i] stays as it is.
  virtual void combine_backward(float* d_rows, float* d_weight, const float* dy, const float* rows, const float* weight,
                                std::span<const std::int32_t> row, int k, int hidden) = 0;
  // to[t] += Σ_j rows[row[t·k + j]], j ascending: gradients of a token that was sent to k experts.
  virtual void add_rows(float* to, const float* rows, std::span<const std::int32_t> row, int k, int hidden) = 0;

  // x, y [rows][hidden], gate_up [rows][2·intermediate] is kept for the backward pass.
  virtual void experts_forward(std::span<const ExpertRows> experts, ExpertShape shape, const float* x, float* gate_up,
                               float* y) = 0;
  // dx [rows][hidden]; adds to (or, when fresh, sets) the gradients of every expert that has rows.
  virtual void experts_backward(std::span<const ExpertRows> experts, ExpertShape shape, const float* x,
                                const float* gate_up, const float* dy, float* dx) = 0;
  virtual void reserve_rows(std::int64_t rows,
                            ExpertShape shape) = 0;         // scratch for the two above: none is allocated later
  virtual void use_position_independent_rows(bool on) = 0;  // forward: a row's bits do not depend on where it stands

  // The router: logits = x·Rᵀ, R [experts][hidden]; a token's weights are the softmax over its chosen experts' logits.
  // expert[t·k + j] < 0 has weight 0 and is not chosen.
  virtual void router_forward(const float* x, const float* router, std::span<const std::int32_t> expert, int k,
                              int hidden, float* weight) = 0;
  // dx[t] += …, d_router += …; in token order.
  virtual void router_backward(const float* x, const float* router, std::span<const std::int32_t> expert, int k,
                               int hidden, const float* weight, const float* d_weight, float* dx, float* d_router) = 0;
  // The k experts of greatest logit for each listed token, best first, ties to the lowest id; on the host on return.
  virtual void router_pick(const float* x, const float* router, int experts, std::span<const std::int32_t> token, int k,
                           int hidden, std::span<std::int32_t> picked) = 0;

  virtual void add(float* to, const float* from, std::int64_t n) = 0;  // to += from
  virtual void sgd(float* weights, const float* gradient, std::int64_t n, float rate) = 0;
  struct Adam {
    float rate = 1e-3F, beta1 = 0.9F, beta2 = 0.999F, epsilon = 1e-8F;
    int step = 1;  // ≥ 1, for bias correction
  };
  // mean = β₁·mean + (1 − β₁)·g, square = β₂·square + (1 − β₂)·g²,
  // weights −= rate · mean/(1 − β₁^step) ÷ (√(square/(1 − β₂^step)) + ε).
  virtual void adam(float* weights, const float* gradient, float* mean, float* square, std::int64_t n,
                    const Adam& options) = 0;
  // gradient = (x − target)·scale; Σ ½(x − target)²·scale, in double, on the host on return.
  virtual double squared_error(const float* x, const float* target, std::int64_t n, float scale, float* gradient) = 0;

  // Copies between this device and host memory or another rank of it, on a stream of their own.
  virtual std::unique_ptr<CopyLink> make_copy_link() = 0;
  virtual void pin(std::span<const std::byte> host_memory) = 0;  // so that copies from it are asynchronous
  virtual void unpin(std::span<const std::byte> host_memory) = 0;
};

}  // namespace foremoe

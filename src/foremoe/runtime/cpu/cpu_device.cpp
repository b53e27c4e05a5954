#include "foremoe/runtime/cpu/cpu_device.h"

#include <cstring>

#include "foremoe/runtime/cpu/experts.h"
#include "foremoe/runtime/cpu/gemm.h"
#include "foremoe/runtime/cpu/host_memory.h"
#include "foremoe/runtime/cpu/optimizers.h"
#include "foremoe/runtime/cpu/router.h"
#include "foremoe/runtime/cpu/rows.h"
#include "foremoe/transfer/memcpy_link.h"

namespace foremoe {

namespace {

// Work is done when its call returns, so every event has happened.
class CpuStream final : public Stream {
 public:
  Event record() override { return {.stream = this, .number = 0}; }
  void wait(const Event& event) override {
    if (!happened(event)) event.stream->synchronize();
  }
  bool done(const Event& /*event*/) const override { return true; }
  void synchronize() override {}
};

class CpuDevice final : public Device {
 public:
  CpuDevice() { cpu::keep_blas_on_its_callers_thread(); }

  std::string name() const override { return "cpu"; }
  Stream& stream() override { return stream_; }
  bool is_host_memory() const override { return true; }

  DeviceMemory allocate(Bytes bytes) override { return cpu::allocate_host_memory(bytes); }
  void upload(std::byte* to, std::span<const std::byte> from) override { copy(to, from.data(), from.size()); }
  void download(std::span<std::byte> to, const std::byte* from) override { copy(to.data(), from, to.size()); }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void zero(std::byte* to, std::size_t bytes) override {
    if (bytes > 0) std::memset(to, 0, bytes);
  }

  void gather_rows(float* to, const float* from, std::span<const std::int32_t> row, int width) override {
    cpu::gather_rows(to, from, row, width);
  }
  void scatter_rows(float* to, const float* from, std::span<const std::int32_t> row, int width) override {
    cpu::scatter_rows(to, from, row, width);
  }
  void combine(float* y, const float* rows, const float* weight, std::span<const std::int32_t> row, int k,
               int hidden) override {
    cpu::combine(y, {.rows = rows, .row = row, .k = k, .hidden = hidden}, weight);
  }
  void combine_backward(float* d_rows, float* d_weight, const float* dy, const float* rows, const float* weight,
                        std::span<const std::int32_t> row, int k, int hidden) override {
    cpu::combine_backward({.rows = rows, .row = row, .k = k, .hidden = hidden}, weight, dy,
                          {.d_rows = d_rows, .d_weight = d_weight});
  }
  void add_rows(float* to, const float* rows, std::span<const std::int32_t> row, int k, int hidden) override {
    cpu::add_rows(to, {.rows = rows, .row = row, .k = k, .hidden = hidden});
  }

  void experts_forward(std::span<const ExpertRows> experts, ExpertShape shape, const float* x, float* gate_up,
                       float* y) override {
    experts_.forward(experts, shape, x, gate_up, y);
  }
  void experts_backward(std::span<const ExpertRows> experts, ExpertShape shape, const float* x, const float* gate_up,
                        const float* dy, float* dx) override {
    experts_.backward(experts, shape, x, gate_up, {.dy = dy, .dx = dx});
  }
  void reserve_rows(std::int64_t /*rows*/, ExpertShape shape) override { experts_.reserve(shape); }
  void use_position_independent_rows(bool on) override { experts_.use_position_independent_rows(on); }

  void router_forward(const float* x, const float* router, std::span<const std::int32_t> expert, int k, int hidden,
                      float* weight) override {
    router_.forward({.x = x, .router = router, .expert = expert, .k = k, .hidden = hidden}, weight);
  }
  void router_backward(const float* x, const float* router, std::span<const std::int32_t> expert, int k, int hidden,
                       const float* weight, const float* d_weight, float* dx, float* d_router) override {
    router_.backward({.x = x, .router = router, .expert = expert, .k = k, .hidden = hidden},
                     {.weight = weight, .d_weight = d_weight, .dx = dx, .d_router = d_router});
  }
  void router_pick(const float* x, const float* router, int experts, std::span<const std::int32_t> token, int k,
                   int hidden, std::span<std::int32_t> picked) override {
    router_.pick({.x = x, .router = router, .expert = {}, .k = k, .hidden = hidden},
                 {.experts = experts, .token = token, .picked = picked});
  }

  void add(float* to, const float* from, std::int64_t n) override {
    for (std::int64_t i = 0; i < n; ++i) to[i] += from[i];
  }
  void sgd(float* weights, const float* gradient, std::int64_t n, float rate) override {
    cpu::sgd(weights, gradient, n, rate);
  }
  void adam(float* weights, const float* gradient, float* mean, float* square, std::int64_t n,
            const Adam& options) override {
    cpu::adam(weights, gradient, {.mean = mean, .square = square}, n, options);
  }
  double squared_error(const float* x, const float* target, std::int64_t n, float scale, float* gradient) override {
    return cpu::squared_error({.x = x, .target = target}, n, scale, gradient);
  }

  std::unique_ptr<CopyLink> make_copy_link() override { return std::make_unique<MemcpyLink>(); }
  void pin(std::span<const std::byte> /*host_memory*/) override {}
  void unpin(std::span<const std::byte> /*host_memory*/) override {}

 private:
  CpuStream stream_;
  cpu::Experts experts_;
  cpu::Router router_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device() { return std::make_unique<CpuDevice>(); }

}  // namespace foremoe

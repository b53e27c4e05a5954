#include "foremoe/runtime/cuda/cuda_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <optional>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/runtime/cuda/cuda_check.h"
#include "foremoe/runtime/cuda/cuda_copy_link.h"
#include "foremoe/runtime/cuda/cuda_experts.h"
#include "foremoe/runtime/cuda/cuda_router.h"
#include "foremoe/runtime/cuda/cuda_stream.h"
#include "foremoe/runtime/cuda/device_allocation.h"
#include "foremoe/runtime/cuda/host_registration.h"
#include "foremoe/runtime/cuda/row_kernels.h"
#include "foremoe/runtime/cuda/staging_ring.h"
#include "foremoe/runtime/cuda/update_kernels.h"

namespace foremoe {
namespace {

using cuda::CurrentDevice;

constexpr std::size_t kSegmentBytes = std::size_t{1} << 20;  // of the staging ring: indices of 32k tokens with k = 8

// A stream that is the caller's, or made here.
class LentStream {
 public:
  explicit LentStream(cudaStream_t lent) : stream_(lent), own_(lent == nullptr) {
    if (own_) FOREMOE_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~LentStream() {
    if (own_) FOREMOE_CUDA_NOTHROW(cudaStreamDestroy(stream_));
  }
  LentStream(const LentStream&) = delete;
  LentStream& operator=(const LentStream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_;
  bool own_;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(int gpu, cudaStream_t lent)
      : gpu_(gpu),
        here_(std::in_place, gpu),
        lent_(lent),
        stream_(lent_.get()),
        ring_(lent_.get(), kSegmentBytes),
        experts_(lent_.get(), ring_, [this](Bytes bytes) { return allocate(bytes); }),
        router_(lent_.get(), ring_, [this](Bytes bytes) { return allocate(bytes); }),
        error_sums_(allocate(Bytes{cuda::kErrorBlocks * sizeof(double)})) {
    here_.reset();  // the thread's own device is current again
  }
  ~CudaDevice() override {
    FOREMOE_CUDA_NOTHROW(cudaSetDevice(gpu_));
    FOREMOE_CUDA_NOTHROW(cudaStreamSynchronize(lent_.get()));
  }

  std::string name() const override {
    cudaDeviceProp properties{};
    FOREMOE_CUDA(cudaGetDeviceProperties(&properties, gpu_));
    return fmt::format("cuda:{} {}", gpu_, properties.name);
  }
  Stream& stream() override { return stream_; }
  bool is_host_memory() const override { return false; }

  DeviceMemory allocate(Bytes bytes) override { return cuda::allocate_device_memory(gpu_, bytes, lent_.get()); }
  void upload(std::byte* to, std::span<const std::byte> from) override {
    const CurrentDevice here(gpu_);
    if (from.size() <= ring_.segment_bytes()) return ring_.copy(to, from);
    FOREMOE_CUDA(cudaMemcpyAsync(to, from.data(), from.size(), cudaMemcpyHostToDevice, lent_.get()));
    cuda::wait_for(lent_.get());  // `from` may be pinned, and then is still being read
  }
  void download(std::span<std::byte> to, const std::byte* from) override {
    const CurrentDevice here(gpu_);
    if (to.empty()) return;
    FOREMOE_CUDA(cudaMemcpyAsync(to.data(), from, to.size(), cudaMemcpyDeviceToHost, lent_.get()));
    cuda::wait_for(lent_.get());
  }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    const CurrentDevice here(gpu_);
    if (bytes > 0) FOREMOE_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, lent_.get()));
  }
  void zero(std::byte* to, std::size_t bytes) override {
    const CurrentDevice here(gpu_);
    if (bytes > 0) FOREMOE_CUDA(cudaMemsetAsync(to, 0, bytes, lent_.get()));
  }

  void gather_rows(float* to, const float* from, std::span<const std::int32_t> row, int width) override {
    const CurrentDevice here(gpu_);
    cuda::gather_rows(to, from, index(row, 1, width), lent_.get());
  }
  void scatter_rows(float* to, const float* from, std::span<const std::int32_t> row, int width) override {
    const CurrentDevice here(gpu_);
    cuda::scatter_rows(to, from, index(row, 1, width), lent_.get());
  }
  void combine(float* y, const float* rows, const float* weight, std::span<const std::int32_t> row, int k,
               int hidden) override {
    const CurrentDevice here(gpu_);
    cuda::combine(y, rows, weight, index(row, k, hidden), lent_.get());
  }
  void combine_backward(float* d_rows, float* d_weight, const float* dy, const float* rows, const float* weight,
                        std::span<const std::int32_t> row, int k, int hidden) override {
    const CurrentDevice here(gpu_);
    cuda::combine_backward({.d_rows = d_rows, .d_weight = d_weight, .dy = dy, .rows = rows, .weight = weight},
                           index(row, k, hidden), lent_.get());
  }
  void add_rows(float* to, const float* rows, std::span<const std::int32_t> row, int k, int hidden) override {
    const CurrentDevice here(gpu_);
    cuda::combine(to, rows, nullptr, index(row, k, hidden), lent_.get());
  }

  void experts_forward(std::span<const ExpertRows> experts, ExpertShape shape, const float* x, float* gate_up,
                       float* y) override {
    const CurrentDevice here(gpu_);
    experts_.forward(experts, shape, x, gate_up, y);
  }
  void experts_backward(std::span<const ExpertRows> experts, ExpertShape shape, const float* x, const float* gate_up,
                        const float* dy, float* dx) override {
    const CurrentDevice here(gpu_);
    experts_.backward(experts, shape, x, gate_up, {.dy = dy, .dx = dx});
  }
  void reserve_rows(std::int64_t rows, ExpertShape shape) override {
    const CurrentDevice here(gpu_);
    experts_.reserve(rows, shape);
  }
  void use_position_independent_rows(bool on) override { experts_.use_position_independent_rows(on); }

  void router_forward(const float* x, const float* router, std::span<const std::int32_t> expert, int k, int hidden,
                      float* weight) override {
    const CurrentDevice here(gpu_);
    router_.forward({.x = x, .router = router, .expert = expert, .k = k, .hidden = hidden}, weight);
  }
  void router_backward(const float* x, const float* router, std::span<const std::int32_t> expert, int k, int hidden,
                       const float* weight, const float* d_weight, float* dx, float* d_router) override {
    const CurrentDevice here(gpu_);
    router_.backward({.x = x, .router = router, .expert = expert, .k = k, .hidden = hidden},
                     {.weight = weight, .d_weight = d_weight, .dx = dx, .d_router = d_router});
  }
  void router_pick(const float* x, const float* router, int experts, std::span<const std::int32_t> token, int k,
                   int hidden, std::span<std::int32_t> picked) override {
    const CurrentDevice here(gpu_);
    if (token.empty()) return;
    const std::int32_t* on_device =
        router_.pick({.x = x, .router = router, .expert = {}, .k = k, .hidden = hidden}, experts, token);
    download(std::as_writable_bytes(picked.first(token.size() * static_cast<std::size_t>(k))),
             reinterpret_cast<const std::byte*>(on_device));
  }

  void add(float* to, const float* from, std::int64_t n) override {
    const CurrentDevice here(gpu_);
    cuda::add(to, from, n, lent_.get());
  }
  void sgd(float* weights, const float* gradient, std::int64_t n, float rate) override {
    const CurrentDevice here(gpu_);
    cuda::sgd(weights, gradient, n, rate, lent_.get());
  }
  void adam(float* weights, const float* gradient, float* mean, float* square, std::int64_t n,
            const Adam& options) override {
    const CurrentDevice here(gpu_);
    // The corrections lose all digits in float when the step is small.
    const auto scale = [&](float beta) { return static_cast<float>(1 / (1 - std::pow(double{beta}, options.step))); };
    cuda::adam({.weights = weights,
                .gradient = gradient,
                .mean = mean,
                .square = square,
                .n = n,
                .rate = options.rate,
                .beta1 = options.beta1,
                .beta2 = options.beta2,
                .epsilon = options.epsilon,
                .mean_scale = scale(options.beta1),
                .square_scale = scale(options.beta2)},
               lent_.get());
  }
  double squared_error(const float* x, const float* target, std::int64_t n, float scale, float* gradient) override {
    const CurrentDevice here(gpu_);
    auto* sums = reinterpret_cast<double*>(error_sums_.data());
    cuda::squared_error({.x = x, .target = target, .gradient = gradient, .n = n, .scale = scale, .sums = sums},
                        lent_.get());
    double sum = 0;
    download(std::as_writable_bytes(std::span(&sum, 1)), error_sums_.data());
    return sum;
  }

  std::unique_ptr<CopyLink> make_copy_link() override { return std::make_unique<cuda::CudaCopyLink>(gpu_); }
  void pin(std::span<const std::byte> host_memory) override { cuda::pin_host_memory(host_memory); }
  void unpin(std::span<const std::byte> host_memory) override { cuda::unpin_host_memory(host_memory); }

 private:
  cuda::RowIndex index(std::span<const std::int32_t> row, int k, int width) {
    return {.row = ring_.stage(row), .n = static_cast<std::int64_t>(row.size()), .k = k, .width = width};
  }

  int gpu_;
  std::optional<CurrentDevice> here_;  // during construction
  LentStream lent_;
  cuda::CudaStream stream_;
  cuda::StagingRing ring_;
  cuda::CudaExperts experts_;
  cuda::CudaRouter router_;
  DeviceMemory error_sums_;
};

}  // namespace

int num_cuda_devices() {
  int n = 0;
  if (cudaGetDeviceCount(&n) == cudaSuccess) return n;
  static_cast<void>(cudaGetLastError());
  return 0;
}

std::unique_ptr<Device> make_cuda_device(int gpu, CUstream_st* stream) {
  const int n = num_cuda_devices();
  if (gpu < 0 || gpu >= n) {
    throw InputError({.file = {}, .field = "gpu", .index = {}}, fmt::format("{} of {}", gpu, n));
  }
  return std::make_unique<CudaDevice>(gpu, stream);
}

}  // namespace foremoe

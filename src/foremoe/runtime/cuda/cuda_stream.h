#pragma once

// A stream of events over a cudaStream_t that the caller owns.
//
// Method. Events are numbered from 1 and kept in a ring of cudaEvent_t without timing, made once. When event n's place
//   has been taken by n + kEventsKept, questions about n are answered by the oldest event still kept: it is later in
//   the stream, so that the answer is never too early.
// Guarantee. Any thread may ask about an event or wait for it while another records.

#include <cuda_runtime_api.h>

#include <array>
#include <mutex>

#include "foremoe/transfer/stream.h"

namespace foremoe::cuda {

inline constexpr std::uint64_t kEventsKept = 1024;

class CudaStream final : public Stream {
 public:
  // Makes its events on the device that is current, which must be the stream's.
  explicit CudaStream(cudaStream_t stream);
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  cudaStream_t handle() const { return stream_; }

  Event record() override;
  void wait(const Event& event) override;  // of a stream that is not CUDA's: the host waits
  bool done(const Event& event) const override;
  void synchronize() override;
  void let_wait(cudaStream_t other, const Event& event) const;  // as wait(), for `other` and an event of this one

 private:
  cudaEvent_t kept(std::uint64_t number) const;  // number, or the oldest kept; mutex_ held
  void destroy() noexcept;

  cudaStream_t stream_;
  mutable std::mutex mutex_;
  std::array<cudaEvent_t, kEventsKept> ring_{};  // [number % kEventsKept]
  std::uint64_t last_ = 0;                       // recorded
  mutable std::uint64_t done_ = 0;               // all up to this one are known to have happened
};

// Enqueued on `stream`: later work begins after the event.
void wait_on(cudaStream_t stream, const Event& event);

}  // namespace foremoe::cuda

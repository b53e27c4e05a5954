#pragma once

// How small host arrays (indices, pointers, uploads) reach the device without the host waiting: copied into pinned
// memory that is reused in turn, and from there by the stream.
//
// Method. The ring has kSegments segments, each twice: pinned on the host, and on the device. Leaving a segment records
//   an event; entering one waits for its event, which matters only when the host is most of a ring ahead of the device.
//   On the device, order in the stream protects what is reused.
// Bound. An array larger than a segment makes the ring grow, to at least twice its size: what is enqueued may still
//   read the old one, which is kept to the end. A warm call allocates nothing.

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <span>
#include <vector>

namespace foremoe::cuda {

class StagingRing {
 public:
  static constexpr int kSegments = 8;  // more than the arrays that one operation stages

  // Both on the device that is current.
  StagingRing(cudaStream_t stream, std::size_t segment_bytes);
  ~StagingRing();
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;

  std::size_t segment_bytes() const { return segment_bytes_; }

  // On the device; for work that is enqueued before kSegments − 1 more arrays are staged.
  template <class T>
  const T* stage(std::span<const T> values) {
    return reinterpret_cast<const T*>(stage_bytes(std::as_bytes(values)));
  }
  // `from` is at most a segment.
  void copy(std::byte* to, std::span<const std::byte> from);

 private:
  const std::byte* stage_bytes(std::span<const std::byte> from);
  std::size_t take(std::size_t bytes);  // where they begin in both memories
  void allocate(std::size_t segment_bytes);
  void release() noexcept;

  struct Memory {
    std::byte* host = nullptr;
    std::byte* device = nullptr;
  };

  cudaStream_t stream_;
  std::size_t segment_bytes_ = 0;
  std::byte* host_ = nullptr;
  std::byte* device_ = nullptr;
  std::vector<Memory> outgrown_;
  int segment_ = 0;
  std::size_t used_ = 0;                       // of the segment
  std::array<cudaEvent_t, kSegments> left_{};  // [segment]; one never left has happened
};

}  // namespace foremoe::cuda

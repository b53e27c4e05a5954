#pragma once

// Every CUDA call goes through one of these: FOREMOE_CUDA throws CudaError naming the call; FOREMOE_CUDA_NOTHROW is for
// destructors, where there is nobody left to tell and the runtime may already be gone. Host waits go through the two
// functions below, which count them: a warm layer must make none.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>

namespace foremoe::cuda {

class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void check(cudaError_t status, const char* call);

// Waits of this process for a device so far, by any of its threads; waits inside the libraries are not among them.
std::int64_t host_waits();
void wait_for(cudaStream_t stream);
void wait_for(cudaEvent_t event);

// Makes a device the calling thread's current one while it lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int former_ = 0;
  bool changed_ = false;
};

}  // namespace foremoe::cuda

#define FOREMOE_CUDA(call) ::foremoe::cuda::check((call), #call)
#define FOREMOE_CUDA_NOTHROW(call) static_cast<void>(call)

#pragma once

// A NCCL communicator that does not wait for ever. NCCL's operations run in streams and hang when a peer is gone, and
// with them every wait of the host for that stream.
//
// Method. Whoever enqueues an operation has its event watched. A thread asks about the oldest; when it has been the
//   oldest for `timeout`, or NCCL tells of an error, the communicator is aborted: its kernels end, streams go on (with
//   garbage), and whoever uses the group next gets PeerFailed.

#include <nccl.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "foremoe/runtime/communicator.h"

namespace foremoe::nccl {

void check(ncclResult_t result, const char* call);  // throws PeerFailed

class NcclGroup {
 public:
  struct Options {
    int gpu = 0;
    std::chrono::milliseconds timeout{60'000};
  };
  // Collective over `host`, whose ranks become this group's.
  NcclGroup(Communicator& host, const Options& options);
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  ncclComm_t handle();  // throws PeerFailed once aborted
  void watch(const Event& event);
  bool aborted();
  void break_off(const std::string& why) noexcept;

 private:
  void run();

  const Options options_;
  ncclComm_t comm_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Event> watched_;  // oldest first
  std::chrono::steady_clock::time_point oldest_since_;
  bool aborted_ = false;
  bool stopping_ = false;
  std::string why_;
  std::thread watcher_;
};

}  // namespace foremoe::nccl

#define FOREMOE_NCCL(call) ::foremoe::nccl::check((call), #call)

#include "foremoe/runtime/nccl/nccl_group.h"

#include <fmt/format.h>

#include "foremoe/runtime/cuda/cuda_check.h"

namespace foremoe::nccl {
namespace {

constexpr std::chrono::milliseconds kGlance{50};  // between looks at what is under way

}  // namespace

void check(ncclResult_t result, const char* call) {
  if (result != ncclSuccess) throw PeerFailed(fmt::format("{}: {}", call, ncclGetErrorString(result)));
}

NcclGroup::NcclGroup(Communicator& host, const Options& options) : options_(options) {
  const cuda::CurrentDevice here(options.gpu);
  ncclUniqueId id{};
  if (host.rank() == RankId{0}) FOREMOE_NCCL(ncclGetUniqueId(&id));
  host.broadcast(std::as_writable_bytes(std::span(&id, 1)), RankId{0});
  FOREMOE_NCCL(ncclCommInitRank(&comm_, host.num_ranks(), id, host.rank().value));
  watcher_ = std::thread([this] { run(); });
}

NcclGroup::~NcclGroup() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  watcher_.join();
  if (!aborted_) FOREMOE_CUDA_NOTHROW(ncclCommDestroy(comm_));
}

ncclComm_t NcclGroup::handle() {
  const std::lock_guard lock(mutex_);
  if (aborted_) throw PeerFailed(why_);
  return comm_;
}

bool NcclGroup::aborted() {
  const std::lock_guard lock(mutex_);
  return aborted_;
}

void NcclGroup::watch(const Event& event) {
  const std::lock_guard lock(mutex_);
  if (watched_.empty()) oldest_since_ = std::chrono::steady_clock::now();
  watched_.push_back(event);
  if (watched_.size() == 1) wake_.notify_all();
}

// Under the lock, so that nobody is given the handle meanwhile. Whoever has it is told by NCCL.
void NcclGroup::break_off(const std::string& why) noexcept {
  const std::lock_guard lock(mutex_);
  if (aborted_) return;
  aborted_ = true;
  why_ = why;
  watched_.clear();
  FOREMOE_CUDA_NOTHROW(ncclCommAbort(comm_));
}

void NcclGroup::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const auto something = [&] { return stopping_ || !watched_.empty(); };
    wake_.wait(lock, something);
    wake_.wait_for(lock, kGlance, [&] { return stopping_; });
    if (stopping_ || aborted_) continue;
    std::string failure;
    try {
      while (!watched_.empty() && happened(watched_.front())) {
        watched_.pop_front();
        oldest_since_ = std::chrono::steady_clock::now();
      }
      ncclResult_t state = ncclSuccess;
      FOREMOE_NCCL(ncclCommGetAsyncError(comm_, &state));
      if (state != ncclInProgress) check(state, "NCCL");
    } catch (const std::exception& e) {
      failure = e.what();
    }
    if (!watched_.empty() && std::chrono::steady_clock::now() - oldest_since_ > options_.timeout) {
      failure = fmt::format("ranks have not exchanged within {} ms", options_.timeout.count());
    }
    if (failure.empty()) continue;
    lock.unlock();
    break_off(failure);
    lock.lock();
  }
}

}  // namespace foremoe::nccl

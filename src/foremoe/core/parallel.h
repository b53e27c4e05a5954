#pragma once

// A pool of std::jthread for processing layers, sequences or files. Results must not depend on the number of threads,
// so a task may write only to elements with its own index.

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "foremoe/core/debug_mode.h"

namespace foremoe {

// Thrown if work ended early because ThreadPool::cancel() was called.
struct Cancelled : std::exception {
  const char* what() const noexcept override { return "cancelled"; }
};

// The finished and expected parts of a long computation, for a display of progress. Results never depend on them. All
// functions may be called from any thread.
class PartCount {
 public:
  struct Parts {
    std::int64_t done = 0;
    std::int64_t total = 0;  // 0: unknown
  };
  void begin(std::int64_t total) {
    total_ = 0;
    done_ = 0;
    total_ = total;
  }
  void add(std::int64_t parts = 1) { done_.fetch_add(parts, std::memory_order_relaxed); }
  Parts read() const {
    const std::int64_t total = total_;  // before done_: parts of an earlier count never belong to a later total
    return {.done = done_, .total = total};
  }

 private:
  std::atomic<std::int64_t> done_ = 0;
  std::atomic<std::int64_t> total_ = 0;
};

class ThreadPool {
 public:
  // If `num_threads` is 0, the pool has one thread per processor. If it is 1, the caller runs all tasks. Throws
  // std::system_error if the system has no more threads.
  explicit ThreadPool(std::size_t num_threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t num_threads() const { return workers_.size() + 1; }
  PartCount& parts() { return parts_; }  // of the computation that uses the pool; not all computations count

  // Calls task(i, worker) for each i in [0, n) and returns when all are done; worker < num_threads() identifies the
  // scratch memory to use. Not reentrant: one call at a time. If a task throws, other tasks may not run; the exception
  // of the lowest i that threw is rethrown. Throws Cancelled if the pool was cancelled and no task threw.
  void for_each_index(std::size_t n, const std::function<void(std::size_t i, std::size_t worker)>& task);

  // Permanently cancels the pool; may be called from any thread. No further task begins, and calls that wait for tasks
  // throw Cancelled after the running tasks are done.
  void cancel() { cancelled_ = true; }
  void throw_if_cancelled() const;  // throws Cancelled if the pool was cancelled; for long work outside of tasks

 private:
  struct Batch;
  void work(std::size_t worker);
  void stop();
  void drain(Batch& batch, std::size_t worker);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  Batch* batch_ = nullptr;      // guarded by mutex_
  std::size_t generation_ = 0;  // guarded by mutex_; one per call
  std::size_t active_ = 0;      // guarded by mutex_; workers inside drain()
  bool stopping_ = false;       // guarded by mutex_
  std::atomic<bool> cancelled_ = false;
  PartCount parts_;
  std::vector<std::jthread> workers_;
};

}  // namespace foremoe

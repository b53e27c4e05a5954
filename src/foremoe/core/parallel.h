#pragma once

// A pool of std::jthread on which layers, sequences or files are processed. Results must not depend on the
// number of threads: a task writes only what is indexed by its own number.

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace foremoe {

// Work was given up because somebody called ThreadPool::cancel().
struct Cancelled : std::exception {
  const char* what() const noexcept override { return "cancelled"; }
};

class ThreadPool {
 public:
  // 0 takes the number of processors. One thread runs everything on the caller. Throws std::system_error when the
  // system has no more threads.
  explicit ThreadPool(std::size_t num_threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t num_threads() const { return workers_.size() + 1; }

  // Calls task(i, worker) for each i in [0, n); worker < num_threads() names the scratch memory to use.
  // Returns when all are done. Rethrows the exception of the lowest i that threw; then other i may not have run.
  // One call at a time: not reentrant.
  // Throws Cancelled when the pool was cancelled and no task threw.
  void for_each_index(std::size_t n, const std::function<void(std::size_t i, std::size_t worker)>& task);

  // From any thread, for good: no further task begins, and whoever waits for tasks gets Cancelled when those that run
  // are done.
  void cancel() { cancelled_ = true; }
  void expect_going_on() const;  // for long work outside of tasks: throws Cancelled when the pool was cancelled

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
  std::vector<std::jthread> workers_;
};

}  // namespace foremoe

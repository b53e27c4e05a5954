#include "foremoe/core/parallel.h"

#include <algorithm>

namespace foremoe {

struct ThreadPool::Batch {
  std::size_t size;
  const std::function<void(std::size_t, std::size_t)>* task;
  std::atomic<std::size_t> next{0};
  std::mutex error_mutex;
  std::exception_ptr error{};
  std::size_t error_index = 0;
};

ThreadPool::ThreadPool(std::size_t num_threads) {
  if (num_threads == 0) num_threads = std::max(1U, std::thread::hardware_concurrency());
  try {
    for (std::size_t w = 1; w < num_threads; ++w) workers_.emplace_back([this, w] { work(w); });
  } catch (...) {  // the destructor does not run, and started threads would wait forever
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
}

void ThreadPool::drain(Batch& batch, std::size_t worker) {
  for (std::size_t i = batch.next++; i < batch.size && !cancelled_; i = batch.next++) {
    try {
      (*batch.task)(i, worker);
    } catch (...) {
      const std::scoped_lock lock(batch.error_mutex);
      if (!batch.error || i < batch.error_index) {
        batch.error = std::current_exception();
        batch.error_index = i;
      }
      batch.next = batch.size;
    }
  }
}

void ThreadPool::work(std::size_t worker) {
  std::size_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stopping_ || (batch_ != nullptr && generation_ != seen); });
    if (stopping_) return;
    seen = generation_;
    Batch& batch = *batch_;
    ++active_;
    lock.unlock();
    drain(batch, worker);
    lock.lock();
    if (--active_ == 0) done_.notify_all();
  }
}

void ThreadPool::for_each_index(std::size_t n, const std::function<void(std::size_t, std::size_t)>& task) {
  Batch batch{.size = n, .task = &task};
  {
    const std::scoped_lock lock(mutex_);
    batch_ = &batch;
    ++generation_;
  }
  wake_.notify_all();
  drain(batch, 0);
  {
    std::unique_lock lock(mutex_);
    batch_ = nullptr;  // no further worker enters this batch
    done_.wait(lock, [&] { return active_ == 0; });
  }
  if (batch.error) std::rethrow_exception(batch.error);
  throw_if_cancelled();
}

void ThreadPool::throw_if_cancelled() const {
  if (cancelled_) throw Cancelled();
}

}  // namespace foremoe

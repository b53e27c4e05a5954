#pragma once

// A device of tests whose stream does its work later, on a thread of its own, after a delay drawn from a seed: as a GPU
// does, in host memory. What reads too early or overwrites too soon then differs, and is a race under tsan. It copies
// and adds; nothing else is asked of it.

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>

#include "foremoe/runtime/device.h"

namespace foremoe {

class LateStream final : public Stream {
 public:
  explicit LateStream(unsigned seed) : random_(seed), worker_([this] { work(); }) {}
  ~LateStream() override {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    worker_.join();
  }

  void enqueue(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
      ++enqueued_;
    }
    changed_.notify_all();
  }
  Event record() override {
    const std::lock_guard lock(mutex_);
    return {this, enqueued_};
  }
  void wait(const Event& event) override {
    if (event.stream == nullptr) return;
    enqueue([event] { static_cast<LateStream*>(event.stream)->await(event.number); });
  }
  bool done(const Event& event) const override {
    const std::lock_guard lock(mutex_);
    return done_ >= event.number;
  }
  void synchronize() override { await(record().number); }

 private:
  void await(std::uint64_t number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= number; });
  }
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ended_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds{random_() % 200});
      task();
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::uint64_t enqueued_ = 0;
  std::uint64_t done_ = 0;
  bool ended_ = false;
  std::minstd_rand random_;
  std::thread worker_;  // last: it uses all of the above
};

class LateDevice final : public Device {
 public:
  explicit LateDevice(unsigned seed) : stream_(seed) {}

  std::string name() const override { return "late"; }
  LateStream& stream() override { return stream_; }
  bool is_host_memory() const override { return false; }
  DeviceMemory allocate(Bytes bytes) override {
    const auto memory =
        std::make_shared<std::vector<double>>(static_cast<std::size_t>(bytes.value) / sizeof(double) + 1);
    return {reinterpret_cast<std::byte*>(memory->data()), bytes, memory};
  }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    stream_.enqueue([=] { std::memcpy(to, from, bytes); });
  }
  void add(float* to, const float* from, std::int64_t n) override {
    stream_.enqueue([=] {
      for (std::int64_t i = 0; i < n; ++i) to[i] += from[i];
    });
  }

  using Rows = std::span<const std::int32_t>;
  using Experts = std::span<const ExpertRows>;
  void upload(std::byte*, std::span<const std::byte>) override { refuse(); }
  void download(std::span<std::byte>, const std::byte*) override { refuse(); }
  void zero(std::byte*, std::size_t) override { refuse(); }
  void gather_rows(float*, const float*, Rows, int) override { refuse(); }
  void scatter_rows(float*, const float*, Rows, int) override { refuse(); }
  void combine(float*, const float*, const float*, Rows, int, int) override { refuse(); }
  void combine_backward(float*, float*, const float*, const float*, const float*, Rows, int, int) override { refuse(); }
  void add_rows(float*, const float*, Rows, int, int) override { refuse(); }
  void experts_forward(Experts, ExpertShape, const float*, float*, float*) override { refuse(); }
  void experts_backward(Experts, ExpertShape, const float*, const float*, const float*, float*) override { refuse(); }
  void reserve_rows(std::int64_t, ExpertShape) override { refuse(); }
  void use_position_independent_rows(bool) override { refuse(); }
  void router_forward(const float*, const float*, Rows, int, int, float*) override { refuse(); }
  void router_backward(const float*, const float*, Rows, int, int, const float*, const float*, float*,
                       float*) override {
    refuse();
  }
  void router_pick(const float*, const float*, int, Rows, int, int, std::span<std::int32_t>) override { refuse(); }
  void sgd(float*, const float*, std::int64_t, float) override { refuse(); }
  void adam(float*, const float*, float*, float*, std::int64_t, const Adam&) override { refuse(); }
  double squared_error(const float*, const float*, std::int64_t, float, float*) override { refuse(); }
  std::unique_ptr<CopyLink> make_copy_link() override { refuse(); }
  void pin(std::span<const std::byte>) override { refuse(); }
  void unpin(std::span<const std::byte>) override { refuse(); }

 private:
  [[noreturn]] static void refuse() { throw std::logic_error("a late device copies and adds"); }

  LateStream stream_;
};

}  // namespace foremoe

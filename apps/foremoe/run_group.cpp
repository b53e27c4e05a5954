#include "run_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <future>
#include <optional>

#include "console.h"
#include "foremoe/core/error.h"
#include "foremoe/runtime/process_group.h"
#include "foremoe/runtime/threads/threads_communicator.h"

namespace foremoe::cli {
namespace {

class Threads final : public RankGroup {
 public:
  explicit Threads(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  bool has_first() const override { return true; }
  int num_ranks() const override { return 0; }
  bool one_process() const override { return true; }
  void prepare(const std::function<void()>& f) override { f(); }
  void set_topology(const Topology& topology) override { topology_ = topology; }
  void run_at_first(const std::function<void()>& f) override { f(); }

  void run(const Execute& f) override {
    const auto communicators = make_threads_communicators(topology_, timeout_);
    run_ranks(topology_.num_ranks, [&](RankId rank) {
      Communicator& communicator = *communicators[rank.index()];
      try {
        f(communicator);
      } catch (const std::exception& error) {
        communicator.give_up(error.what());
        throw;
      }
    });
  }

 private:
  std::chrono::milliseconds timeout_;
  Topology topology_;
};

class Processes final : public RankGroup {
 public:
  explicit Processes(std::chrono::milliseconds timeout) : timeout_(timeout), processes_(join_process_group()) {}

  bool has_first() const override { return processes_->rank() == RankId{0}; }
  int num_ranks() const override { return processes_->num_ranks(); }
  bool one_process() const override { return false; }

  void prepare(const std::function<void()>& f) override {
    std::string error;
    std::exception_ptr mine;
    try {
      f();
    } catch (const std::bad_alloc&) {
      error = "not enough memory for an input of this size";
      mine = std::current_exception();
    } catch (const std::exception& e) {
      error = e.what();
      mine = std::current_exception();
    }
    const int n = num_ranks();
    const auto communicator = processes_->make_communicator({.num_ranks = n, .ranks_per_node = n}, timeout_);
    const std::int64_t failed = sum(*communicator, std::int64_t{error.empty() ? 0 : 1});
    const auto all = gather(*communicator, std::as_bytes(std::span(error)));
    if (failed == 0) return;
    if (!has_first()) throw ToldElsewhere(error);
    if (mine) std::rethrow_exception(mine);
    const auto told = std::ranges::find_if(all, [](const auto& bytes) { return !bytes.empty(); });
    const std::string text(reinterpret_cast<const char*>(told->data()), told->size());
    const auto rank = told - all.begin();
    throw InputError({}, fmt::format("on rank {}: {}", rank, text));
  }

  void set_topology(const Topology& topology) override {
    communicator_ = processes_->make_communicator(topology, timeout_);
  }

  void run(const Execute& f) override {
    try {
      f(*communicator_);
    } catch (const std::exception& error) {
      end_job(error.what());
      throw;
    }
  }

  void run_at_first(const std::function<void()>& f) override {
    run([&](Communicator& communicator) {
      std::future<void> work;
      if (has_first()) work = std::async(std::launch::async, f);
      for (std::byte done{0}; done == std::byte{0};) {
        if (work.valid() && work.wait_for(std::chrono::milliseconds(50)) == std::future_status::ready) {
          done = std::byte{1};
        }
        communicator.broadcast(std::span(&done, 1), RankId{0});
      }
      if (work.valid()) work.get();
    });
  }

 private:
  // There is no other way to end a peer: told first, for giving up does not return.
  void end_job(const std::string& why) {
    fmt::print(stderr, "foremoe run: rank {}: {}\n", processes_->rank().value, printable(why));
    std::fflush(nullptr);
    communicator_->give_up(why);
  }

  std::chrono::milliseconds timeout_;
  std::unique_ptr<ProcessGroup> processes_;
  std::unique_ptr<Communicator> communicator_;  // gone before its processes
};

}  // namespace

int launched_processes() {
  for (const char* const name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"}) {
    const char* const value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nobody sets the environment here
    if (value != nullptr) return std::atoi(value);
  }
  return 1;
}

std::unique_ptr<RankGroup> make_rank_group(Comm comm, std::chrono::milliseconds timeout) {
  if (comm == Comm::kMpi) return std::make_unique<Processes>(timeout);
  return std::make_unique<Threads>(timeout);
}

}  // namespace foremoe::cli

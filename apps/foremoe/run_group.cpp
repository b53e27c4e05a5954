#include "run_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <future>

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
  std::optional<Difference> difference(const Facts&) override { return {}; }
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
  explicit Processes(std::chrono::milliseconds timeout) : timeout_(timeout), processes_(join_process_group()) {
    const int n = num_ranks();
    everybody_ = meet({.num_ranks = n, .ranks_per_node = n});
  }

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
    std::int64_t failed = 0;
    std::vector<std::vector<std::byte>> all;
    or_end_job([&] {
      failed = sum(*everybody_, std::int64_t{error.empty() ? 0 : 1});
      all = gather(*everybody_, std::as_bytes(std::span(error)));
    });
    if (failed == 0) return;
    if (!has_first()) throw ReportedElsewhere(error);
    if (mine) std::rethrow_exception(mine);
    const auto told = std::ranges::find_if(all, [](const auto& bytes) { return !bytes.empty(); });
    const std::string text(reinterpret_cast<const char*>(told->data()), told->size());
    const auto rank = told - all.begin();
    throw InputError({}, fmt::format("on rank {}: {}", rank, text));
  }

  std::optional<Difference> difference(const Facts& facts) override {
    std::optional<Difference> difference;
    std::byte differs{0};
    or_end_job([&] {
      const std::string mine = to_bytes(facts);
      std::vector<Facts> by_rank;
      for (const auto& bytes : gather(*everybody_, std::as_bytes(std::span(mine))))
        by_rank.push_back(facts_from(bytes));
      difference = first_difference(by_rank);
      differs = std::byte{difference.has_value()};
      everybody_->broadcast(std::span(&differs, 1), RankId{0});
    });
    if (differs != std::byte{0} && !has_first()) throw ReportedElsewhere("the processes differ");
    return difference;
  }

  void set_topology(const Topology& topology) override { communicator_ = meet(topology); }

  void run(const Execute& f) override {
    or_end_job([&] { f(*communicator_); });
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
  std::unique_ptr<Communicator> meet(const Topology& topology) {
    std::unique_ptr<Communicator> communicator;
    or_end_job([&] { communicator = processes_->make_communicator(topology, timeout_); });
    return communicator;
  }

  // Runs f. If f throws, prints the exception and gives up (does not return): nothing else can end a peer.
  template <class F>
  void or_end_job(F f) {
    try {
      f();
    } catch (const std::exception& error) {
      fmt::print(stderr, "foremoe run: rank {}: {}\n", processes_->rank().value, printable(error.what()));
      std::fflush(nullptr);
      processes_->give_up();
    }
  }

  std::chrono::milliseconds timeout_;
  std::unique_ptr<ProcessGroup> processes_;
  // Members below are destroyed before `processes_`.
  std::unique_ptr<Communicator> everybody_;  // used by prepare() and difference(), without a topology
  std::unique_ptr<Communicator> communicator_;
};

}  // namespace

void RankGroup::agree(const Facts& facts) {
  if (const auto differs = difference(facts)) throw InputError({.field = differs->name}, differs->who);
}

std::unique_ptr<RankGroup> make_rank_group(Comm comm, std::chrono::milliseconds timeout) {
  if (comm == Comm::kMpi) return std::make_unique<Processes>(timeout);
  return std::make_unique<Threads>(timeout);
}

}  // namespace foremoe::cli

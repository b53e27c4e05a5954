#pragma once

// The ranks of a run: threads of this process, or processes started by an MPI launcher.

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>

#include "agreement.h"
#include "foremoe/runtime/communicator.h"

namespace foremoe::cli {

enum class Comm : std::uint8_t { kThreads, kMpi };

// Thrown on a process that ends because of an error that another process reports.
class ReportedElsewhere : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class RankGroup {
 public:
  using Execute = std::function<void(Communicator& communicator)>;

  virtual ~RankGroup() = default;
  virtual bool has_first() const = 0;  // whether rank 0 is in this process, which has the results and prints
  virtual int num_ranks() const = 0;   // 0: any number
  virtual bool one_process() const = 0;

  // Collective over processes, before ranks exist. If f throws on any process, all processes throw. Rank 0's process
  // rethrows its own exception, or InputError if only others failed. Other processes throw ReportedElsewhere.
  virtual void prepare(const std::function<void()>& f) = 0;
  // Collective over processes. If facts differ, rank 0's process returns the first difference, and other processes
  // throw ReportedElsewhere.
  virtual std::optional<Difference> difference(const Facts& facts) = 0;
  // Like difference(), for facts given by the user. Throws InputError on rank 0's process if the facts differ.
  void agree(const Facts& facts);
  virtual void set_topology(const Topology& topology) = 0;
  // Runs f on every rank of this process. A failure on one rank ends all ranks.
  virtual void run(const Execute& f) = 0;
  // Runs f on rank 0's process while the others wait without a timeout.
  virtual void run_at_first(const std::function<void()>& f) = 0;
};

// Throws InputError if this build has no MPI.
std::unique_ptr<RankGroup> make_rank_group(Comm comm, std::chrono::milliseconds timeout);

}  // namespace foremoe::cli

#pragma once

// The ranks that a run is executed on: threads of this process, or the processes that an MPI launcher started.

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>

#include "agreement.h"
#include "foremoe/runtime/communicator.h"

namespace foremoe::cli {

enum class Comm : std::uint8_t { kThreads, kMpi };

// What ended this process was told by another.
class ToldElsewhere : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class RankGroup {
 public:
  using Execute = std::function<void(Communicator& communicator)>;

  virtual ~RankGroup() = default;
  virtual bool has_first() const = 0;  // is rank 0 here? That is where results are, and who speaks
  virtual int num_ranks() const = 0;   // 0: as many as are asked for
  virtual bool one_process() const = 0;

  // On every process, before there are ranks. When f throws InputError on any, this throws on all: InputError where
  // it is to be told, ToldElsewhere on the others.
  virtual void prepare(const std::function<void()>& f) = 0;
  // On every process: the first of their facts that is not the same, to rank 0; ToldElsewhere is thrown on the others.
  virtual std::optional<Difference> difference(const Facts& facts) = 0;
  // The same, for facts that come from the user: throws InputError at rank 0.
  void agree(const Facts& facts);
  virtual void set_topology(const Topology& topology) = 0;
  // f on every rank of this process. What ends it on one ends it on all.
  virtual void run(const Execute& f) = 0;
  // f where rank 0 is, while all others wait for as long as it takes.
  virtual void run_at_first(const std::function<void()>& f) = 0;
};

// Throws InputError when this build has no MPI.
std::unique_ptr<RankGroup> make_rank_group(Comm comm, std::chrono::milliseconds timeout);

}  // namespace foremoe::cli

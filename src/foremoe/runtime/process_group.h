#pragma once

// The processes of one job, one rank each, as an MPI launcher starts them. Whether this build has MPI is CMake's
// choice (mpi/ or no_mpi/, linked as foremoe::processes); whoever asks needs no MPI header.

#include <chrono>
#include <memory>
#include <string>

#include "foremoe/runtime/communicator.h"

namespace foremoe {

class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;  // collective; no communicator may be left
  virtual RankId rank() const = 0;
  virtual int num_ranks() const = 0;

  // Collective. Throws InputError when the topology is not of as many ranks as there are processes; PeerFailed when not
  // all have called within `timeout`. After PeerFailed the end of this object gives up: without the missing process the
  // others could wait for ever to leave.
  virtual std::unique_ptr<Communicator> make_communicator(const Topology& topology,
                                                          std::chrono::milliseconds timeout) = 0;

  // As a communicator's, where there is none yet.
  [[noreturn]] virtual void give_up() noexcept = 0;
};

// Of processes, to give up ends the job: MPI knows no other way to end a peer in bounded time. It does not return,
// prints nothing of its own, and the launcher's exit status is this. Say why before calling it.
inline constexpr int kGaveUpExitStatus = 3;

bool mpi_is_built();

// Once per process. Throws InputError when this build has no MPI, no launcher started the process, or the MPI installed
// cannot be called by two threads.
std::unique_ptr<ProcessGroup> join_process_group();

}  // namespace foremoe

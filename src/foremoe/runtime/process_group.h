#pragma once

// Processes of one job, one per rank, as started by an MPI launcher. CMake selects MPI support (mpi/ or no_mpi/, linked
// as foremoe::processes), so users of this header do not need MPI headers.

#include <chrono>
#include <memory>
#include <string>

#include "foremoe/runtime/communicator.h"

namespace foremoe {

class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;  // collective; destroy all communicators first
  virtual RankId rank() const = 0;
  virtual int num_ranks() const = 0;

  // Collective. Throws InputError if the topology's number of ranks differs from the number of processes, and
  // PeerFailed if not all processes call within `timeout`. After PeerFailed, the destructor gives up: leaving the job
  // without the missing process could block forever.
  virtual std::unique_ptr<Communicator> make_communicator(const Topology& topology,
                                                          std::chrono::milliseconds timeout) = 0;

  // Like Communicator::give_up(), for use before a communicator exists.
  [[noreturn]] virtual void give_up() noexcept = 0;
};

// Exit status of the launcher after a process gives up. Giving up aborts the job, the only way MPI offers to end a peer
// in bounded time. The call does not return and prints nothing, so log the reason first.
inline constexpr int kGaveUpExitStatus = 3;

bool mpi_is_built();

// Call once per process. Throws InputError if this build has no MPI, no launcher started the process, or the installed
// MPI does not support calls from several threads.
std::unique_ptr<ProcessGroup> join_process_group();

}  // namespace foremoe

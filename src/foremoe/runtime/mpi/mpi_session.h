#pragma once

// Owns MPI from MPI_Init_thread to MPI_Finalize. Provides private communicators that return errors by value, and waits
// that sleep and time out. After MPI_Init_thread, only the end of the session waits for other processes without a
// timeout.

#include <mpi.h>

#include <chrono>

#include "foremoe/core/ids.h"

namespace foremoe {

class MpiSession {
 public:
  MpiSession();   // throws InputError if MPI was already started or lacks MPI_THREAD_MULTIPLE
  ~MpiSession();  // collective
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  RankId rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }

  // Ends all processes of the job with kGaveUpExitStatus. Does not return.
  [[noreturn]] static void end_job() noexcept;

 private:
  RankId rank_;
  int num_ranks_ = 1;
};

// Wait loop with a timeout. Ranks may outnumber cores, so the loop yields a few times, then sleeps.
class BoundedWait {
 public:
  explicit BoundedWait(std::chrono::milliseconds timeout);
  bool pause();  // false once the timeout has passed

 private:
  std::chrono::steady_clock::time_point end_;
  int pauses_ = 0;
};

// Private communicator over all processes.
class MpiGroup {
 public:
  explicit MpiGroup(std::chrono::milliseconds timeout);  // collective; throws PeerFailed
  ~MpiGroup();
  MpiGroup(const MpiGroup&) = delete;
  MpiGroup& operator=(const MpiGroup&) = delete;

  operator MPI_Comm() const { return comm_; }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
};

inline constexpr int kMaxTag = 32'767;  // every MPI supports this

void check_mpi(int code, const char* what);  // throws PeerFailed
bool finished(MPI_Request& request);         // likewise; sets a finished request to MPI_REQUEST_NULL

}  // namespace foremoe

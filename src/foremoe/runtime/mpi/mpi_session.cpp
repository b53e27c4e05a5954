#include "foremoe/runtime/mpi/mpi_session.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <thread>

#include "foremoe/core/error.h"
#include "foremoe/core/launch.h"
#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/process_group.h"

namespace foremoe {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw InputError({.file = "MPI", .field = "", .index = ""}, why); }

}  // namespace

MpiSession::MpiSession() {
  // Without a launcher, MPI would create a group of this process alone, which is never intended.
  if (!launch().joins) refuse("requires a launcher: start one process per rank, e.g. with mpirun -np RANKS");
  int started = 0;
  MPI_Initialized(&started);
  if (started != 0) refuse("was already started: a process can join its group only once");
  int threads = MPI_THREAD_SINGLE;
  check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &threads), "MPI_Init_thread");
  if (threads < MPI_THREAD_MULTIPLE) {
    MPI_Finalize();
    refuse("lacks MPI_THREAD_MULTIPLE, which is required because copies run on a separate thread");
  }
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_.value);
  MPI_Comm_size(MPI_COMM_WORLD, &num_ranks_);
}

MpiSession::~MpiSession() { MPI_Finalize(); }

void MpiSession::end_job() noexcept {
  MPI_Abort(MPI_COMM_WORLD, kGaveUpExitStatus);
  std::_Exit(kGaveUpExitStatus);  // if MPI_Abort() returns
}

BoundedWait::BoundedWait(std::chrono::milliseconds timeout) : end_(std::chrono::steady_clock::now() + timeout) {}

bool BoundedWait::pause() {
  constexpr int kYields = 20;
  constexpr std::chrono::microseconds kLongest{200};
  if (pauses_ < kYields) {
    std::this_thread::yield();
  } else {
    if (std::chrono::steady_clock::now() >= end_) return false;
    std::this_thread::sleep_for(std::min(std::chrono::microseconds{pauses_ - kYields + 1}, kLongest));
  }
  ++pauses_;
  return true;
}

MpiGroup::MpiGroup(std::chrono::milliseconds timeout) {
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Comm_idup(MPI_COMM_WORLD, &comm_, &request), "MPI_Comm_idup");
  BoundedWait patience(timeout);
  while (!finished(request)) {
    if (!patience.pause())
      throw PeerFailed(fmt::format("waited {} ms for all processes to communicate", timeout.count()));
  }
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
}

MpiGroup::~MpiGroup() { MPI_Comm_free(&comm_); }

void check_mpi(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  std::string text(MPI_MAX_ERROR_STRING, '\0');
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  text.resize(static_cast<std::size_t>(length));
  throw PeerFailed(fmt::format("{}: {}", what, text));
}

bool finished(MPI_Request& request) {
  if (request == MPI_REQUEST_NULL) return true;
  int done = 0;
  check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
  return done != 0;
}

}  // namespace foremoe

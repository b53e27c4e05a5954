#pragma once

// MPI session of this test program, since MPI can be started only once per process.

#include <optional>

#include "foremoe/runtime/mpi/mpi_session.h"

namespace foremoe {

inline std::optional<MpiSession>& world_session() {
  static std::optional<MpiSession> session;
  return session;
}

inline MpiSession& world() {
  if (!world_session()) world_session().emplace();
  return *world_session();
}

inline void leave_world() { world_session().reset(); }

}  // namespace foremoe

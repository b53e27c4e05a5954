#pragma once

// CPU time of the calling thread, for figures that must not depend on what else the machine does.

#include <ctime>

namespace foremoe {

inline double thread_cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

}  // namespace foremoe

#pragma once

// For death tests: what happens to a process whose address space is full.

#include <sys/resource.h>

namespace foremoe::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;  // a sanitizer needs address space of its own
#else
inline constexpr bool kSanitized = false;
#endif

inline void forbid_more_address_space() {
  rlimit least{};
  getrlimit(RLIMIT_AS, &least);
  least.rlim_cur = 1;
  setrlimit(RLIMIT_AS, &least);
}

}  // namespace foremoe::test

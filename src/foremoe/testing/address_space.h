#pragma once

// Lets a test forbid its process to allocate more address space.

#include <sys/resource.h>

namespace foremoe::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;  // sanitizers need address space of their own
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

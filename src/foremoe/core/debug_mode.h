#pragma once

// Keeps programs from being linked with a library of another container layout.
//
// With _GLIBCXX_DEBUG the containers of libstdc++ have other members. A program with it and a library without it would
// damage each other's heap. Headers that pass containers include this one, and the linker then misses a symbol that
// names the reason.

namespace foremoe {

#ifdef _GLIBCXX_DEBUG
extern const char this_library_was_not_compiled_with_GLIBCXX_DEBUG;
[[gnu::used]] inline const char* const kSameContainers = &this_library_was_not_compiled_with_GLIBCXX_DEBUG;
#else
extern const char this_library_was_compiled_with_GLIBCXX_DEBUG;
[[gnu::used]] inline const char* const kSameContainers = &this_library_was_compiled_with_GLIBCXX_DEBUG;
#endif

}  // namespace foremoe

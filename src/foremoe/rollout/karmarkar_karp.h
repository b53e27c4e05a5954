#pragma once

// Splitting numbers into k parts of nearly equal sums.
//
// Method: the largest differencing method for k parts (Karmarkar and Karp 1982). Every number starts as a tuple of
// k parts, all empty but one. The two tuples of largest spread (largest minus smallest part) are merged, the largest
// part of one with the smallest of the other, until one tuple is left. A heuristic: no bound on the largest part is
// promised; in practice the spread shrinks like n^(−c·log n), far below that of greedy placement.
//
// Empty parts are not stored, so n numbers need memory for n parts; time is O(n · (log n + k log k)).
// Ties go to the tuple, or part, with the lowest item, so the result is a function of the sizes alone.

#include <cstdint>
#include <span>
#include <vector>

namespace foremoe {

// The part of each item. Parts are numbered by their lowest item; with fewer items than parts the last are empty.
std::vector<int> karmarkar_karp(std::span<const std::int64_t> sizes, int num_parts);

}  // namespace foremoe

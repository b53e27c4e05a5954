#include "foremoe/rollout/karmarkar_karp.h"

#include <algorithm>
#include <cassert>
#include <numeric>
#include <queue>
#include <utility>

namespace foremoe {

namespace {

constexpr int kNone = -1;

// A part is a list of items, linked through `next`.
struct Part {
  std::int64_t size = 0;
  int first = kNone;
  int last = kNone;
  int lowest = kNone;  // item, for ties

  friend bool operator<(const Part& a, const Part& b) {  // larger parts first
    return a.size != b.size ? a.size > b.size : a.lowest < b.lowest;
  }
};

struct Tuple {
  std::vector<Part> parts;  // larger first; the other num_parts − parts.size() are empty
  std::int64_t spread = 0;
  int lowest = kNone;  // item
};

struct LessUrgent {
  bool operator()(const Tuple& a, const Tuple& b) const {
    return a.spread != b.spread ? a.spread < b.spread : a.lowest > b.lowest;
  }
};

// Part i of a, counted from the largest, meets part i of b, counted from the smallest.
Tuple merge(Tuple a, Tuple b, std::size_t num_parts, std::vector<int>& next) {
  if (a.parts.size() < b.parts.size()) std::swap(a.parts, b.parts);
  for (std::size_t j = 0; j < b.parts.size(); ++j) {
    const std::size_t i = num_parts - 1 - j;
    if (i >= a.parts.size()) {
      a.parts.push_back(b.parts[j]);
      continue;
    }
    Part& to = a.parts[i];
    const Part& from = b.parts[j];
    next[static_cast<std::size_t>(to.last)] = from.first;
    to = {
        .size = to.size + from.size, .first = to.first, .last = from.last, .lowest = std::min(to.lowest, from.lowest)};
  }
  std::ranges::sort(a.parts, std::less<>{});
  a.spread = a.parts.front().size - (a.parts.size() < num_parts ? 0 : a.parts.back().size);
  a.lowest = std::min(a.lowest, b.lowest);
  return a;
}

}  // namespace

std::vector<int> karmarkar_karp(std::span<const std::int64_t> sizes, int num_parts) {
  assert(num_parts >= 1);
  std::vector<int> part_of(sizes.size());
  if (sizes.empty() || num_parts == 1) return part_of;
  const auto k = static_cast<std::size_t>(num_parts);
  std::vector<int> next(sizes.size(), kNone);
  std::vector<Tuple> heap;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const int item = static_cast<int>(i);
    heap.push_back({.parts = {{.size = sizes[i], .first = item, .last = item, .lowest = item}},
                    .spread = sizes[i],
                    .lowest = item});
  }
  std::ranges::make_heap(heap, LessUrgent{});
  const auto pop = [&] {
    std::ranges::pop_heap(heap, LessUrgent{});
    Tuple top = std::move(heap.back());
    heap.pop_back();
    return top;
  };
  while (heap.size() > 1) {
    Tuple first = pop();
    heap.push_back(merge(std::move(first), pop(), k, next));
    std::ranges::push_heap(heap, LessUrgent{});
  }
  std::vector<Part>& parts = heap.front().parts;
  std::ranges::sort(parts, {}, &Part::lowest);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    for (int item = parts[p].first; item != kNone; item = next[static_cast<std::size_t>(item)]) {
      part_of[static_cast<std::size_t>(item)] = static_cast<int>(p);
    }
  }
  return part_of;
}

}  // namespace foremoe

#pragma once

// The votes of ranks that are threads of one process. Each rank counts what it has cast; a refusal is written down
// before it is counted, so whoever sees a count sees the refusals in it. Refusals are rare: without one nothing is
// locked.

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "foremoe/core/ids.h"

namespace foremoe {

class BallotBox {
 public:
  explicit BallotBox(int num_ranks);

  void cast(RankId rank, std::uint64_t number, bool ok);
  std::optional<bool> outcome(std::uint64_t number) const;

 private:
  struct alignas(64) Count {  // a cache line each: ranks count at the same time
    std::atomic<std::uint64_t> cast{0};
  };

  int num_ranks_;
  std::unique_ptr<Count[]> counts_;  // [rank]
  std::atomic<bool> any_refused_{false};
  mutable std::mutex mutex_;
  std::set<std::uint64_t> refused_;  // guarded by mutex_
};

}  // namespace foremoe

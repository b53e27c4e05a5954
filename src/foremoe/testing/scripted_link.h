#pragma once

// A pair of ranks with one copy, and links whose results are scripted by the test.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "foremoe/testing/transfer_cluster.h"

namespace foremoe::test {

inline ScheduledCopy one_copy(Path path = Path::kHost) {
  return {.rank = RankId{0},
          .layer = LayerId{0},
          .expert = ExpertId{3},
          .slot = SlotId{2},
          .buffer = 0,
          .path = path,
          .source = RankId{1}};
}

// Two ranks with two experts each. Only rank 0 receives. The test performs the actions of rank 1.
inline constexpr ClusterShape kPair{.ranks = 2, .ranks_per_node = 2, .micro_steps = 3, .experts = 4};

inline Cluster pair_with(std::vector<ScheduledCopy> copies, bool everything = true) {
  return Cluster(kPair, complete(kPair, std::move(copies), everything));
}

// Casts the votes of the other rank, which always agrees.
inline void agree(Cluster& cluster) {
  for (std::uint64_t n = 0; n < 100; ++n) cluster.ballot().cast(n, true);
}

// Log of the events on a link, shared with the test.
struct LinkLog {
  std::mutex mutex;
  std::vector<CopyRequest> requests;
  std::vector<std::size_t> bytes;
  int cancelled = 0;

  std::size_t num_requests() {
    const std::lock_guard lock(mutex);
    return requests.size();
  }
  void await(std::size_t n) {
    while (num_requests() < n) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
};

// Answers requests in order from the script, and further requests with kDone. Copies only if the answer is kDone.
class ScriptedLink final : public CopyLink {
 public:
  ScriptedLink(LinkLog& log, std::deque<CopyState> answers) : log_(log), answers_(std::move(answers)) {}

  void submit(const CopyRequest& request) override {
    const std::lock_guard lock(log_.mutex);
    log_.requests.push_back(request);
    log_.bytes.push_back(0);
    for (const Chunk& chunk : request.chunks) log_.bytes.back() += chunk.bytes;
    CopyState answer = CopyState::kDone;
    if (!answers_.empty()) {
      answer = answers_.front();
      answers_.pop_front();
    }
    answer_of_.emplace_back(request.id, answer);
    if (answer != CopyState::kDone) return;
    for (const Chunk& chunk : request.chunks) {
      if (chunk.from != nullptr) std::memcpy(chunk.to, chunk.from, chunk.bytes);
    }
  }
  CopyState poll(CopyId id) override {
    return std::ranges::find(answer_of_, id, [](const auto& a) { return a.first; })->second;
  }
  void cancel(CopyId) override {
    const std::lock_guard lock(log_.mutex);
    ++log_.cancelled;
  }
  void progress() override {}

 private:
  LinkLog& log_;
  std::deque<CopyState> answers_;
  std::vector<std::pair<CopyId, CopyState>> answer_of_;
};

inline std::unique_ptr<CopyLink> scripted(LinkLog& log, std::deque<CopyState> answers = {}) {
  return std::make_unique<ScriptedLink>(log, std::move(answers));
}

}  // namespace foremoe::test

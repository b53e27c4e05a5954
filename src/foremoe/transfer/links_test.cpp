// Tests links that copy within host memory, and decorators of other links.

#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "foremoe/testing/faulty_link.h"
#include "foremoe/transfer/checksum.h"
#include "foremoe/transfer/copy_link.h"

namespace foremoe {
namespace {

using namespace std::chrono_literals;
using test::Faults;
using test::FaultyLink;

// A copy of two chunks.
struct Pair {
  explicit Pair(int number = 0) : id(number) {
    for (std::size_t i = 0; i < 100; ++i) from[i] = static_cast<std::byte>(number + static_cast<int>(i) + 1);
    chunks[0] = {.from = from.data(), .to = to.data(), .bytes = 30};
    chunks[1] = {.from = from.data() + 30, .to = to.data() + 30, .bytes = 70};
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;
  CopyRequest request() const { return {.id = id, .chunks = chunks}; }
  bool there() const { return from == to; }
  bool untouched() const { return to == std::array<std::byte, 100>{}; }

  CopyId id;
  std::array<std::byte, 100> from{};
  std::array<std::byte, 100> to{};
  std::array<Chunk, 2> chunks;
};

TEST(MemcpyLink, CopiesAndComputesRequestedChecksums) {
  MemcpyLink link;
  Pair copy;
  std::uint64_t sum = 0;
  copy.chunks[1].checksum = &sum;
  link.submit(copy.request());
  EXPECT_EQ(link.poll(copy.id), CopyState::kDone);
  EXPECT_TRUE(copy.there());
  EXPECT_EQ(sum, checksum(std::span(copy.from).subspan(30)));
}

struct Time {
  ThrottledLink::Clock::time_point now{1000s};
  auto clock() {
    return [this] { return now; };
  }
};

TEST(ThrottledLink, CopiesTakeTheirTimeOneAfterTheOther) {
  Time time;
  ThrottledLink link(std::make_unique<MemcpyLink>(), 1000, time.clock());  // a pair takes 100 ms
  Pair first(0);
  Pair second(1);
  link.submit(first.request());
  time.now += 50ms;
  link.submit(second.request());  // begins when the first copy is complete
  time.now += 49ms;
  EXPECT_EQ(link.poll(first.id), CopyState::kUnderWay);
  time.now += 1ms;
  EXPECT_EQ(link.poll(first.id), CopyState::kDone);
  time.now += 99ms;
  EXPECT_EQ(link.poll(second.id), CopyState::kUnderWay);
  time.now += 1ms;
  EXPECT_EQ(link.poll(second.id), CopyState::kDone);
  EXPECT_TRUE(first.there() && second.there());
}

TEST(ThrottledLink, AnIdleLinkAccumulatesNoCredit) {
  Time time;
  ThrottledLink link(std::make_unique<MemcpyLink>(), 1000, time.clock());
  time.now += 10s;
  Pair copy;
  link.submit(copy.request());
  time.now += 99ms;
  EXPECT_EQ(link.poll(copy.id), CopyState::kUnderWay);
  time.now += 1ms;
  EXPECT_EQ(link.poll(copy.id), CopyState::kDone);
}

TEST(ThrottledLink, LinksDoNotSlowEachOther) {
  Time time;
  ThrottledLink one(std::make_unique<MemcpyLink>(), 1000, time.clock());
  ThrottledLink other(std::make_unique<MemcpyLink>(), 1000, time.clock());
  Pair first(0);
  Pair second(1);
  one.submit(first.request());
  other.submit(second.request());
  time.now += 100ms;
  EXPECT_EQ(one.poll(first.id), CopyState::kDone);
  EXPECT_EQ(other.poll(second.id), CopyState::kDone);
}

TEST(ThrottledLink, ReportsAFailureAtOnceAndForwardsCancel) {
  Time time;
  ThrottledLink link(std::make_unique<FaultyLink>(std::make_unique<MemcpyLink>(), Faults{.fail = 1}, 0), 1000,
                     time.clock());
  Pair copy;
  link.submit(copy.request());
  EXPECT_EQ(link.poll(copy.id), CopyState::kFailed);

  // The inner link delays the copy; after cancel() it never begins.
  ThrottledLink held(std::make_unique<FaultyLink>(std::make_unique<MemcpyLink>(), Faults{.delay = 1}, 0), 1000,
                     time.clock());
  Pair cancelled;
  held.submit(cancelled.request());
  held.cancel(cancelled.id);
  time.now += 1s;
  held.progress();
  EXPECT_TRUE(cancelled.untouched());
}

constexpr int kPolls = 100;

// The final state of a copy, or kUnderWay if it never ends.
CopyState end_of(CopyLink& link, CopyId id) {
  CopyState state = CopyState::kUnderWay;
  for (int i = 0; i < kPolls && state == CopyState::kUnderWay; ++i) state = link.poll(id);
  return state;
}

TEST(FaultyLink, WithoutFaultsBehavesLikeTheInnerLink) {
  FaultyLink link(std::make_unique<MemcpyLink>(), {}, 0);
  Pair copy;
  link.submit(copy.request());
  EXPECT_EQ(link.poll(copy.id), CopyState::kDone);
  EXPECT_TRUE(copy.there());
}

TEST(FaultyLink, DelaysDependOnTheSeed) {
  const auto polls = [](std::uint64_t seed) {
    FaultyLink link(std::make_unique<MemcpyLink>(), {.delay = 1}, seed);
    Pair copy;
    link.submit(copy.request());
    EXPECT_TRUE(copy.untouched());
    int n = 1;
    while (link.poll(copy.id) == CopyState::kUnderWay) ++n;
    EXPECT_TRUE(copy.there());
    return n;
  };
  std::set<int> seen;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    seen.insert(polls(seed));
    EXPECT_EQ(polls(seed), polls(seed));
  }
  EXPECT_GT(seen.size(), 5U);
}

TEST(FaultyLink, LetsTheNextCopyOvertake) {
  FaultyLink link(std::make_unique<MemcpyLink>(), {.reorder = 1, .most_polls = 10}, 0);
  Pair first(0);
  Pair second(1);
  link.submit(first.request());
  EXPECT_TRUE(first.untouched());
  link.submit(second.request());
  EXPECT_TRUE(first.there());
  EXPECT_TRUE(second.untouched()) << "held back for the next in turn";
  EXPECT_EQ(end_of(link, second.id), CopyState::kDone);
  EXPECT_TRUE(second.there());
}

TEST(FaultyLink, DroppedCopiesNeverEndWithOrWithoutTheBytes) {
  int copied = 0;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    FaultyLink link(std::make_unique<MemcpyLink>(), {.drop = 1}, seed);
    Pair copy;
    link.submit(copy.request());
    EXPECT_EQ(end_of(link, copy.id), CopyState::kUnderWay);
    link.cancel(copy.id);
    copied += copy.there() ? 1 : 0;
  }
  EXPECT_GT(copied, 5);
  EXPECT_LT(copied, 45);
}

TEST(FaultyLink, FailsBeforeOrAfterTheBytesArrive) {
  int copied = 0;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    FaultyLink link(std::make_unique<MemcpyLink>(), {.fail = 1}, seed);
    Pair copy;
    link.submit(copy.request());
    EXPECT_EQ(end_of(link, copy.id), CopyState::kFailed);
    copied += copy.there() ? 1 : 0;
  }
  EXPECT_GT(copied, 5);
  EXPECT_LT(copied, 45);
}

TEST(FaultyLink, CorruptedChunksHaveNoChecksumFromTheLink) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    FaultyLink link(std::make_unique<MemcpyLink>(), {.corrupt = 1}, seed);
    Pair copy;
    std::array<std::uint64_t, 2> sums{};
    for (std::size_t i = 0; i < 2; ++i) copy.chunks[i].checksum = &sums[i];
    link.submit(copy.request());
    EXPECT_EQ(end_of(link, copy.id), CopyState::kDone);
    EXPECT_FALSE(copy.there());
    EXPECT_TRUE(sums[0] == 0 || sums[1] == 0) << "else the damage would not be seen";
  }
}

TEST(FaultyLink, ACancelledCopyWritesNoMore) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    FaultyLink link(std::make_unique<MemcpyLink>(), {.delay = 1, .reorder = 0.5, .corrupt = 0.5}, seed);
    Pair copy(0);
    Pair next(1);
    link.submit(copy.request());
    link.cancel(copy.id);
    link.submit(next.request());
    link.progress();
    end_of(link, next.id);
    EXPECT_TRUE(copy.untouched());
  }
}

}  // namespace
}  // namespace foremoe

#include "foremoe/transfer/host_arena.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

const std::vector<ArenaExpert> kExperts = {
    {LayerId{0}, ExpertId{5}}, {LayerId{2}, ExpertId{0}}, {LayerId{2}, ExpertId{7}}};

ExpertLayout two_segments() { return ExpertLayout({{.name = "a", .elements = 33}, {.name = "b", .elements = 5}}); }

struct Weights {
  explicit Weights(float value) : a(33, value), b(5, -value) {}
  std::vector<float> a, b;
  std::vector<const std::byte*> segments() const {
    return {reinterpret_cast<const std::byte*>(a.data()), reinterpret_cast<const std::byte*>(b.data())};
  }
};

TEST(HostArena, ContainsExactlyTheGivenExperts) {
  const HostArena arena = HostArena::create(kExperts, two_segments());
  EXPECT_EQ(arena.num_experts(), 3U);
  EXPECT_EQ(arena.index_of({LayerId{2}, ExpertId{0}}), 1);
  EXPECT_EQ(arena.index_of({LayerId{2}, ExpertId{5}}), -1);
  EXPECT_EQ(arena.index_of({LayerId{3}, ExpertId{0}}), -1);
  const std::int64_t experts = 3 * two_segments().bytes().value;
  EXPECT_GE(arena.bytes().value, experts);
  EXPECT_LE(arena.bytes().value, experts + 4 * 64) << "header and entries";
}

TEST(HostArena, AReaderSeesPublishedExperts) {
  HostArena arena = HostArena::create(kExperts, two_segments());
  const HostArena reader = HostArena::open(arena.name(), kExperts, two_segments());
  EXPECT_EQ(reader.version(1), 0U);
  const Weights weights(1.5F);
  arena.publish(1, 7, weights.segments());
  EXPECT_EQ(reader.version(0), 0U);
  EXPECT_EQ(reader.version(1), 7U);
  EXPECT_EQ(reader.version(2), 0U);
  EXPECT_EQ(std::memcmp(reader.segment(1, 0), weights.a.data(), 33 * 4), 0);
  EXPECT_EQ(std::memcmp(reader.segment(1, 1), weights.b.data(), 5 * 4), 0);
  EXPECT_EQ(reader.checksum(1, 0), checksum(std::as_bytes(std::span(weights.a))));
  EXPECT_EQ(reader.checksum(1, 1), checksum(std::as_bytes(std::span(weights.b))));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(reader.segment(1, 0)) % 64, 0U);
}

TEST(HostArena, ExpertsDoNotOverlap) {
  HostArena arena = HostArena::create(kExperts, two_segments());
  for (int i = 0; i < 3; ++i) arena.publish(i, 1, Weights(static_cast<float>(i + 1)).segments());
  for (int i = 0; i < 3; ++i) {
    const Weights weights(static_cast<float>(i + 1));
    EXPECT_EQ(std::memcmp(arena.segment(i, 0), weights.a.data(), 33 * 4), 0);
    EXPECT_EQ(std::memcmp(arena.segment(i, 1), weights.b.data(), 5 * 4), 0);
    EXPECT_EQ(arena.version(i), 1U);
  }
}

TEST(HostArena, RejectsAnotherArena) {
  const HostArena arena = HostArena::create(kExperts, two_segments());
  std::vector<ArenaExpert> others = kExperts;
  others[1].expert = ExpertId{1};
  EXPECT_THROW(HostArena::open(arena.name(), others, two_segments()), InputError);
  EXPECT_THROW(HostArena::open(arena.name(), std::span(kExperts).first(2), two_segments()), InputError);
  EXPECT_THROW(HostArena::open(arena.name(), kExperts, ExpertLayout({{.name = "a", .elements = 33}})), InputError);
  EXPECT_THROW(HostArena::open("/foremoe-no-such", kExperts, two_segments()), InputError);
}

TEST(HostArena, MayBeEmpty) {
  const HostArena arena = HostArena::create({}, two_segments());
  EXPECT_EQ(HostArena::open(arena.name(), {}, two_segments()).num_experts(), 0U);
}

TEST(HostArena, ReportsTooLittleMemory) {
  EXPECT_THROW(HostArena::create(kExperts, ExpertLayout({{.name = "a", .elements = std::int64_t{1} << 48}})),
               InputError);
}

TEST(HostArenaThread, AReaderOfAVersionSeesItsBytes) {
  HostArena arena = HostArena::create(kExperts, two_segments());
  const Weights weights(2.0F);
  const std::jthread writer([&] {
    for (int i = 0; i < 3; ++i) arena.publish(i, 1, weights.segments());
  });
  for (int i = 0; i < 3; ++i) {
    while (arena.version(i) != 1) std::this_thread::yield();
    EXPECT_EQ(std::memcmp(arena.segment(i, 0), weights.a.data(), 33 * 4), 0);
    EXPECT_EQ(arena.checksum(i, 1), checksum(std::as_bytes(std::span(weights.b))));
  }
}

}  // namespace
}  // namespace foremoe

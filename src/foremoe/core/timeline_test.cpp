#include "foremoe/core/timeline.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

namespace foremoe {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json events_of(const Timeline& timeline, const std::string& phase) {
  json events = json::array();
  const json trace = json::parse(timeline.to_json());
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] == phase) events.push_back(event);
  }
  return events;
}

TEST(Timeline, SortsSpansByRankLaneAndBeginFromTheEarliest) {
  Timeline timeline;
  timeline.add(RankId{1}, Lane::kExperts, "late", 9'000, 9'001);
  timeline.add(RankId{1}, Lane::kExperts, "early", 5'001, 7'500);
  timeline.add(RankId{1}, Lane::kWork, "work", 8'000, 8'000);
  timeline.add(RankId{0}, Lane::kPeerPath, "copy", 2'000, 1'234'567'891);
  const json spans = events_of(timeline, "X");
  ASSERT_EQ(spans.size(), 4U);
  std::vector<std::string> names;
  for (const json& span : spans) names.push_back(span["name"]);
  EXPECT_EQ(names, (std::vector<std::string>{"copy", "work", "early", "late"}));
  EXPECT_EQ(spans[0]["pid"], 0);
  EXPECT_EQ(spans[0]["tid"], static_cast<int>(Lane::kPeerPath));
  EXPECT_EQ(spans[2]["pid"], 1);
  EXPECT_DOUBLE_EQ(spans[0]["ts"], 0.0);
  EXPECT_DOUBLE_EQ(spans[2]["ts"], 3.001);
  EXPECT_DOUBLE_EQ(spans[2]["dur"], 2.499);
  EXPECT_DOUBLE_EQ(spans[3]["dur"], 0.001);
}

TEST(Timeline, MicrosecondsHaveThreeDecimalsOverHours) {
  Timeline timeline;
  timeline.add(RankId{0}, Lane::kWork, "a", 17, 18);
  timeline.add(RankId{0}, Lane::kWork, "b", 17 + 36'000'000'000'007, 17 + 36'000'000'000'010);
  EXPECT_THAT(timeline.to_json(), HasSubstr(R"("ts":36000000000.007,"dur":0.003)"));
}

TEST(Timeline, RanksAndLanesAreNamedOnceAndInWords) {
  Timeline timeline;
  for (int i = 0; i < 3; ++i) {
    timeline.add(RankId{3}, Lane::kWait, "w", i, i + 1);
    timeline.add(RankId{2}, Lane::kHostPath, "c", i, i + 1);
  }
  const json names = events_of(timeline, "M");
  ASSERT_EQ(names.size(), 4U);
  EXPECT_EQ(names[0]["name"], "process_name");
  EXPECT_EQ(names[0]["args"]["name"], "rank 2");
  EXPECT_EQ(names[1]["name"], "thread_name");
  EXPECT_EQ(names[1]["args"]["name"], "copies, host path");
  EXPECT_EQ(names[2]["args"]["name"], "rank 3");
  EXPECT_EQ(names[3]["pid"], 3);
  EXPECT_EQ(names[3]["tid"], static_cast<int>(Lane::kWait));
}

TEST(Timeline, AcceptsAnyBytesInNames) {
  Timeline timeline;
  timeline.add(RankId{0}, Lane::kWork, "a \"quoted\"\nline \\ and \xff", 0, 1);
  const json spans = events_of(timeline, "X");
  const std::string name = spans[0]["name"];
  EXPECT_THAT(name, HasSubstr("a \"quoted\"\nline \\ and "));
}

TEST(Timeline, IsAValidTraceWithoutSpans) {
  const json trace = json::parse(Timeline().to_json());
  EXPECT_TRUE(trace["traceEvents"].empty());
  EXPECT_EQ(trace["otherData"]["dropped_spans"], 0);
}

TEST(Timeline, CountsDroppedSpans) {
  Timeline timeline(3);
  for (int i = 0; i < 8; ++i) timeline.add(RankId{0}, Lane::kWork, "s", 0, 1);
  EXPECT_EQ(events_of(timeline, "X").size(), 3U);
  EXPECT_THAT(timeline.to_json(), HasSubstr(R"("dropped_spans":5)"));
}

TEST(Timeline, TextDoesNotDependOnTheOrderOfConcurrentThreads) {
  const auto text = [](bool one_after_another) {
    Timeline timeline;
    const auto add = [&](int rank) {
      for (int i = 0; i < 200; ++i) timeline.add(RankId{rank % 2}, Lane::kExperts, std::to_string(i % 7), i / 4, 100);
    };
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < 4; ++rank) {
      if (one_after_another) {
        add(3 - rank);
      } else {
        threads.emplace_back(add, rank);
      }
    }
    threads.clear();
    return timeline.to_json();
  };
  EXPECT_EQ(text(false), text(true));
}

}  // namespace
}  // namespace foremoe

#include "foremoe/rollout/rollout_follower.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/rollout/trace_file.h"
#include "foremoe/testing/random_traces.h"

namespace foremoe {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class RolloutFollowerTest : public testing::Test {
 protected:
  RolloutFollowerTest() { std::filesystem::create_directory(folder_); }
  ~RolloutFollowerTest() override { std::filesystem::remove_all(folder_); }
  RolloutFollowerTest(const RolloutFollowerTest&) = delete;
  RolloutFollowerTest& operator=(const RolloutFollowerTest&) = delete;

  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  void write(const RoutingTrace& trace, const std::string& name) const { write_trace(trace, path(name)); }
  void touch(const std::string& name) const { std::ofstream{path(name)}; }

  std::string complaint_of_poll(RolloutFollower& follower) {
    try {
      follower.poll(pool_);
      return "";
    } catch (const InputError& error) {
      return error.what();
    }
  }

  const std::string folder_ =
      testing::TempDir() + "follower-" + testing::UnitTest::GetInstance()->current_test_info()->name();
  ThreadPool pool_{2};
};

RoutingTrace piece(std::vector<std::int64_t> lengths, std::uint64_t seed, RouteType type = RouteType::kU8) {
  return make_random_trace({.type = type, .lengths = std::move(lengths), .seed = seed}).first;
}

// Concatenates traces into one trace, like a single file.
RoutingTrace joined(const std::vector<RoutingTrace>& parts) {
  RoutingTrace all = parts.front();
  const auto bytes = std::make_shared<std::vector<std::byte>>();
  all.cu_seqlens = {0};
  all.micro_step = all.rank = {};
  for (const RoutingTrace& part : parts) {
    const std::byte* const routes = part.routes;
    bytes->insert(bytes->end(), routes, routes + part.num_tokens * part.num_layers * part.top_k);
    for (int s = 0; s < part.num_sequences(); ++s) {
      all.cu_seqlens.push_back(all.cu_seqlens.back() + part.sequence_length(s));
    }
    all.micro_step.insert(all.micro_step.end(), part.micro_step.begin(), part.micro_step.end());
    all.rank.insert(all.rank.end(), part.rank.begin(), part.rank.end());
  }
  all.num_tokens = all.cu_seqlens.back();
  all.routes = bytes->data();
  all.storage = bytes;
  return all;
}

TEST_F(RolloutFollowerTest, MatchesASingleFileForAnyOrderOfArrival) {
  const std::vector<RoutingTrace> parts{piece({30, 1, 12}, 1), piece({300}, 2), piece({7, 0, 44, 21}, 3)};
  const std::vector<std::string> names{"a.safetensors", "b.safetensors", "c.safetensors"};
  const RoutingTrace whole = joined(parts);
  const BatchingOptions options{.num_ranks = 2, .tokens_per_rank = 300};
  const LoadTable expected = collect(whole, make_batching(whole, options), pool_);

  for (const std::vector<std::size_t>& order : {std::vector<std::size_t>{0, 1, 2}, {2, 0, 1}, {1, 2, 0}}) {
    for (const std::string& name : names) std::filesystem::remove(path(name));
    std::filesystem::remove(path("done"));
    RolloutFollower follower(folder_);
    EXPECT_FALSE(follower.poll(pool_));
    for (const std::size_t i : order) {
      write(parts[i], names[i]);
      EXPECT_FALSE(follower.poll(pool_));
      if (i == 1) std::filesystem::remove(path(names[i]));  // already counted, so it may be deleted
    }
    touch("done");
    EXPECT_TRUE(follower.poll(pool_));
    const RoutingTrace sequences = follower.sequences();
    EXPECT_EQ(sequences.cu_seqlens, whole.cu_seqlens);
    EXPECT_EQ(follower.to_load_table(make_batching(sequences, options)).load, expected.load);
    EXPECT_EQ(follower.files().at("c.safetensors").header.num_tokens, 72);
  }
}

TEST_F(RolloutFollowerTest, UsesTheBatchingThatEveryFileRecorded) {
  std::vector<RoutingTrace> parts{piece({5, 6}, 1), piece({7, 8, 9}, 2)};
  parts[0].micro_step = {1, 0}, parts[0].rank = {0, 1};
  parts[1].micro_step = {0, 1, 1}, parts[1].rank = {0, 1, 0};
  for (RoutingTrace& part : parts) part.ranks = part.ranks_per_node = 2;
  write(parts[0], "0.safetensors");
  write(parts[1], "1.safetensors");
  RolloutFollower follower(folder_, 5);
  EXPECT_TRUE(follower.poll(pool_));
  const RoutingTrace whole = joined(parts);
  const Batching batching = make_batching(follower.sequences(), {});
  EXPECT_TRUE(batching.recorded);
  EXPECT_EQ(follower.to_load_table(batching).load, collect(whole, make_batching(whole, {}), pool_).load);

  write(piece({3}, 3), "2.safetensors");  // has no batching
  RolloutFollower other(folder_, 6);
  EXPECT_TRUE(other.poll(pool_));
  EXPECT_FALSE(other.sequences().has_batching());

  parts[0].ranks = 4;
  write(parts[0], "3.safetensors");
  std::filesystem::remove(path("2.safetensors"));
  RolloutFollower third(folder_, 7);
  EXPECT_TRUE(third.poll(pool_));
  EXPECT_THROW(third.sequences(), InputError);
}

TEST_F(RolloutFollowerTest, IgnoresHiddenAndOtherFiles) {
  touch(".part.safetensors");
  touch("notes.txt");
  RolloutFollower follower(folder_, 2);
  EXPECT_FALSE(follower.poll(pool_));
  EXPECT_TRUE(follower.files().empty());
  EXPECT_THROW(follower.sequences(), InputError);
  write(piece({4, 4}, 1, RouteType::kI32), "a.safetensors");
  EXPECT_TRUE(follower.poll(pool_));
}

TEST_F(RolloutFollowerTest, WaitsForAFileThatIsBeingCopied) {
  write(piece({30, 5}, 1), "source");
  std::ifstream in(path("source"), std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  RolloutFollower follower(folder_);
  std::ofstream copy(path("a.safetensors"), std::ios::binary);
  for (const std::size_t end : {std::size_t{0}, std::size_t{5}, bytes.size() / 2, bytes.size() - 1}) {
    std::filesystem::resize_file(path("a.safetensors"), 0);
    copy.seekp(0);
    copy.write(bytes.data(), static_cast<std::streamsize>(end)).flush();
    EXPECT_FALSE(follower.poll(pool_)) << end;
    EXPECT_TRUE(follower.files().empty());
  }
  copy.write(bytes.data() + bytes.size() - 1, 1).flush();
  touch("done");
  EXPECT_TRUE(follower.poll(pool_));
  EXPECT_EQ(follower.sequences().num_sequences(), 2);
}

TEST_F(RolloutFollowerTest, NamesAFileThatIsNoTraceWhenTheRolloutOrPatienceEnds) {
  touch("a.safetensors");
  RolloutFollower patient(folder_);
  EXPECT_FALSE(patient.poll(pool_));
  RolloutFollower impatient(folder_, 2, std::chrono::seconds(0));
  EXPECT_FALSE(impatient.poll(pool_));
  EXPECT_THAT(complaint_of_poll(impatient), HasSubstr("a.safetensors"));
  touch("done");
  EXPECT_THAT(complaint_of_poll(patient), HasSubstr("a.safetensors"));
}

TEST_F(RolloutFollowerTest, CountsEachFileOnceAndNoticesAnotherOfItsName) {
  for (const bool rewritten : {false, true}) {
    write(piece({4, 4}, 1), "a.safetensors");
    RolloutFollower follower(folder_);
    for (int i = 0; i < 3; ++i) EXPECT_FALSE(follower.poll(pool_));
    std::filesystem::remove(path("a.safetensors"));
    EXPECT_FALSE(follower.poll(pool_));
    if (rewritten) write(piece({4, 4}, 2), "a.safetensors");
    EXPECT_THAT(complaint_of_poll(follower), rewritten ? HasSubstr("was changed or replaced") : HasSubstr(""));
    EXPECT_EQ(follower.sequences().num_sequences(), 2);
  }
}

TEST_F(RolloutFollowerTest, WaitsForTheTargetOfALinkAndNamesTheLinkIfThereIsNone) {
  std::filesystem::create_symlink(path("later"), path("a.safetensors"));
  RolloutFollower follower(folder_);
  RolloutFollower other(folder_);
  EXPECT_FALSE(follower.poll(pool_));
  touch("done");
  EXPECT_THAT(complaint_of_poll(other), HasSubstr("a.safetensors"));
  write(piece({4, 4}, 1), "later");
  EXPECT_TRUE(follower.poll(pool_));
  EXPECT_EQ(follower.sequences().num_sequences(), 2);
}

TEST_F(RolloutFollowerTest, AcceptsAnOlderTimeAfterCounting) {  // cp -p sets it after the last byte
  write(piece({4, 4}, 1), "a.safetensors");
  RolloutFollower follower(folder_);
  EXPECT_FALSE(follower.poll(pool_));
  const auto an_hour_ago = std::filesystem::file_time_type::clock::now() - std::chrono::hours(1);
  std::filesystem::last_write_time(path("a.safetensors"), an_hour_ago);
  EXPECT_EQ(complaint_of_poll(follower), "");
}

TEST_F(RolloutFollowerTest, IgnoresFoldersAndPipes) {
  std::filesystem::create_directory(path("folder.safetensors"));
  ASSERT_EQ(::mkfifo(path("pipe.safetensors").c_str(), 0600), 0);
  write(piece({4, 4}, 1), "a.safetensors");
  touch("done");
  RolloutFollower follower(folder_);
  EXPECT_TRUE(follower.poll(pool_));
  EXPECT_EQ(follower.files().size(), 1U);
}

TEST_F(RolloutFollowerTest, NamesFileAndFieldOfAnotherShape) {
  write(piece({4}, 1), "a.safetensors");
  write(make_random_trace({.lengths = {4}, .num_experts = 9}).first, "b.safetensors");
  RolloutFollower follower(folder_);
  EXPECT_THAT(complaint_of_poll(follower),
              AllOf(HasSubstr("b.safetensors"), HasSubstr("num_experts"), HasSubstr("is 9 here, and 8 in a.safe")));
}

TEST_F(RolloutFollowerTest, NamesTheFileOfAMalformedRow) {
  auto [trace, bytes] = make_random_trace({.lengths = {4, 4}});
  (*bytes)[4 * 6] = std::byte{100};  // first expert of the second sequence
  write(trace, "a.safetensors");
  RolloutFollower follower(folder_);
  EXPECT_THAT(complaint_of_poll(follower), AllOf(HasSubstr("a.safetensors"), HasSubstr("[4, 0, 0]")));
}

TEST_F(RolloutFollowerTest, RefusesFewerAndMoreSequencesThanExpected) {
  write(piece({4, 4}, 1), "a.safetensors");
  RolloutFollower fewer(folder_, 1);
  EXPECT_THAT(complaint_of_poll(fewer), HasSubstr("has 2 sequences, expected 1"));
  touch("done");
  RolloutFollower more(folder_, 3);
  EXPECT_THAT(complaint_of_poll(more), HasSubstr("ended with 2 sequences, expected 3"));
  EXPECT_THROW(RolloutFollower(path("absent")), InputError);
}

}  // namespace
}  // namespace foremoe

#include "foremoe/cluster/cluster.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

using testing::HasSubstr;

// The text of a preset with one line replaced.
std::string h100_with(const std::string& key, const std::string& line) {
  std::string text = to_toml(find_cluster("h100"));
  const std::size_t at = text.find("\n" + key + " ");
  EXPECT_NE(at, std::string::npos) << key;
  const std::size_t end = text.find('\n', at + 1);
  return text.replace(at + 1, end - at - 1, line);
}

std::string error_of(const std::string& text) {
  try {
    parse_cluster(text, "some.toml");
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace

TEST(Cluster, FindsPresetsByNameIgnoringCase) {
  EXPECT_THAT(cluster_names(), testing::ElementsAre("a100", "gb200", "h100", "h20", "h200"));
  for (const std::string& name : cluster_names()) EXPECT_EQ(find_cluster(name).name, name);
  EXPECT_EQ(find_cluster("H100").name, "h100");
}

TEST(Cluster, AnUnknownNameIsAnErrorThatListsThePresets) {
  try {
    find_cluster("b300");
    FAIL();
  } catch (const InputError& error) {
    EXPECT_STREQ(error.what(), "cluster: 'b300' is neither a file nor one of a100, gb200, h100, h20, h200");
  }
}

TEST(Cluster, SurvivesWritingAndReading) {
  for (const std::string& name : cluster_names()) {
    const std::string text = to_toml(find_cluster(name));
    EXPECT_EQ(to_toml(parse_cluster(text, "again")), text);
  }
  Cluster odd = find_cluster("h100");
  odd.name = "a \"quoted\" \\ name";
  odd.kernel_seconds = 1.0 / 3 * 1e-5;
  const Cluster again = parse_cluster(to_toml(odd, {{"device.kernel_seconds", "two\nlines = 1"}}), "again");
  EXPECT_EQ(again.name, odd.name);
  EXPECT_EQ(again.kernel_seconds, odd.kernel_seconds);
}

// Relations between presets that follow from the datasheets.
TEST(Cluster, PresetsAreOrderedAsInTheirDatasheets) {
  const Cluster a100 = find_cluster("a100");
  const Cluster h20 = find_cluster("h20");
  const Cluster h100 = find_cluster("h100");
  const Cluster h200 = find_cluster("h200");
  const Cluster gb200 = find_cluster("gb200");
  EXPECT_LT(h20.flops_per_second, a100.flops_per_second);  // below the limit of export controls
  EXPECT_LT(a100.flops_per_second, h100.flops_per_second);
  EXPECT_EQ(h100.flops_per_second, h200.flops_per_second);
  EXPECT_LT(h200.flops_per_second, gb200.flops_per_second);
  EXPECT_LT(h100.memory, h20.memory);
  EXPECT_LT(h20.memory, h200.memory);
  EXPECT_LT(h200.memory, gb200.memory);
  EXPECT_LT(a100.peers.bytes_per_second, h100.peers.bytes_per_second);
  EXPECT_EQ(gb200.ranks_per_node, 72);
  for (const Cluster& c : {a100, h20, h100, h200}) {
    EXPECT_EQ(c.ranks_per_node, 8);
    EXPECT_LT(c.network.bytes_per_second, c.peers.bytes_per_second);
    EXPECT_LT(c.host.bytes_per_second, gb200.host.bytes_per_second);
  }
}

TEST(Cluster, ErrorsNameKeyAndLineOfAWrongUnit) {
  EXPECT_EQ(error_of(h100_with("memory_bytes_per_second", "memory_bytes_per_second = 3350")),
            "some.toml: device.memory_bytes_per_second line 8: 3350 is not between 1e+06 and 1e+15 "
            "(bytes per second)");
  EXPECT_THAT(error_of(h100_with("latency_seconds", "latency_seconds = 20")),
              HasSubstr("some.toml: peers.latency_seconds line 15: 20 is not between 0 and 0.1 (seconds)"));
  EXPECT_THAT(error_of(h100_with("gemm_efficiency", "gemm_efficiency = 65")), HasSubstr("device.gemm_efficiency"));
  EXPECT_THAT(error_of(h100_with("gemm_efficiency", "gemm_efficiency = nan")), HasSubstr("device.gemm_efficiency"));
  EXPECT_THAT(error_of(h100_with("memory_bytes", "memory_bytes = inf")), HasSubstr("device.memory_bytes"));
  EXPECT_THAT(error_of(h100_with("memory_bytes", "memory_bytes = \"80 GB\"")),
              HasSubstr("some.toml: device.memory_bytes line 9: must be a number, bytes"));
  EXPECT_THAT(error_of(h100_with("ranks_per_node", "ranks_per_node = 7.5")), HasSubstr("7.5 is not a whole number"));
  EXPECT_THAT(error_of(h100_with("ranks_per_node", "ranks_per_node = 0")), HasSubstr("0 is not between 1 and"));
}

TEST(Cluster, ErrorsNameMissingAndUnknownKeys) {
  EXPECT_EQ(error_of(h100_with("row_tile", "")), "some.toml: device.row_tile: is missing");
  EXPECT_EQ(error_of(h100_with("row_tile", "row_tiles = 128")),
            "some.toml: device.row_tiles line 10: is not a key of a cluster file");
  EXPECT_EQ(error_of(h100_with("row_tile", "row_tile = 128\ncolour = 3")),
            "some.toml: device.colour line 11: is not a key of a cluster file");
  EXPECT_EQ(error_of("name = \"x\"\nranks_per_node = 8\n"), "some.toml: device.flops_per_second: is missing");
  EXPECT_EQ(error_of("name = \"x\"\nranks_per_node = 8\ndevice = 3\n"),
            "some.toml: device line 3: must be a section, [device]");
  EXPECT_EQ(error_of(""), "some.toml: name: is missing");
  EXPECT_EQ(error_of("name = 3"), "some.toml: name line 1: must be a name in quotes");
  for (const char* name : {"\\u001b[31mred", "two\\nlines", "\\u007f"}) {
    EXPECT_EQ(error_of(fmt::format("name = \"{}\"\n", name)), "some.toml: name line 1: has a control character");
  }
  EXPECT_THAT(error_of(to_toml(find_cluster("h100")) + "[racks]\n"), HasSubstr("racks"));
}

// Files of earlier versions have no such section.
TEST(Cluster, AnExchangeIsAsFastAsACopyUnlessTheFileSaysOtherwise) {
  std::string text = to_toml(find_cluster("h100"));
  const std::size_t begin = text.find("[exchange]");
  ASSERT_NE(begin, std::string::npos);
  text.erase(begin, text.find("[node]") - begin);
  const Cluster old = parse_cluster(text, "old");
  EXPECT_EQ(old.exchange.token_efficiency, 1);
  EXPECT_EQ(old.exchange.forwarding_efficiency, 1);
  EXPECT_EQ(old.exchange.row_efficiency, 1);
  EXPECT_EQ(old.exchange.token_seconds, 0);
  EXPECT_EQ(old.host_memory_bytes_per_second, find_cluster("h100").host_memory_bytes_per_second);
  EXPECT_EQ(parse_cluster(text + "[exchange]\nrow_efficiency = 0.5\n", "partial").exchange.row_efficiency, 0.5);
  EXPECT_THAT(error_of(text + "[exchange]\nrow_efficiency = 1.5\n"), HasSubstr("some.toml: exchange.row_efficiency"));
  EXPECT_THAT(error_of(text + "[exchange]\nefficiency = 1\n"), HasSubstr("exchange.efficiency"));
}

TEST(Cluster, AFileWithABaseHasThePresetsOtherValues) {
  Cluster expected = find_cluster("h200");
  expected.name = "ours";
  expected.peers.bytes_per_second = 3e11;
  const std::string text = "name = \"ours\"\nbase = \"H200\"\n";
  EXPECT_EQ(to_toml(parse_cluster(text + "[peers]\nbytes_per_second = 3e11\n", "ours")), to_toml(expected));
  EXPECT_THAT(error_of(text + "[peers]\nbytes = 3e11\n"), HasSubstr("peers.bytes line 4: is not a key"));
  EXPECT_EQ(error_of("name = \"ours\"\nbase = \"some.toml\"\n"),
            "some.toml: base line 2: must be one of a100, gb200, h100, h20, h200, in quotes");
  EXPECT_THAT(error_of("name = \"ours\"\nbase = 200\n"), HasSubstr("base line 2: must be one of"));
}

TEST(Cluster, ErrorsNameTheLineThatIsNotToml) {
  EXPECT_THAT(error_of("name = \"x\"\n[<device]\n"), HasSubstr("some.toml line 2: is not TOML: "));
  EXPECT_THAT(error_of("name = \"x\"\nranks_per_node = = 8\n"), HasSubstr("some.toml line 2: is not TOML: "));
  EXPECT_THAT(error_of("name = \"x\"\nname = \"y\"\n"), HasSubstr("some.toml line 2: is not TOML: "));
}

// toml++ has undefined behaviour for some of them (found by fuzzing).
TEST(Cluster, CharactersThatAreNotAsciiAreRejectedOutsideOfCommentsAndDoubleQuotes) {
  const std::string words = "has a character that is not ASCII: write it in a comment, or in double quotes on one line";
  for (const std::string line : {"é = 1", "a\u00A0= 1", "a = 2\uFEFFb", "a = \"é\" é", "a = '#' é", "a = \"\\\"\" é",
                                 "a = '\\' é", "a = \"x\né\"", "a = \"\"\"\\\né\"\"\"", "a = \"\"\"x\"\"\"\"é",
                                 "a = '''é'''", "a = 'é'", "a = \"\\é\"", "# é\né"}) {
    const auto lines = std::ranges::count(line, '\n');
    EXPECT_EQ(error_of("name = 'x'\n" + line), fmt::format("some.toml line {}: {}", 2 + lines, words)) << line;
  }
  EXPECT_EQ(error_of("name = \"\xC3(\""), "some.toml line 1: is not UTF-8");
  EXPECT_THAT(error_of("name =+\"é h = 1"), HasSubstr("some.toml line 1: is not TOML: "));
  Cluster named = find_cluster("h100");
  for (const std::string name : {"Zürich", "中文", "\U0001F600 \"\\é\u20AC"}) {
    named.name = name;
    EXPECT_EQ(parse_cluster("\xEF\xBB\xBF# 中 \xF0\x9F\x98\x80\n" + to_toml(named), "some.toml").name, name);
  }
}

TEST(Cluster, RejectsLongFilesWhoseKeysNestDeeply) {
  std::string text = "name";
  for (int i = 0; i < 200'000; ++i) text += ".a";
  EXPECT_EQ(error_of(text + " = 1"), "some.toml: has 400008 bytes, more than the 65536 permitted");
  EXPECT_NE(error_of(text.substr(0, 60'000) + " = 1"), "");
}

TEST(Cluster, RejectsMoreRanksPerSwitchThanPerNode) {
  EXPECT_THAT(error_of(h100_with("ranks_per_switch", "ranks_per_switch = 16")),
              HasSubstr("node.ranks_per_switch: 16 is more than the 8 ranks of a node"));
}

TEST(Cluster, RejectsAFolderAndAMissingFile) {
  EXPECT_THROW(read_cluster("."), InputError);
  EXPECT_THROW(read_cluster("no/such/file.toml"), InputError);
}

}  // namespace foremoe

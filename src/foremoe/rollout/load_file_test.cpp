#include "foremoe/rollout/load_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>

#include "foremoe/core/error.h"
#include "foremoe/rollout/file_kind.h"

namespace foremoe {
namespace {

using testing::HasSubstr;

const Metadata kGood{{"format", "foremoe.load/1"}, {"num_experts", "4"}, {"top_k", "2"}, {"ranks_per_node", "2"}};

template <class T>
std::vector<std::byte> file_of(const std::vector<T>& values, const std::vector<std::size_t>& shape,
                               const Metadata& metadata = kGood) {
  return to_safetensors({tensor_data("load", std::span<const T>(values), shape)}, metadata);
}

template <class T>
std::string complaint(const std::vector<T>& values, const std::vector<std::size_t>& shape,
                      const Metadata& metadata = kGood) {
  const std::vector<std::byte> bytes = file_of(values, shape, metadata);
  try {
    read_load(Safetensors::parse(bytes, "l"));
    return "";
  } catch (const InputError& error) {
    return error.what();
  }
}

class LoadFile : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }
  std::string path_ = testing::TempDir() + "load_file_" +
                      testing::UnitTest::GetInstance()->current_test_info()->name() + ".safetensors";
};

TEST_F(LoadFile, SurvivesTheRoundTripInTheNarrowestType) {
  const std::vector<std::pair<std::int64_t, DType>> largest{
      {65'535, DType::kU16}, {65'536, DType::kU32}, {4'294'967'295, DType::kU32}, {4'294'967'296, DType::kI64}};
  for (const auto& [value, dtype] : largest) {
    LoadTable table{.load = Array<Tokens, 4>({2, 1, 3, 4}), .top_k = 2, .ranks_per_node = 2, .name = "some load"};
    table.load(1, 0, 2, 3) = Tokens{value};
    write_load(table, path_, {{"origin", "test"}, {"top_k", "not to be replaced"}});
    const auto file = Safetensors::open(path_);
    EXPECT_EQ(file.tensors().at("load").dtype, dtype);
    EXPECT_EQ(file.text("origin"), "test");
    const LoadTable read = read_load(path_);
    EXPECT_EQ(read.load, table.load);
    EXPECT_EQ(read.top_k, 2);
    EXPECT_EQ(read.ranks_per_node, 2);
    EXPECT_EQ(read.name, "some load");
  }
}

TEST_F(LoadFile, KeepsLayersAndTokensAndTheVersionThatOldReadersKnow) {
  LoadTable table{.load = Array<Tokens, 4>({1, 2, 2, 4}, Tokens{3}), .top_k = 2, .name = "x"};
  table.tokens = Array<Tokens, 2>({1, 2}, Tokens{7});
  table.missing_rows = 4;  // 2 ranks · 2 layers · 7 tokens − 48 assignments ÷ 2
  write_load(table, path_);
  EXPECT_EQ(Safetensors::open(path_).text("format"), "foremoe.load/1");
  EXPECT_EQ(read_load(path_).tokens, table.tokens);
  EXPECT_EQ(read_load(path_).missing_rows, 4);

  table.missing_rows = 0;  // then some rows have fewer experts
  write_load(table, path_);
  EXPECT_EQ(Safetensors::open(path_).text("format"), "foremoe.load/2");

  table.missing_rows = 4;
  table.top_k_of_layer = {2, 2};
  table.experts_of_layer = {4, 4};
  write_load(table, path_);
  EXPECT_EQ(Safetensors::open(path_).text("format"), "foremoe.load/2");
  EXPECT_EQ(read_load(path_).top_k_of_layer, table.top_k_of_layer);
  EXPECT_EQ(read_load(path_).experts_of_layer, table.experts_of_layer);

  table.tokens(0, 1) = Tokens{-1};
  write_load(table, path_);
  EXPECT_THAT([&] { read_load(path_); }, testing::ThrowsMessage<InputError>(HasSubstr("tokens[0, 1]: -1, expected 0")));
}

TEST_F(LoadFile, IsDeterministic) {
  const LoadTable table{.load = Array<Tokens, 4>({1, 1, 2, 4}, Tokens{3}), .name = "x"};
  write_load(table, path_);
  const auto first = Safetensors::open(path_);
  write_load(table, path_ + "2");
  const auto second = Safetensors::open(path_ + "2");
  EXPECT_EQ(first.metadata(), second.metadata());
  EXPECT_EQ(std::filesystem::file_size(path_), std::filesystem::file_size(path_ + "2"));
  std::filesystem::remove(path_ + "2");
}

TEST(LoadReader, ReadsEveryTypeOfTheFormat) {
  EXPECT_EQ(complaint(std::vector<std::uint16_t>(8, 1), {1, 1, 2, 4}), "");
  EXPECT_EQ(complaint(std::vector<std::uint32_t>(8, 1), {1, 1, 2, 4}), "");
  EXPECT_EQ(complaint(std::vector<std::int32_t>(8, 1), {1, 1, 2, 4}), "");
  EXPECT_EQ(complaint(std::vector<std::int64_t>(8, 1), {1, 1, 2, 4}), "");
}

TEST(LoadReader, NamesFieldAndIndexOfAFault) {
  std::vector<std::int32_t> values(2 * 3 * 2 * 4, 1);
  EXPECT_EQ(complaint(values, {2, 3, 2, 4}), "");
  values[1 * 24 + 2 * 8 + 1 * 4 + 3] = -5;
  EXPECT_EQ(complaint(values, {2, 3, 2, 4}), "l: load[1, 2, 1, 3]: -5 tokens, expected 0 or more");
  const std::vector<std::int64_t> huge(8, std::int64_t{1} << 60);
  EXPECT_THAT(complaint(huge, {1, 1, 2, 4}), HasSubstr("l: load[0, 0, 0, 0]: takes the layer's load"));
  const std::vector<std::uint8_t> narrow(8, 1);
  EXPECT_EQ(complaint(narrow, {1, 1, 2, 4}), "l: load: dtype U8, expected U16, U32, I32, I64");
  const std::vector<std::uint16_t> good(8, 1);
  EXPECT_EQ(complaint(good, {1, 2, 4}), "l: load: shape [1, 2, 4], expected 4 axes");
  EXPECT_EQ(complaint(good, {1, 1, 4, 2}), "l: __metadata__.num_experts: must be 2 (is '4')");
  EXPECT_EQ(complaint(std::vector<std::uint16_t>{}, {1, 0, 2, 4}), "l: load: shape [1, 0, 2, 4] is empty");
}

TEST(LoadReader, RefusesMetadataThatIsMissingOrOutOfRange) {
  const std::vector<std::uint16_t> good(8, 1);
  const auto with = [&](const char* key, const char* value) {
    Metadata metadata = kGood;
    metadata.insert_or_assign(key, value);
    return complaint(good, {1, 1, 2, 4}, metadata);
  };
  for (const auto& [key, value] : kGood) {
    Metadata metadata = kGood;
    metadata.erase(key);
    EXPECT_EQ(complaint(good, {1, 1, 2, 4}, metadata), "l: __metadata__." + key + ": is missing");
  }
  EXPECT_THAT(with("top_k", "5"), HasSubstr("__metadata__.top_k: must be an integer from 1 to 4 (is '5')"));
  EXPECT_THAT(with("top_k", "0"), HasSubstr("__metadata__.top_k: must be an integer from 1 to 4 (is '0')"));
  EXPECT_THAT(with("top_k", "2 "), HasSubstr("__metadata__.top_k: must be an integer from 1 to 4 (is '2 ')"));
  EXPECT_THAT(with("ranks_per_node", "0"),
              HasSubstr("__metadata__.ranks_per_node: must be an integer from 1 to 65536 (is '0')"));
  EXPECT_THAT(with("num_experts", "99999999999999999999"), HasSubstr("__metadata__.num_experts"));
  EXPECT_EQ(with("format", "foremoe.load/3"),
            "l: __metadata__.format: 'foremoe.load/3', expected foremoe.load/1 or foremoe.load/2");
  EXPECT_EQ(with("experts_of_layer", "[5]"), "l: experts_of_layer[0]: 5, expected 1 to 4");
  EXPECT_EQ(with("experts_of_layer", "[3]"), "l: load[0, 0, 0, 3]: 1 tokens, but this layer has only 3 experts");
  EXPECT_EQ(with("top_k_of_layer", "[1, 2]"), "l: __metadata__.top_k_of_layer: expected a JSON list of 1 integers");
  EXPECT_THAT(with("missing_rows", "-1"), HasSubstr("l: __metadata__.missing_rows: must be an integer"));
  EXPECT_EQ(with("ranks_per_node", "8"), "");  // a single, partly filled node
}

TEST(LoadReader, RefusesEveryTruncation) {
  const std::vector<std::byte> whole = file_of(std::vector<std::uint16_t>(8, 1), {1, 1, 2, 4});
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW(read_load(Safetensors::parse(std::span(whole).first(size), "l")), InputError) << size;
  }
}

TEST(FileKind, MatchesTheFormat) {
  const auto kind = [](const char* format) {
    return file_kind(Safetensors::parse(to_safetensors({}, {{"format", format}}), "f"));
  };
  EXPECT_EQ(kind("foremoe.trace/1"), FileKind::kTrace);
  EXPECT_EQ(kind("foremoe.load/1"), FileKind::kLoad);
  EXPECT_EQ(kind("foremoe.trace/2"), FileKind::kTrace);
  EXPECT_EQ(kind("foremoe.load/2"), FileKind::kLoad);
  EXPECT_EQ(kind("foremoe.plan/1"), FileKind::kPlan);
  EXPECT_THROW(kind("foremoe.plan/2"), InputError);
  EXPECT_THROW(file_kind(Safetensors::parse(to_safetensors({}, {}), "f")), InputError);
}

}  // namespace
}  // namespace foremoe

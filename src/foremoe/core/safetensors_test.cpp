#include "foremoe/core/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Returns a file with this header and this number of data bytes.
std::string file_of(const std::string& header, std::size_t data_bytes) {
  std::string file(8, '\0');
  const std::uint64_t length = header.size();
  std::memcpy(file.data(), &length, sizeof length);
  return file + header + std::string(data_bytes, '\1');
}

// Deleted for temporaries, since the bytes must outlive the views.
Safetensors parse(std::string&& bytes) = delete;
Safetensors parse(const std::string& bytes) {
  return Safetensors::parse(std::as_bytes(std::span(bytes)), "t.safetensors");
}

// Returns the reader's error for these bytes; empty if the reader accepts them.
std::string complaint(const std::string& bytes) {
  try {
    parse(bytes);
    return "";
  } catch (const InputError& error) {
    EXPECT_EQ(error.where().file, "t.safetensors");
    return error.what();
  }
}

std::vector<std::byte> small_file() {
  static const std::vector<std::int64_t> wide{1, -2, 3};
  static const std::vector<std::uint8_t> narrow{4, 5, 6, 7, 8, 9};
  return to_safetensors({tensor_data("narrow", std::span<const std::uint8_t>(narrow), {2, 3}),
                         tensor_data("wide", std::span<const std::int64_t>(wide))},
                        {{"format", "test/1"}, {"n", "12"}});
}

std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(Safetensors, ReadsWhatWasWritten) {
  const std::vector<std::byte> bytes = small_file();
  const auto file = Safetensors::parse(bytes, "memory");
  EXPECT_THAT(file.tensor("wide", {DType::kI64}, 1).to_vector<std::int64_t>(), ElementsAre(1, -2, 3));
  EXPECT_THAT(file.tensor("narrow", {DType::kU8}, {2, 3}).to_vector<int>(), ElementsAre(4, 5, 6, 7, 8, 9));
  EXPECT_EQ(file.tensor("narrow", {DType::kU8}, 2).integer(5), 9);
  EXPECT_EQ(file.text("format"), "test/1");
  EXPECT_EQ(file.integer("n", 0, 100), 12);
}

TEST(Safetensors, SurvivesTheRoundTripThroughAFile) {
  const std::string path = testing::TempDir() + "safetensors_round_trip.safetensors";
  const std::vector<std::int32_t> values{7, 8};
  write_safetensors(path, {tensor_data("v", std::span<const std::int32_t>(values))}, {});
  const auto file = Safetensors::open(path);
  EXPECT_THAT(file.tensor("v", {DType::kI32}, 1).to_vector<std::int32_t>(), ElementsAre(7, 8));
  std::filesystem::remove(path);
}

TEST(Safetensors, WritesTheSameBytesForAnyOrderOfTensors) {
  const std::vector<std::int64_t> a{1};
  const std::vector<std::uint8_t> b{2};
  const auto ta = tensor_data("a", std::span<const std::int64_t>(a));
  const auto tb = tensor_data("b", std::span<const std::uint8_t>(b));
  EXPECT_EQ(to_safetensors({ta, tb}, {}), to_safetensors({tb, ta}, {}));
}

TEST(Safetensors, WritesTheFormatOfOtherReaders) {
  const std::string text = text_of(small_file());
  EXPECT_EQ(text.substr(8),
            R"({"__metadata__":{"format":"test/1","n":"12"},"wide":{"dtype":"I64","shape":[3],"data_offsets":[0,24]},)"
            R"("narrow":{"dtype":"U8","shape":[2,3],"data_offsets":[24,30]}})" +
                std::string(5, ' ') + text.substr(text.size() - 30));
  std::uint64_t header = 0;
  std::memcpy(&header, text.data(), sizeof header);
  EXPECT_EQ(header % 8, 0U);
  EXPECT_EQ(text.size(), 8 + header + 30);
}

TEST(Safetensors, ReadsUnalignedTensors) {
  const std::string bytes = file_of(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"I32","shape":[1],"data_offsets":[1,5]}})",
      5);
  const auto file = parse(bytes);
  EXPECT_EQ(file.tensor("b", {DType::kI32}, 1).integer(0), 0x01010101);
}

TEST(Safetensors, AcceptsEmptyTensorsScalarsAndPaddedHeaders) {
  EXPECT_EQ(complaint(file_of(R"({})", 0)), "");
  EXPECT_EQ(complaint(file_of(R"({"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}   )", 4)), "");
  EXPECT_EQ(complaint(file_of(R"({"e":{"dtype":"F32","shape":[0,9],"data_offsets":[0,0]},)"
                              R"("s":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}})",
                              2)),
            "");
}

TEST(Safetensors, RejectsEveryTruncation) {
  const std::string whole = text_of(small_file());
  ASSERT_EQ(complaint(whole), "");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(complaint(whole.substr(0, size)), "") << size << " bytes";
  }
}

TEST(Safetensors, RejectsTrailingBytes) {
  EXPECT_THAT(complaint(text_of(small_file()) + "x"), HasSubstr("has 1 bytes after its last tensor"));
}

TEST(Safetensors, SurvivesAnyChangedByteOfTheHeader) {
  const std::string whole = text_of(small_file());
  for (std::size_t at = 0; at + 30 < whole.size(); ++at) {
    for (const char byte : {'\0', '"', '{', '}', '[', '9', '-', '\xff'}) {
      std::string changed = whole;
      changed[at] = byte;
      complaint(changed);  // must return; sanitizers detect invalid accesses
    }
  }
}

TEST(Safetensors, RejectsHeadersWithExcessiveSizes) {
  std::string file = file_of("{}", 0);
  const std::uint64_t huge = ~std::uint64_t{0};
  std::memcpy(file.data(), &huge, sizeof huge);
  EXPECT_THAT(complaint(file), HasSubstr("more than the 100000000 permitted"));
  file[0] = 100;
  for (int i = 1; i < 8; ++i) file[static_cast<std::size_t>(i)] = 0;
  EXPECT_THAT(complaint(file), HasSubstr("header: 100 bytes, but the file ends after 2"));
}

struct Malformed {
  const char* header;
  std::size_t data_bytes;
  const char* complaint;
};

TEST(Safetensors, NamesTheFieldOfAMalformedHeader) {
  const std::vector<Malformed> corpus{
      Malformed{"[]", 0, "does not begin with '{'"},
      Malformed{" {}", 0, "does not begin with '{'"},
      Malformed{"{}x", 0, "header byte 3: parse error at line 1, column 3: "},
      Malformed{"{\"a\":1}", 0, "a: unexpected number"},
      Malformed{"{\"\xff\":{}}", 0, "header byte"},
      Malformed{R"({"a":null})", 0, "a: unexpected null"},
      Malformed{R"({"a":{"dtype":"U8","shape":[1]}})", 1, "a: needs dtype, shape and data_offsets"},
      Malformed{R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1, "a: dtype appears twice"},
      Malformed{R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1}})", 1, "a: unknown key 'x'"},
      Malformed{R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                2, "a: appears twice"},
      Malformed{R"({"__metadata__":{"k":1}})", 0, "__metadata__.k: unexpected number"},
      Malformed{R"({"__metadata__":{"k":"1","k":"2"}})", 0, "__metadata__.k: appears twice"},
      Malformed{R"({"__metadata__":{"k":{"x":"2"}}})", 0, "__metadata__.k: unexpected object"},
      Malformed{R"({"a":{"dtype":"U7","shape":[1],"data_offsets":[0,1]}})", 1, "a: unknown dtype 'U7'"},
      Malformed{R"({"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})", 1, "a: unexpected list"},
      Malformed{R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1, "a: unexpected negative number"},
      Malformed{R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", 1, "a: 1.0 is not a count"},
      Malformed{R"({"a":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1]}})", 1, "is not a count"},
      Malformed{R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 1, "a: data_offsets must be two"},
      Malformed{R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,1]}})", 1, "a: data_offsets must be two"},
      Malformed{R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1, "a: data_offsets [1, 0] run back"},
      Malformed{R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 1, "a: data_offsets end at byte 2"},
      Malformed{R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2, "a: data_offsets begin at byte 1"},
      Malformed{R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
                3, "b: data_offsets begin at byte 1, inside the tensor before"},
      Malformed{R"({"a":{"dtype":"I32","shape":[2],"data_offsets":[0,4]}})", 4, "a: shape [2] of I32 does not take 4"},
      Malformed{R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0,
                "a: shape [4294967296, 4294967296] of U8 does not take 0"},
      Malformed{R"({"a":{"dtype":"I64","shape":[2305843009213693952],"data_offsets":[0,0]}})", 0, "does not take 0"}};
  for (const Malformed& m : corpus) EXPECT_THAT(complaint(file_of(m.header, m.data_bytes)), HasSubstr(m.complaint));
}

TEST(Safetensors, RejectsUnboundedNesting) {
  EXPECT_NE(complaint(file_of(R"({"a":{"shape":)" + std::string(1'000'000, '['), 0)), "");
}

TEST(Safetensors, ErrorsNameTheUnexpectedTensor) {
  const std::vector<std::byte> bytes = small_file();
  const auto file = Safetensors::parse(bytes, "memory");
  const auto complaint_of = [](const std::function<void()>& access) -> std::string {
    try {
      access();
      return "";
    } catch (const InputError& error) {
      return error.what();
    }
  };
  EXPECT_EQ(complaint_of([&] { file.tensor("x", {DType::kU8}, 1); }), "memory: x: is missing");
  EXPECT_EQ(complaint_of([&] {
              file.tensor("wide", {DType::kU8, DType::kU16}, 1);
            }),
            "memory: wide: dtype I64, expected U8, U16");
  EXPECT_EQ(complaint_of([&] { file.tensor("wide", {DType::kI64}, 2); }), "memory: wide: shape [3], expected 2 axes");
  EXPECT_EQ(complaint_of([&] {
              file.tensor("narrow", {DType::kU8}, {3, 2});
            }),
            "memory: narrow: shape [2, 3], expected [3, 2]");
  EXPECT_EQ(complaint_of([&] { file.text("m"); }), "memory: __metadata__.m: is missing");
  EXPECT_EQ(complaint_of([&] { file.integer("n", 0, 11); }),
            "memory: __metadata__.n: must be an integer from 0 to 11 (is '12')");
  EXPECT_EQ(complaint_of([&] { file.integer("format", 0, 11); }),
            "memory: __metadata__.format: must be an integer from 0 to 11 (is 'test/1')");
}

TEST(Safetensors, RejectsAFolderAndAMissingFile) {
  EXPECT_THROW(Safetensors::open(testing::TempDir()), InputError);
  EXPECT_THROW(Safetensors::open(testing::TempDir() + "no such file"), InputError);
}

}  // namespace
}  // namespace foremoe

// Tests of .npy files and of arrays decoded by Python.

#include <span>

#include "foremoe/testing/recorded_formats.h"

namespace foremoe::testing {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const Ids kIds{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};  // [2][2][3]

TEST(NpyImport, EveryIntegerTypeIsRead) {
  for (const char* descr : {"|u1", "|i1", "<u1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8"}) {
    const auto width = static_cast<std::size_t>(descr[2] - '0');
    EXPECT_EQ(routes_of(import_text(npy(descr, "(2, 2, 3)", raw(kIds, width)))), kIds) << descr;
  }
}

TEST(NpyImport, FortranOrderIsReadByItsStrides) {
  const Ids columns{1, 7, 4, 10, 2, 8, 5, 11, 3, 9, 6, 12};
  EXPECT_EQ(routes_of(import_text(npy("|u1", "(2, 2, 3)", raw(columns, 1), true))), kIds);
}

TEST(ArrayImport, AnArrayWithoutTokensIsRefused) {
  EXPECT_EQ(error_of({{"b", npy("|u1", "(2, 2, 3)", raw(kIds, 1))}, {"a", npy("|u1", "(0, 2, 3)", "")}}),
            "a: routed_experts: has no tokens");
}

TEST(NpyImport, MalformedHeadersNameTheirField) {
  const std::string payload = raw(kIds, 1);
  EXPECT_THAT(error_of(npy("<f4", "(2, 2, 3)", payload)), HasSubstr("in: routed_experts: descr: <f4"));
  EXPECT_THAT(error_of(npy(">i2", "(2, 2, 3)", payload)), HasSubstr("descr: >i2"));
  EXPECT_THAT(error_of(npy("|O", "(2, 2, 3)", payload)), HasSubstr("descr: |O"));
  EXPECT_THAT(error_of(npy("|u1", "(4, 3)", payload)), HasSubstr("shape: has 2 axes"));
  EXPECT_THAT(error_of(npy("|u1", "(2, -2, 3)", payload)), HasSubstr("shape: is not a tuple"));
  EXPECT_THAT(error_of(npy("|u1", "(2, 99999999999999999999, 3)", payload)),
              HasSubstr("shape: has an extent beyond 64 bits"));
  EXPECT_THAT(error_of(npy_with_header("{'descr': '|u1', 'shape': (2, 2, 3)}", payload)),
              HasSubstr("fortran_order: is not in the header"));
  EXPECT_THAT(error_of(std::string("\x93NUMPY\x07\x00\x10\x00\x00\x00", 12)), HasSubstr("version: 7"));
  EXPECT_THAT(error_of(std::string("\x93NUMPY\x02\x00\xff\xff\xff\xff", 12)),
              HasSubstr("header: claims 4294967295 bytes of 0"));
}

TEST(NpyImport, RejectsAShapeLargerThanTheFileWithoutAllocating) {
  EXPECT_THAT(error_of(npy("|u1", "(1000000000, 1000, 1000)", raw(kIds, 1))), HasSubstr("there are 12 bytes"));
  EXPECT_THAT(error_of(npy("<i8", "(4294967296, 4294967296, 8)", raw(kIds, 1))), HasSubstr("there are 12 bytes"));
  EXPECT_THAT(error_of(npy("|u1", "(2, 2, 2)", raw(kIds, 1))), HasSubstr("there are 12 bytes"));
  EXPECT_THAT(error_of(npy("|u1", "(0, 9000000000, 3)", "")), HasSubstr("has no tokens"));
  EXPECT_THAT(error_of(npy("|u1", "(9000000000, 0, 3)", "")), HasSubstr("0 layers"));
}

TEST(DecodedImport, DecodedArraysAndNpyFilesBecomeSequences) {
  const Ids ids{1, 2, 0, 0, 3, 4, 5, 6};
  const std::string integers = raw(ids, 4);
  const std::string file = npy("|u1", "(1, 2, 2)", raw({7, 1, 2, 3}, 1));
  const Decode decode = [&](ImportFormat format, const ImportSource& source) {
    EXPECT_EQ(format, ImportFormat::kJson);
    EXPECT_EQ(source.name, "in");
    const IntegerArray array{.bytes = std::as_bytes(std::span(integers)), .shape = {2, 2, 2}};
    return std::vector<DecodedSequence>{
        {.where = {.file = "in", .field = "a"}, .content = array, .prompt_length = 1, .num_tokens = 3},
        {.where = {.file = "in", .field = "b"}, .content = std::as_bytes(std::span(file)), .prompt_length = 1}};
  };
  const std::string text = "{}";
  const ImportSource source{"in", std::as_bytes(std::span(text))};
  const Imported in = import_rollout({&source, 1}, {}, decode);
  EXPECT_THAT(routes_of(in), ElementsAre(1, 2, -1, -1, 3, 4, 5, 6, 7, 1, 2, 3));
  EXPECT_THAT(in.trace()->cu_seqlens, ElementsAre(0, 2, 3));
  EXPECT_THAT(in.trace()->prompt_lengths, ElementsAre(1, 1));
  EXPECT_EQ(in.report.last_tokens_without_route, 1);
  EXPECT_EQ(in.report.format, ImportFormat::kJson);
}

TEST(DecodedImport, NamesTheLocationOfAnArrayThatDoesNotMatchItsShape) {
  const std::string bytes = raw({1, 2, 3}, 4);
  const DecodedSequence wrong{.where = {.file = "in", .field = "line 3"},
                              .content = IntegerArray{.bytes = std::as_bytes(std::span(bytes)), .shape = {2, 1, 2}}};
  try {
    import_sequences({&wrong, 1}, {});
    FAIL();
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr("in: line 3: [2, 1, 2] of 4 bytes each was claimed, but there are 12 bytes"));
  }
  EXPECT_THROW(import_sequences({}, {}), InputError);
}

TEST(DecodedImport, WithoutADecoderTheFormatIsNamed) {
  EXPECT_EQ(error_of(R"({"choices": []})"), "in: is a json file, which requires the Python package: pip install .");
  EXPECT_THAT(error_of("nrlre1:int8:1x1x2:AAE="), HasSubstr("in: is a nrlre1 file"));
  EXPECT_THAT(error_of(std::string("PK\x03\x04")), HasSubstr("in: is a npz file"));
  EXPECT_THAT(error_of("k05VTVBZ"), HasSubstr("in: is a npy-base64 file"));
  EXPECT_THAT(error_of("x", {.num_layers = 1, .top_k = 1}), HasSubstr("in: is a sglang file"));
}

}  // namespace foremoe::testing

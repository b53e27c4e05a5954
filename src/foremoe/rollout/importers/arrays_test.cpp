// Formats that carry a whole array: .npy, base64 of it, nrlre1, SGLang's flat int32.

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
  EXPECT_EQ(error_of(base64(npy("|u1", "(0, 2, 3)", ""))), "in: line 1: has no tokens");
  EXPECT_EQ(error_of("nrlre1:int8:0x2x3:"), "in: line 1: has no tokens");
  EXPECT_EQ(error_of("", {.format = ImportFormat::kSglang, .num_layers = 2, .top_k = 2}),
            "in: routed_experts: has no tokens");
  EXPECT_EQ(error_of("{\"routed_experts\": \"" + base64(npy("|u1", "(0, 2, 3)", "")) + "\"}"),
            "in: routed_experts: has no tokens");
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

TEST(NpyImport, AShapeThatTheBytesDoNotFillIsRefusedWithoutAskingForMemory) {
  EXPECT_THAT(error_of(npy("|u1", "(1000000000, 1000, 1000)", raw(kIds, 1))), HasSubstr("there are 12 bytes"));
  EXPECT_THAT(error_of(npy("<i8", "(4294967296, 4294967296, 8)", raw(kIds, 1))), HasSubstr("there are 12 bytes"));
  EXPECT_THAT(error_of(npy("|u1", "(2, 2, 2)", raw(kIds, 1))), HasSubstr("there are 12 bytes"));
  EXPECT_THAT(error_of(npy("|u1", "(0, 9000000000, 3)", "")), HasSubstr("has no tokens"));
  EXPECT_THAT(error_of(npy("|u1", "(9000000000, 0, 3)", "")), HasSubstr("0 layers"));
}

TEST(NpyBase64Import, EveryLineIsASequence) {
  const std::string one = npy("|u1", "(1, 1, 2)", raw({4, 1}, 1));
  const std::string two = npy("<u2", "(2, 1, 2)", raw({5, 6, 7, 8}, 2));
  const Imported in = import_text(base64(one) + "\n\n" + base64(two) + "\r\n");
  EXPECT_EQ(in.report.format, ImportFormat::kNpyBase64);
  EXPECT_THAT(in.trace()->cu_seqlens, ElementsAre(0, 1, 3));
  EXPECT_THAT(routes_of(in), ElementsAre(4, 1, 5, 6, 7, 8));
}

TEST(NpyBase64Import, WhatIsNotBase64NamesItsLineAndCharacter) {
  const std::string good = base64(npy("|u1", "(1, 1, 2)", raw({4, 1}, 1)));
  std::string bad = good;
  bad[17] = '=';
  EXPECT_EQ(error_of(good + "\n" + bad), "in: line 2: character 17 is not base64");
  EXPECT_THAT(error_of(good + "\n" + good.substr(1)), HasSubstr("in: line 2"));
}

TEST(Nrlre1Import, EveryLineIsASequenceAndMinusOneIsMissing) {
  const Imported in = import_text("nrlre1:int16:2x2x3:" + base64(raw(kIds, 2)) +
                                  "\nnrlre1:int8:1x2x3:" + base64(raw({-1, -1, -1, 7, 8, 9}, 1)));
  EXPECT_THAT(in.trace()->cu_seqlens, ElementsAre(0, 2, 3));
  EXPECT_THAT(routes_of(in), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, -1, -1, -1, 7, 8, 9));
}

TEST(Nrlre1Import, MalformedEnvelopesNameTheirLine) {
  const std::string good = "nrlre1:int8:1x1x2:AAE=\n";
  EXPECT_THAT(error_of(good + "nrlre1:int8:1x1x2"), HasSubstr("in: line 2: should be nrlre1:"));
  EXPECT_THAT(error_of(good + "nrlre2:int8:1x1x2:AAE="), HasSubstr("in: line 2: begins with \"nrlre2\""));
  EXPECT_THAT(error_of(good + "nrlre1:bfloat16:1x1x2:AAE="), HasSubstr("in: line 2: dtype \"bfloat16\""));
  EXPECT_THAT(error_of(good + "nrlre1:int8:1x2:AAE="), HasSubstr("in: line 2: shape"));
  EXPECT_THAT(error_of(good + "nrlre1:int8:1x1x2x1:AAE="), HasSubstr("in: line 2: shape"));
  EXPECT_THAT(error_of(good + "nrlre1:int8:9999999x1x2:AAE="), HasSubstr("in: line 2: [9999999, 1, 2] of 1 bytes"));
  EXPECT_THAT(error_of(good + "nrlre1:int8:1x1x2:AA?="), HasSubstr("in: line 2: character 2"));
}

TEST(SglangImport, AFlatArrayIsReadRawOrInBase64WithZeroRowsMissing) {
  const Ids ids{1, 2, 0, 0, 3, 4, 5, 6};
  const ImportOptions options{.num_layers = 2, .top_k = 2};
  const Ids expected{1, 2, -1, -1, 3, 4, 5, 6};
  EXPECT_EQ(routes_of(import_text(raw(ids, 4), options)), expected);
  EXPECT_EQ(routes_of(import_text(base64(raw(ids, 4)), options)), expected);
  EXPECT_EQ(import_text(raw(ids, 4), options).report.rows_repeating, 1);
}

TEST(SglangImport, AFlatArrayNeedsItsShapeAndWholeTokens) {
  const ImportOptions sglang{.format = ImportFormat::kSglang};
  EXPECT_THAT(error_of(raw(kIds, 4), sglang), HasSubstr("give its `layers` and `top_k`"));
  EXPECT_THAT(error_of(base64(raw(kIds, 4)), sglang), HasSubstr("give its `layers` and `top_k`"));
  EXPECT_THAT(error_of(raw(kIds, 4)), HasSubstr("give `layers` and `top_k`"));
  EXPECT_THAT(error_of(raw(kIds, 4), {.num_layers = 5, .top_k = 2}),
              HasSubstr("in: routed_experts: 48 bytes are no whole number of tokens"));
}

}  // namespace foremoe::testing

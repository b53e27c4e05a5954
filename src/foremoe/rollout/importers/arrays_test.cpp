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
  EXPECT_EQ(error_of({{"a", npy("|u1", "(0, 2, 3)", "")}}), "a: routed_experts: has no tokens");
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

// Imports sequences of one layer and top-2, with distinct experts and optional missing first tokens.
struct Sample {
  std::int64_t rows;
  DecodedSequence facts;
  std::int64_t missing = 0;
  std::int64_t seed = 0;
};
Imported import_samples(const std::vector<Sample>& samples, const ImportOptions& options = {}) {
  std::vector<std::string> bytes;
  const Decode decode = [&](ImportFormat, const ImportSource&) {
    std::vector<DecodedSequence> sequences;
    for (const Sample& of : samples) {
      Ids ids;
      for (std::int64_t t = 0; t < of.rows; ++t) {
        const std::int64_t id = of.seed + t % 16;
        ids.insert(ids.end(), {t < of.missing ? -1 : id, t < of.missing ? -1 : id + 40});
      }
      bytes.push_back(raw(ids, 4));
    }
    for (std::size_t i = 0; i < samples.size(); ++i) {
      DecodedSequence sequence = samples[i].facts;
      sequence.where = {.file = "in", .field = "line " + std::to_string(i + 1)};
      sequence.content = IntegerArray{.bytes = std::as_bytes(std::span(bytes[i])),
                                      .shape = {static_cast<std::uint64_t>(samples[i].rows), 1, 2}};
      sequences.push_back(std::move(sequence));
    }
    return sequences;
  };
  const std::string text = "{}";
  const ImportSource source{"in", std::as_bytes(std::span(text))};
  return import_rollout({&source, 1}, options, decode);
}

TEST(DecodedImport, RowsThatContradictTheTokensAreSkipped) {
  const auto skipped = [](std::int64_t rows, std::int64_t tokens, std::int64_t omitted = 0) {
    const Imported in =
        import_samples({{1, {}}, {rows, {.num_tokens = tokens, .counted_in = "usage", .omitted_rows = omitted}}});
    return in.report.skipped.empty() ? "" : in.report.skipped[0].problem;
  };
  EXPECT_EQ(skipped(31, 31), "");
  EXPECT_EQ(skipped(30, 31), "");
  EXPECT_EQ(skipped(50, 31), "has 50 rows for 31 tokens (by usage); expected 30 or 31");
  EXPECT_EQ(skipped(29, 31), "has 29 rows for 31 tokens (by usage); expected 30 or 31");
  EXPECT_EQ(skipped(22, 31, 7), "has 22 rows for 31 tokens (by usage); expected 30 or 31");
  EXPECT_EQ(skipped(22, 31, 8), "");
  EXPECT_NE(skipped(22, 10'000'000'000, 10'000'000'000 - 22), "");  // would not fit into memory
}

TEST(DecodedImport, OmittedRowsOfACachedPrefixBecomeMissingFirstRows) {
  const Imported in = import_samples({{3, {.prompt_length = 4, .num_tokens = 6, .omitted_rows = 2}}});
  EXPECT_THAT(routes_of(in), ElementsAre(-1, -1, -1, -1, 0, 40, 1, 41, 2, 42));
  EXPECT_EQ(in.report.rows_omitted, 2);
  EXPECT_EQ(in.report.rows, 5);
  EXPECT_EQ(in.report.last_tokens_without_route, 1);
  EXPECT_THAT(in.trace()->prompt_lengths, ElementsAre(4));
}

TEST(DecodedImport, PrefixesAreFilledFromSiblingsThatAgree) {
  const DecodedSequence prompt{.prompt_length = 6};
  const DecodedSequence other{.prompt_length = 6, .prompt = "other"};
  const auto missing = [](const std::vector<Sample>& samples) {
    const Imported in = import_samples(samples, {.num_experts = 64, .fill_prefixes = true});
    const Ids ids = routes_of(in);
    EXPECT_EQ(in.report.rows_missing(), std::ranges::count(ids, -1) / 2);
    return in.report.rows_missing();
  };
  EXPECT_EQ(missing({{9, prompt}, {12, prompt, 6}, {10, prompt, 4}}), 0);
  EXPECT_EQ(missing({{9, prompt, 2}, {12, prompt, 6}}), 4);                  // what the donor lacks
  EXPECT_EQ(missing({{9, prompt}, {12, prompt, 8}}), 2);                     // only rows of the prompt
  EXPECT_EQ(missing({{9, prompt}, {12, other, 6}}), 6);                      // of another prompt
  EXPECT_EQ(missing({{9, prompt}, {12, {}, 6}}), 6);                         // of an unknown prompt
  EXPECT_EQ(missing({{9, prompt}, {12, prompt, 4, 3}}), 4);                  // its own rows of the prompt differ
  EXPECT_EQ(missing({{9, prompt}, {9, prompt, 0, 3}, {12, prompt, 6}}), 6);  // donors differ
  const Imported in = import_samples({{9, prompt}, {12, prompt, 6}}, {.num_experts = 64, .fill_prefixes = true});
  EXPECT_THAT(in.report.notes,
              ::testing::Contains(
                  HasSubstr("6 first tokens of 1 sequences were filled from sequences with the same length of "
                            "the prompt, which is all that is known of it: the first is sample 1, from sample 0")));
  EXPECT_EQ(import_samples({{9, prompt}, {12, prompt, 6}}, {.num_experts = 64}).report.rows_missing(), 6);
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

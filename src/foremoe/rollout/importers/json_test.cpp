#include <array>
#include <span>

#include "foremoe/testing/recorded_formats.h"

namespace foremoe::testing {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(JsonImport, AVllmResponseHasOneSequencePerChoice) {
  const std::string one = base64(npy("|u1", "(1, 1, 2)", raw({4, 1}, 1)));
  const std::string two = base64(npy("|u1", "(2, 1, 2)", raw({5, 6, 7, 8}, 1)));
  const Imported in = import_text(R"({"id": "x", "choices": [{"routed_experts": ")" + one +
                                  R"("}, {"routed_experts": ")" + two + "\"}]}");
  EXPECT_EQ(in.report.format, ImportFormat::kJson);
  EXPECT_THAT(in.trace()->cu_seqlens, ElementsAre(0, 1, 3));
  EXPECT_THAT(routes_of(in), ElementsAre(4, 1, 5, 6, 7, 8));
}

TEST(JsonImport, Vllm021PutsThePromptBeforeEachChoice) {
  const Imported in = import_text(R"({
    "prompt_routed_experts": [[[-1, -1]], [[1, 2]]],
    "choices": [{"routed_experts": [[[3, 4]]]}, {"routed_experts": []}]
  })");
  EXPECT_THAT(in.trace()->cu_seqlens, ElementsAre(0, 3, 5));
  EXPECT_THAT(in.trace()->prompt_lengths, ElementsAre(2, 2));
  EXPECT_THAT(routes_of(in), ElementsAre(-1, -1, 1, 2, 3, 4, -1, -1, 1, 2));
  EXPECT_EQ(in.report.rows_recorded_missing, 2);
}

TEST(JsonImport, DocumentsMayComeOnePerLineOrInAList) {
  const std::string a = R"({"routed_experts": [[[3, 4]]]})";
  const std::string b = R"({"outputs": [{"routed_experts": [[[5, 6]]]}]})";
  EXPECT_THAT(routes_of(import_text(a + "\n" + b + "\n")), ElementsAre(3, 4, 5, 6));
  EXPECT_THAT(routes_of(import_text("[" + b + ",\n" + a + "]")), ElementsAre(5, 6, 3, 4));
}

TEST(JsonImport, PromptLengthsAreRecordedOnlyWhenAllAreKnown) {
  const Imported in = import_text(
      R"([{"prompt_routed_experts": [[[1, 2]]], "routed_experts": [[[3, 4]]]}, {"routed_experts": [[[3, 4]]]}])");
  EXPECT_THAT(in.trace()->prompt_lengths, IsEmpty());
}

TEST(JsonImport, SglangResponsesHoldFlatArrays) {
  const std::string flat = base64(raw({1, 2, 0, 0}, 4));
  const ImportOptions options{.num_layers = 2, .top_k = 2};
  EXPECT_THAT(routes_of(import_text(R"({"text": "", "meta_info": {"routed_experts": ")" + flat + "\"}}", options)),
              ElementsAre(1, 2, -1, -1));
  EXPECT_THAT(routes_of(import_text(R"({"choices": [{"sgl_ext": {"routed_experts": ")" + flat + "\"}}]}", options)),
              ElementsAre(1, 2, -1, -1));
}

TEST(JsonImport, OpenAiResponsesOfSglangHaveTheRoutesOfTheirFirstChoice) {
  const std::string beside = R"("sglext": {"routed_experts": ")" + base64(raw({1, 2, 3, 4}, 4)) + "\"}";
  const ImportOptions options{.num_layers = 2, .top_k = 2};
  const Imported in = import_text(
      R"({"choices": [{}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}, )" + beside + "}", options);
  EXPECT_THAT(routes_of(in), ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(in.report.last_tokens_without_route, 1);
  EXPECT_THAT(error_of(R"({"choices": [{}, {}], )" + beside + "}", options),
              HasSubstr("in: sglext.routed_experts: is of the first of 2 choices alone"));
}

TEST(JsonImport, WhatResponsesHaveUnderRoutedExpertsIsReadAlone) {
  const std::string file = npy("|u1", "(1, 1, 2)", raw({4, 1}, 1));
  const std::array<std::string, 5> payloads{file, base64(file), base64(raw({5, 6}, 4)), "[[[7, 8]]]",
                                            "nrlre1:int8:1x1x2:AAE="};
  std::vector<ImportSource> sources;
  for (const std::string& payload : payloads) sources.push_back({"in", std::as_bytes(std::span(payload))});
  const RoutingTrace trace = import_payloads(sources, {.num_experts = 9, .num_layers = 1, .top_k = 2});
  EXPECT_THAT(trace.cu_seqlens, ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(std::span(trace.routes, 10), ElementsAreArray(std::as_bytes(std::span("\4\1\4\1\5\6\7\10\0\1", 10))));
  EXPECT_THROW(import_payloads({}, {}), InputError);
}

TEST(JsonImport, NemoEnvelopesInsideJsonAreRead) {
  EXPECT_THAT(routes_of(import_text(R"({"routed_experts": "nrlre1:int8:1x1x2:AAE="})")), ElementsAre(0, 1));
}

TEST(JsonImport, VllmsLastTokensHaveNoRowAndAreCounted) {
  const std::string rows = base64(npy("|u1", "(3, 1, 2)", raw({4, 1, 5, 6, 7, 8}, 1)));  // of four tokens
  const std::string choice = R"("routed_experts": ")" + rows + "\"";
  for (const std::string& response :
       {R"({"usage": {"prompt_tokens": 1, "completion_tokens": 3}, "choices": [{)" + choice + "}]}",
        R"({"prompt_token_ids": [9], "choices": [{"token_ids": [9, 9, 9], )" + choice + "}]}",
        R"({"prompt_token_ids": [9, 9], "token_ids": [9, 9], )" + choice + "}"}) {
    const Imported in = import_text(response + "\n" + response);
    EXPECT_EQ(in.trace()->num_tokens, 6);
    EXPECT_EQ(in.report.last_tokens_without_route, 2) << response;
    EXPECT_THAT(in.report.notes, Contains(HasSubstr("2 last tokens have no route")));
  }
  const std::string two_choices = R"({"usage": {"prompt_tokens": 1, "completion_tokens": 3}, "choices": [{)" + choice +
                                  "}, {" + choice + "}]}";  // usage does not tell whose tokens they are
  for (const std::string& silent : {two_choices, "{" + choice + "}", "{\"token_ids\": [1, 2, 3], " + choice + "}",
                                    "{\"usage\": {\"prompt_tokens\": 18446744073709551615}, " + choice + "}"}) {
    EXPECT_EQ(import_text(silent).report.last_tokens_without_route, 0) << silent;
  }
}

TEST(JsonImport, MalformedResponsesNameThePlace) {
  EXPECT_THAT(error_of("{\"choices\": [{}]}"), HasSubstr("in: choices[0]: routed_experts: is missing"));
  EXPECT_THAT(error_of("{\"choices\": [{\"routed_experts\": 7}]}"),
              HasSubstr("in: choices[0]: routed_experts: should be a string or a list"));
  EXPECT_THAT(error_of("{\"choices\": 3}"), HasSubstr("in: choices: should be a list"));
  EXPECT_THAT(error_of("{\"routed_experts\": [[[1, 2]], [[1, 2], [3, 4]]]}"),
              HasSubstr("in: routed_experts[1]: has 2 layers instead of 1"));
  EXPECT_THAT(error_of("{\"routed_experts\": [[[1, 2]], [[1]]]}"),
              HasSubstr("in: routed_experts[1, 0]: should be a list of 2"));
  EXPECT_THAT(error_of("{\"routed_experts\": [[[1, 2.5]]]}"),
              HasSubstr("in: routed_experts[0, 0]: should be an integer"));
  EXPECT_THAT(error_of("{\"routed_experts\": []}"), HasSubstr("in: routed_experts: is empty"));
  EXPECT_THAT(error_of("{\"routed_experts\": \"AAAA\"}"), HasSubstr("give its `layers` and `top_k`"));
  EXPECT_THAT(error_of("{\"routed_experts\": [[[1, 2]]]}\n{\"x\": 1"),
              HasSubstr("in: line 2: is not JSON: parse error"));
  EXPECT_EQ(error_of("{\"routed_experts\": \"" + std::string(100000, 'A')),
            "in: is not JSON: parse error at line 1, column 100021: syntax error while parsing value - invalid string: "
            "missing closing quote");
  EXPECT_THAT(error_of("[1]"), HasSubstr("in: [0]: should be an object"));
}

TEST(JsonImport, AnIdOutOfRangeCountsTokensFromThePrompt) {
  EXPECT_THAT(error_of(R"({"prompt_routed_experts": [[[1, 2]]], "routed_experts": [[[3, 9]]]})", {.num_experts = 8}),
              HasSubstr("in: routed_experts[1, 0, 1]: expert 9 is out of range"));
}

TEST(JsonImport, DeepNestingIsRefused) {
  EXPECT_THAT(error_of(std::string(100000, '[')), HasSubstr("nests deeper than 64"));
}

}  // namespace foremoe::testing

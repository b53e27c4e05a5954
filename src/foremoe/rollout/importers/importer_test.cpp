// Behaviour shared by all importers: missing rows, invalid ids and the order of sequences.

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <span>

#include "foremoe/rollout/importers/formats.h"
#include "foremoe/rollout/route_report.h"
#include "foremoe/rollout/trace_file.h"
#include "foremoe/testing/recorded_formats.h"

namespace foremoe::testing {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Importer, RowsWithRepeatedIdsBecomeMissingAndAreCounted) {
  const Imported in = import_text(npy("|u1", "(3, 1, 2)", raw({4, 1, 0, 0, 2, 2}, 1)));
  EXPECT_THAT(routes_of(in), ElementsAre(4, 1, -1, -1, -1, -1));
  EXPECT_EQ(in.report.rows, 3);
  EXPECT_EQ(in.report.rows_repeating, 2);
  EXPECT_EQ(in.report.rows_recorded_missing, 0);
}

TEST(Importer, RowsOfMinusOneAreMissingAndNotRepeating) {
  const Imported in = import_text(npy("<i2", "(2, 1, 2)", raw({-1, -1, 3, 0}, 2)));
  EXPECT_THAT(routes_of(in), ElementsAre(-1, -1, 3, 0));
  EXPECT_EQ(in.report.rows_recorded_missing, 1);
  EXPECT_EQ(in.report.rows_repeating, 0);
}

TEST(Importer, TheLargestUnsignedValueIsASentinelUnlessItIsAnExpert) {
  const std::string top1 = npy("|u1", "(2, 1, 1)", raw({7, 255}, 1));
  EXPECT_THAT(routes_of(import_text(top1)), ElementsAre(7, -1));
  EXPECT_THAT(routes_of(import_text(top1, {.num_experts = 256})), ElementsAre(7, 255));
}

TEST(Importer, TheResultUsesTheNarrowestUnsignedType) {
  EXPECT_EQ(import_text(npy("<i8", "(1, 1, 2)", raw({254, 0}, 8))).trace()->type, RouteType::kU8);
  EXPECT_EQ(import_text(npy("<i8", "(1, 1, 2)", raw({255, 0}, 8))).trace()->type, RouteType::kU16);
  EXPECT_EQ(import_text(npy("<i8", "(1, 1, 2)", raw({1, 0}, 8)), {.num_experts = 256}).trace()->type, RouteType::kU16);
}

TEST(Importer, ATwoByteIdWidensEarlierRows) {
  const Imported in = import_text(npy("<u2", "(3, 1, 2)", raw({254, 3, 65535, 65535, 300, 1}, 2)));
  EXPECT_THAT(routes_of(in), ElementsAre(254, 3, -1, -1, 300, 1));
  EXPECT_EQ(in.trace()->num_experts, 301);
}

TEST(Importer, InfersAndReportsTheNumberOfExperts) {
  const Imported in = import_text(npy("|u1", "(1, 1, 2)", raw({4, 1}, 1)));
  EXPECT_EQ(in.trace()->num_experts, 5);
  EXPECT_TRUE(in.report.num_experts_inferred);
  EXPECT_THAT(in.report.notes, ::testing::Contains(HasSubstr("num_experts = 5")));
  EXPECT_FALSE(import_text(npy("|u1", "(1, 1, 2)", raw({4, 1}, 1)), {.num_experts = 8}).report.num_experts_inferred);
}

// Rows of `layers` layers that hold the experts l, l + 1, …, with zeros where `kinds` has '0'.
std::string layers_of(const std::string& kinds, std::int64_t top_k, std::int64_t tokens = 1) {
  Ids ids;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::size_t l = 0; l < kinds.size(); ++l) {
      for (std::int64_t k = 0; k < top_k; ++k)
        ids.push_back(kinds[l] == '0' ? 0 : (t * 7 + static_cast<std::int64_t>(l) + k) % 16);
    }
  }
  return npy("|u1",
             "(" + std::to_string(tokens) + ", " + std::to_string(kinds.size()) + ", " + std::to_string(top_k) + ")",
             raw(ids, 1));
}

TEST(Importer, AKnownModelSetsTheNumberOfExperts) {
  const std::string array = layers_of(std::string(32, 'x'), 2);
  const Imported in = import_text(array, {.model = "mixtral-16x2b"});
  EXPECT_EQ(in.trace()->num_experts, 16);
  EXPECT_EQ(in.trace()->model, "Mixtral-16x2B");
  EXPECT_FALSE(in.report.num_experts_inferred);
  EXPECT_THAT(in.report.notes, ::testing::Contains("num_experts = 16 is taken from Mixtral-16x2B"));
  EXPECT_EQ(import_text(npy("|u1", "(1, 1, 2)", raw({4, 1}, 1)), {.model = "my own"}).trace()->num_experts, 5);
  std::string counts;
  for (int l = 1; l <= 32; ++l) {
    counts += fmt::format(R"({{"iter": 1, "layer": {}, "tpe": [[3, 4, 1, 0, 0, 0, 0, 0]]}})", l) + "\n";
  }
  EXPECT_EQ(import_text(counts, {.model = "mixtral-8x7b"}).load()->top_k, 2);
  EXPECT_THAT(error_of(counts.substr(0, counts.find('\n')), {.model = "mixtral-8x7b"}),
              HasSubstr("in: has 1 layers with tokens, but Mixtral-8x7B (`model`) has 32 with experts"));
}

TEST(Importer, RoutesOfAnotherModelAreRefused) {
  const std::string routes = layers_of(std::string(48, 'x'), 8);
  EXPECT_THAT(error_of(routes, {.model = "deepseek-v3"}),
              HasSubstr("in: routed_experts: has 48 layers, but DeepSeek-V3 has 58 with experts, of 61"));
  EXPECT_THAT(error_of(layers_of(std::string(62, 'x'), 8), {.model = "deepseek-v3"}),
              HasSubstr("one of multi-token prediction or of a draft model was recorded too"));
  EXPECT_THAT(error_of(layers_of(std::string(58, 'x'), 9), {.model = "deepseek-v3"}),
              HasSubstr("has 9 experts per token, but DeepSeek-V3 has 8: shared experts may have been recorded"));
  EXPECT_THAT(error_of(routes, {.num_experts = 64, .model = "qwen3-30b-a3b"}),
              HasSubstr("experts: 64, but Qwen3-30B-A3B (`model`) has 128"));
  EXPECT_THAT(error_of(routes, {.model = "no/such/config.json"}), HasSubstr("no/such/config.json"));
}

TEST(Importer, AKnownModelSaysWhichLayersAreKept) {
  const Imported all = import_text(layers_of("0" + std::string(45, 'x'), 8), {.model = "glm-4.5-air"});
  EXPECT_EQ(all.trace()->num_layers, 45);
  EXPECT_EQ(all.trace()->layer_ids.front(), 1);
  const Imported moe = import_text(layers_of(std::string(45, 'x'), 8), {.model = "glm-4.5-air"});
  EXPECT_EQ(moe.trace()->layer_ids, all.trace()->layer_ids);
  EXPECT_THAT(error_of(layers_of(std::string(46, 'x'), 8), {.model = "glm-4.5-air"}),
              HasSubstr("layer 0 has routes, but GLM-4.5-Air has no experts there"));
  const std::string lost = layers_of("000" + std::string(43, 'x'), 8);
  EXPECT_THAT(error_of(lost, {.drop_empty_layers = true, .model = "glm-4.5-air"}),
              HasSubstr("layers 1, 2 have no route, but GLM-4.5-Air has experts there"));
  EXPECT_EQ(import_text(lost, {.model = "glm-4.5-air"}).trace()->num_layers, 45);
}

// Imports 40 tokens in three layers with a model; layers without an 'x' are zeros.
Imported with_kinds(const std::string& recorded, std::vector<LayerKind> kinds, ImportOptions options = {}) {
  const auto moe =
      std::ranges::count_if(kinds, [](LayerKind k) { return k == LayerKind::kMoe || k == LayerKind::kHashMoe; });
  const ModelShape model{.name = "M",
                         .moe_layers = static_cast<int>(moe),
                         .dense_layers = static_cast<int>(std::ssize(kinds) - moe),
                         .experts = 16,
                         .top_k = 2,
                         .layer_kinds = std::move(kinds)};
  options.num_experts = 16;
  TraceAssembler assembler(options, model);
  const std::string bytes = layers_of(recorded, 2, 40);
  add_sequence(assembler, {.where = {.file = "in"}, .content = std::as_bytes(std::span(bytes))});
  return std::move(assembler).finish();
}

TEST(Importer, HashRoutedLayersAreNeverDropped) {
  using enum LayerKind;
  const Imported kept = with_kinds("0xx", {kHashMoe, kMoe, kMoe});
  EXPECT_EQ(kept.trace()->num_layers, 3);
  EXPECT_THAT(kept.report.notes, ::testing::Contains(HasSubstr("layers 0 have no route, but M has experts there")));
  EXPECT_THROW(with_kinds("0xx", {kHashMoe, kMoe, kMoe}, {.drop_empty_layers = true}), InputError);
  EXPECT_THAT(with_kinds("0xx", {kDense, kMoe, kMoe}).trace()->layer_ids, ElementsAre(1, 2));
  EXPECT_THAT(with_kinds("x0x", {kMoe, kDense, kMoe}).trace()->layer_ids, ElementsAre(0, 2));
  EXPECT_THAT(with_kinds("xx", {kMoe, kDense, kMoe}).trace()->layer_ids, ElementsAre(0, 2));
  EXPECT_THROW(with_kinds("xx0", {kMoe, kDense, kMoe}), InputError);
  EXPECT_THROW(with_kinds("xxxx", {kMoe, kDense, kMoe}), InputError);
}

// `tokens` rows of `layers` layers of distinct ids, the largest of which is `most`. The first `zeros` layers are zeros.
std::string unnamed(int layers, int zeros, int top_k, int most, int tokens = 20) {
  Ids ids;
  for (int t = 0; t < tokens; ++t) {
    for (int l = 0; l < layers; ++l) {
      for (int k = 0; k < top_k; ++k)
        ids.push_back(l < zeros ? 0 : t == 0 && k == 0 ? most : (t * 31 + l * 7 + k * 3) % (most - 1));
    }
  }
  return npy("<i2", fmt::format("({}, {}, {})", tokens, layers, top_k), raw(ids, 2));
}

TEST(Importer, LostHashLayersOfAKnownShapeAreNotDropped) {
  const ImportOptions drop{.num_experts = 256, .drop_empty_layers = true};
  const std::string flash = unnamed(43, 3, 6, 255);
  const std::string refusal =
      "3 of 43 layers have no route: with 256 experts and top-6, they are those that "
      "DeepSeek-V4-Flash routes by hash";
  EXPECT_THAT(error_of(flash, drop), HasSubstr(refusal));
  EXPECT_THAT(error_of(flash, {.drop_empty_layers = true}), HasSubstr(refusal)) << "256 experts are inferred";
  const Imported kept = import_text(flash);
  EXPECT_EQ(kept.trace()->num_layers, 43);
  EXPECT_THAT(kept.report.notes, ::testing::Contains(HasSubstr("DeepSeek-V4-Flash routes by hash")));
  EXPECT_THAT(error_of(unnamed(61, 3, 6, 383), {.num_experts = 384, .drop_empty_layers = true}),
              HasSubstr("DeepSeek-V4-Pro"));

  const auto layers = [](const std::string& array, const ImportOptions& options) {
    return import_text(array, options).trace()->num_layers;
  };
  EXPECT_EQ(layers(unnamed(61, 3, 8, 255), drop), 58) << "DeepSeek-V3's dense layers";
  EXPECT_EQ(layers(unnamed(61, 1, 8, 383), {.num_experts = 384, .drop_empty_layers = true}), 60) << "Kimi-K2's";
  EXPECT_EQ(layers(unnamed(43, 3, 8, 255), drop), 40) << "another top-k";
  EXPECT_EQ(layers(unnamed(43, 2, 6, 255), drop), 41) << "other layers";
  EXPECT_EQ(layers(unnamed(44, 3, 6, 255), drop), 41) << "another number of layers";
  EXPECT_EQ(layers(flash, {.num_experts = 257, .drop_empty_layers = true}), 40) << "another number of experts";
  EXPECT_THAT(error_of(flash, {.drop_empty_layers = true, .model = "DeepSeek-V4-Flash"}),
              HasSubstr("layers 0, 1, 2 have no route, but DeepSeek-V4-Flash has experts there"));
}

TEST(Importer, IdsWithoutWeightsOfAKnownShapeAreInferred) {
  const auto experts = [](const std::string& array, const ImportOptions& options = {}) {
    const Imported in = import_text(array, options);
    expect_valid(*in.trace());
    EXPECT_EQ(in.report.num_experts_inferred, options.num_experts == 0 && in.trace()->weightless_experts == 0);
    return std::pair(in.trace()->num_experts, in.trace()->weightless_experts);
  };
  EXPECT_EQ(experts(unnamed(4, 0, 12, 767)), std::pair(512, 256));
  EXPECT_EQ(experts(unnamed(4, 0, 12, 512)), std::pair(512, 256));
  EXPECT_THAT(import_text(unnamed(4, 0, 12, 767)).report.notes,
              ::testing::Contains("num_experts = 512 and 256 ids without weights are those of LongCat-Flash (top-12 of "
                                  "768 ids); if all have weights, give --experts 768"));
  EXPECT_EQ(experts(unnamed(4, 0, 12, 511)), std::pair(512, 0)) << "no id without weights";
  EXPECT_EQ(experts(unnamed(4, 0, 12, 768)), std::pair(769, 0)) << "an id beyond";
  EXPECT_EQ(experts(unnamed(4, 0, 11, 767)), std::pair(768, 0)) << "another top-k";
  EXPECT_EQ(experts(unnamed(4, 0, 12, 767), {.num_experts = 768}), std::pair(768, 0)) << "given";
  EXPECT_THAT(error_of(unnamed(4, 0, 12, 767), {.num_experts = 512}), HasSubstr("out of range"));
}

TEST(Importer, ChecksOfRoutesInferTheSameIdsWithoutWeights) {
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < 40 * 2 * 12; ++i) ids.push_back((i / 12 * 131 + i % 12 * (7 + i / 24 % 5)) % 768);
  ids.front() = 767;
  const std::string path = ::testing::TempDir() + "without_weights.npy";
  std::ofstream(path, std::ios::binary) << npy("<i2", "(40, 2, 12)", raw(ids, 2));
  const auto lines = [&](const ImportOptions& options) {
    return describe(check_route_files({path}, {options, {}, {}}));
  };
  EXPECT_THAT(lines({}),
              ElementsAre("no fault was found", HasSubstr("256 ids without weights are those of LongCat-Flash")));
  EXPECT_THAT(lines({.num_experts = 768}), ElementsAre("no fault was found"));
  EXPECT_THAT(lines({.num_experts = 512}), ElementsAre(HasSubstr("expert-range at layer 0")));
}

TEST(Importer, LayersThatAreTheSameConstantInAllTokensAreEmpty) {
  const Imported top1 = import_text(layers_of("0x0x", 1, 40), {.drop_empty_layers = true});
  EXPECT_THAT(top1.trace()->layer_ids, ElementsAre(1, 3));
  EXPECT_EQ(import_text(layers_of("0x0x", 1, 40)).trace()->num_layers, 4);
  EXPECT_EQ(import_text(layers_of("0x", 1, 15), {.drop_empty_layers = true}).trace()->num_layers, 2);  // may be routes
  Ids first_experts;
  for (int t = 0; t < 20; ++t) first_experts.insert(first_experts.end(), {0, 1, t % 5, 7});
  const Imported top2 = import_text(npy("|u1", "(20, 2, 2)", raw(first_experts, 1)), {.drop_empty_layers = true});
  EXPECT_THAT(top2.trace()->layer_ids, ElementsAre(1));
  first_experts[4 * 9 + 1] = 2;
  const Imported routes = import_text(npy("|u1", "(20, 2, 2)", raw(first_experts, 1)), {.drop_empty_layers = true});
  EXPECT_EQ(routes.trace()->num_layers, 2);
}

TEST(Importer, ASampleThatCannotBeReadIsSkippedAndCounted) {
  const std::vector<NamedText> files{{"a", npy("|u1", "(2, 1, 2)", raw({4, 1, 3, 2}, 1))},
                                     {"b", npy("|u1", "(0, 1, 2)", "")},
                                     {"c", npy("<u2", "(2, 1, 2)", raw({4, 1, 300, 9}, 2))},
                                     {"d", npy("|u1", "(1, 1, 2)", raw({5, 6}, 1))}};
  const Imported in = import_texts(files, {.num_experts = 8});
  EXPECT_THAT(routes_of(in), ElementsAre(4, 1, 3, 2, 5, 6));
  EXPECT_THAT(in.trace()->cu_seqlens, ElementsAre(0, 2, 3));
  EXPECT_EQ(in.report.rows, 3);
  ASSERT_EQ(in.report.skipped.size(), 2);
  EXPECT_EQ(in.report.skipped[1].sample, 2);
  EXPECT_EQ(in.report.sequences[1].sample, 3);
  EXPECT_THAT(in.report.notes,
              ::testing::Contains(HasSubstr("2 of 4 samples were skipped: sample 1 (b: routed_experts: has no tokens); "
                                            "sample 2 (c: routed_experts[1, 0, 0]: expert 300 is out of range")));
  EXPECT_EQ(error_of(files, {.num_experts = 8, .strict = true}), "b: routed_experts: has no tokens");
  EXPECT_EQ(error_of({files[1], files[1]}), "b: routed_experts: has no tokens; none of the 2 samples can be read");
}

TEST(Importer, AnEmptyFileAmongOthersIsASkippedSample) {
  const std::string good = npy("|u1", "(1, 1, 2)", raw({4, 1}, 1));
  const Imported in = import_texts({{"a", ""}, {"b", good}});
  EXPECT_THAT(routes_of(in), ElementsAre(4, 1));
  EXPECT_EQ(in.report.skipped.at(0).problem, "is empty");
  EXPECT_EQ(in.report.sequences.at(0).sample, 1);
  EXPECT_EQ(error_of({{"b", good}, {"a", ""}}, {.strict = true}), "a: is empty");
  EXPECT_EQ(error_of({{"a", ""}, {"b", ""}}), "a: is empty");
}

TEST(Importer, ASampleThatIsSkippedFirstDoesNotSetTheShape) {
  const std::string bad = npy("|u1", "(1, 1, 3)", raw({4, 1, 9}, 1));
  const std::string good = npy("|u1", "(1, 2, 2)", raw({4, 1, 2, 3}, 1));
  EXPECT_EQ(import_texts({{"bad", bad}, {"good", good}}, {.num_experts = 8}).trace()->num_layers, 2);
}

TEST(Importer, LastTokensWithoutARouteAreCounted) {
  const std::string ends_missing = npy("<i2", "(2, 2, 2)", raw({3, 1, 3, 2, -1, -1, -1, -1}, 2));
  const std::string ends_in_one_layer = npy("<i2", "(2, 2, 2)", raw({3, 1, 3, 2, 1, 2, -1, -1}, 2));
  const Imported in = import_texts({{"a", ends_missing}, {"b", ends_in_one_layer}, {"c", ends_missing}});
  EXPECT_EQ(in.report.last_tokens_without_route, 2);
  EXPECT_THAT(in.report.notes, ::testing::Contains(HasSubstr("2 last tokens have no route")));
  EXPECT_EQ(import_text(ends_in_one_layer).report.last_tokens_without_route, 0);
}

TEST(Importer, RefusesForemoesOwnFiles) {
  const std::string path = ::testing::TempDir() + "foremoe_importer_test.trace.safetensors";
  write_trace(*import_text(npy("|u1", "(1, 1, 2)", raw({4, 1}, 1))).trace(), path);
  const std::vector<std::string> paths{path};
  try {
    import_files(paths, {.num_layers = 1, .top_k = 2});  // with these options, any bytes could be SGLang's
    FAIL();
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr(path + ": is a foremoe.trace/1 file already"));
  }
  const std::vector<std::string> load{"data/load-q30-ep8.safetensors"};
  EXPECT_THROW(import_files(load), InputError);
}

TEST(Importer, SeveralFilesAreSequencesInTheirOrder) {
  const Imported in = import_texts(
      {{"b", npy("|u1", "(1, 1, 2)", raw({4, 1}, 1))}, {"a", npy("|i1", "(2, 1, 2)", raw({5, 6, -1, -1}, 1))}});
  EXPECT_THAT(in.trace()->cu_seqlens, ElementsAre(0, 1, 3));
  EXPECT_THAT(routes_of(in), ElementsAre(4, 1, 5, 6, -1, -1));
  EXPECT_FALSE(in.trace()->has_batching());
  EXPECT_THAT(in.trace()->prompt_lengths, IsEmpty());
  EXPECT_EQ(in.trace()->origin, "imported from 2 files of format npy");
}

TEST(Importer, LayersWithoutAnyRouteAreNotedAndDroppedOnRequest) {
  const std::string dense_first = npy("|u1", "(2, 3, 2)", raw({0, 0, 1, 2, 3, 4, 0, 0, 5, 6, 7, 8}, 1));
  const Imported kept = import_text(dense_first);
  EXPECT_EQ(kept.trace()->num_layers, 3);
  EXPECT_THAT(kept.report.notes, ::testing::Contains(HasSubstr("1 of 3 layers")));
  const Imported dropped = import_text(dense_first, {.drop_empty_layers = true});
  EXPECT_THAT(dropped.trace()->layer_ids, ElementsAre(1, 2));
  EXPECT_THAT(routes_of(dropped), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
}

TEST(Importer, AnIdOutOfRangeNamesFileAndIndex) {
  EXPECT_EQ(error_of(npy("|u1", "(2, 1, 2)", raw({1, 2, 3, 9}, 1)), {.num_experts = 8}),
            "in: routed_experts[1, 0, 1]: expert 9 is out of range; there are 8 experts");
  EXPECT_THAT(error_of(npy("<i2", "(1, 1, 2)", raw({3, -2}, 2))), HasSubstr("in: routed_experts[0, 0, 1]: expert -2"));
  EXPECT_THAT(error_of(npy("<i4", "(1, 1, 2)", raw({3, 70000}, 4))), HasSubstr("at most 65535"));
}

TEST(Importer, RowsOfFewerExpertsAreReadAndNoted) {
  const std::string rows = npy("<i2", "(2, 2, 3)", raw({3, -1, 1, 5, 2, 0, -1, 4, 2, -1, -1, -1}, 2));
  const Imported in = import_text(rows, {.num_experts = 6});
  EXPECT_THAT(routes_of(in), ElementsAre(3, -2, 1, 5, 2, 0, -2, 4, 2, -1, -1, -1)) << "-2: kUnassigned";
  EXPECT_EQ(in.report.rows_partial, 2);
  EXPECT_EQ(in.report.rows_recorded_missing, 1);
  EXPECT_THAT(in.trace()->top_k_of_layer, ElementsAre(2, 3));
  EXPECT_THAT(in.report.notes,
              ::testing::Contains("2 rows have fewer than 3 experts, always the same number in a layer"));

  const Imported uneven = import_text(npy("|u1", "(2, 1, 3)", raw({3, 255, 1, 255, 255, 2}, 1)), {.num_experts = 6});
  EXPECT_THAT(routes_of(uneven), ElementsAre(3, -2, 1, -2, -2, 2));
  EXPECT_THAT(uneven.trace()->top_k_of_layer, IsEmpty());
  EXPECT_THAT(uneven.report.notes, ::testing::Contains("2 rows have fewer than 3 experts"));
  EXPECT_THAT(routes_of(import_text(npy("|u1", "(1, 1, 2)", raw({254, 255}, 1)))), ElementsAre(254, 255));
  EXPECT_THAT(error_of(npy("|u1", "(1, 1, 2)", raw({3, 255}, 1))), HasSubstr("255 is the largest value of the type"))
      << "it may be an expert";
}

TEST(Importer, IdsWithoutWeightsAreKeptIfTheirNumberIsGiven) {
  const std::string rows = npy("<i2", "(2, 1, 3)", raw({3, 254, 1, 5, 255, 250}, 2));
  const Imported in = import_text(rows, {.num_experts = 200, .weightless_experts = 56});
  EXPECT_THAT(routes_of(in), ElementsAre(3, -2, 1, 5, -2, -2)) << "they need no expert";
  EXPECT_EQ(in.trace()->num_experts, 200);
  EXPECT_EQ(in.trace()->weightless_experts, 56);
  expect_valid(*in.trace());
  EXPECT_EQ(error_of(rows, {.num_experts = 200, .weightless_experts = 55}),
            "in: routed_experts[1, 0, 1]: expert 255 is out of range; there are 255 experts");
  EXPECT_THAT(error_of(rows, {.weightless_experts = 55}), HasSubstr("weightless_experts: needs `experts`"));
  EXPECT_THAT(error_of(rows, {.model = "meituan-longcat/LongCat-Flash-Chat"}),
              HasSubstr("give `experts`, the number of those with weights, and `weightless_experts`"));
}

// Every third row repeats 0, as if the engine wrote 0 for experts without weights.
TEST(Importer, ManyRowsWithRepeatedIdsAreRefusedUnlessAccepted) {
  std::vector<std::int64_t> ids;
  for (int t = 0; t < 30; ++t) {
    for (const int id : {0, 1 + t % 5, t % 3 == 0 ? 0 : 7, 8}) ids.push_back(id);
  }
  const std::string rows = npy("|u1", "(30, 1, 4)", raw(ids, 1));
  EXPECT_THAT(error_of(rows), HasSubstr("in: routed_experts[0, 0, 0]: 10 of 30 rows with a route repeat an id"));
  EXPECT_EQ(import_text(rows, {.drop_repeating_rows = true}).report.rows_repeating, 10);
  std::vector<std::int64_t> zeros = ids;  // layers without experts contain zeros only: no remapping
  for (int t = 0; t < 30; t += 3) std::fill_n(zeros.begin() + 4 * t, 4, 0);
  EXPECT_EQ(import_text(npy("|u1", "(30, 1, 4)", raw(zeros, 1))).report.rows_repeating, 10);
}

TEST(Importer, SequencesOfDifferentShapeAreRefused) {
  const std::string one = npy("|u1", "(1, 1, 2)", raw({4, 1}, 1));
  const std::string other = npy("|u1", "(1, 2, 2)", raw({4, 1, 2, 3}, 1));
  EXPECT_THAT(
      error_of({{"one.npy", one}, {"other.npy", other}}),
      HasSubstr("other.npy: routed_experts: has 2 layers and top-2, but the first sequence (one.npy) has 1 layers"));
  EXPECT_THAT(error_of(one, {.num_layers = 3}), HasSubstr("3 were asked for"));
  EXPECT_THAT(error_of(one, {.top_k = 4}), HasSubstr("4 were asked for"));
}

TEST(Importer, FilesWithoutAnyRouteNeedTheNumberOfExperts) {
  const std::string padding = npy("|u1", "(2, 1, 2)", raw({0, 0, 0, 0}, 1));
  EXPECT_THAT(error_of(padding), HasSubstr("nothing was recorded: switch recording on"));
  EXPECT_THAT(routes_of(import_text(padding, {.num_experts = 4})), ElementsAre(-1, -1, -1, -1));
}

TEST(Importer, UnknownBytesAreRefusedWithAHint) {
  EXPECT_THAT(error_of("hello"), HasSubstr("in: is in none of the formats npy, npz, torch"));
  EXPECT_EQ(error_of(""), "in: is empty");
  EXPECT_EQ(error_of(" \n"), "in: is empty");
  EXPECT_THROW(import_rollout({}), InputError);
  EXPECT_EQ(error_of("x", {.num_experts = 70000}),
            "experts: must be an integer from 0 to 65535 (is 70000; 0: unknown)");
}

TEST(Importer, MegatronFilesDoNotMixWithOthers) {
  const std::string trace = R"({"layer": 0, "rank": 0, "top_indices": [[0, 1]]})";
  EXPECT_THAT(error_of({{"a", trace}, {"b", "nrlre1:int8:1x1x2:AAE="}}),
              HasSubstr("b: is a nrlre1 file, but a is a megatron-trace"));
  EXPECT_THAT(error_of({{"b", npy("|u1", "(1, 1, 2)", raw({4, 1}, 1))}, {"a", trace}}),
              HasSubstr("a: is a megatron-trace file"));
}

TEST(Importer, EveryFormatCanBeFoundByItsName) {
  for (const auto format :
       {ImportFormat::kNpy, ImportFormat::kNpz, ImportFormat::kTorch, ImportFormat::kNpyBase64, ImportFormat::kJson,
        ImportFormat::kSglang, ImportFormat::kNrlre1, ImportFormat::kMegatronTrace, ImportFormat::kMegatronCounts}) {
    EXPECT_EQ(import_format_named(name_of(format)), format);
  }
  EXPECT_EQ(import_format_named("pickle"), std::nullopt);
}

TEST(Importer, FilesAreReadByPath) {
  const std::string path = ::testing::TempDir() + "foremoe_importer_test.npy";
  std::ofstream(path, std::ios::binary) << npy("|u1", "(1, 1, 2)", raw({4, 1}, 1));
  const std::vector<std::string> paths{path, path};
  const Imported in = import_files(paths);
  EXPECT_THAT(routes_of(in), ElementsAre(4, 1, 4, 1));
  EXPECT_EQ(in.trace()->name, path);
  const std::vector<std::string> absent{path + ".absent"};
  EXPECT_THROW(import_files(absent), InputError);
}

// Every prefix of a valid file, and every file with one changed byte, is imported or rejected with its location.
TEST(Importer, CutAndAlteredFilesNeverCrash) {
  const std::string array = npy("<u2", "(2, 2, 2)", raw({1, 2, 3, 4, 5, 6, 7, 8}, 2));
  const std::vector<std::string> good{
      array,
      R"({"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 1, "rank": 0, "num_tokens": 1, "topk": 2, "top_indices": [[0, 1]]})",
      R"({"iter": 1, "block": "decoder", "layer": 1, "tpe": [[3, 4], [5, 6]]})"};
  for (const std::string& text : good) {
    ASSERT_EQ(error_of(text), "");
    for (std::size_t cut = 0; cut < text.size(); ++cut) error_of(text.substr(0, cut));
    for (std::size_t at = 0; at < text.size(); ++at) {
      for (const char c : {'\0', '\xff', '"', '9', '}'}) {
        std::string altered = text;
        altered[at] = c;
        error_of(altered);
      }
    }
  }
}

}  // namespace foremoe::testing

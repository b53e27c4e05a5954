#include "foremoe/rollout/route_checks.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "foremoe/core/error.h"
#include "foremoe/rollout/route_report.h"
#include "foremoe/testing/random_traces.h"

namespace foremoe {
namespace {

using Bytes = std::vector<std::byte>;
using Damage = std::function<void(Bytes& routes)>;

constexpr std::size_t kRow = 8;
constexpr std::size_t kToken = 4 * kRow;  // of 4 layers, uint8

std::vector<std::string> names(const Damage& damage, const RouteExpectations& expected = {}) {
  auto [trace, bytes] = make_random_trace(
      {.type = RouteType::kU8, .lengths = {40, 30, 40}, .num_layers = 4, .top_k = 8, .num_experts = 128});
  damage(*bytes);
  std::vector<std::string> found;
  for (const RouteFinding& finding : find_route_faults(trace, expected).findings) found.push_back(finding.check);
  return found;
}

void fill(Bytes& routes, std::size_t at, std::size_t size, int value) {
  std::fill_n(routes.begin() + static_cast<std::ptrdiff_t>(at), size, static_cast<std::byte>(value));
}

void copy(Bytes& routes, std::size_t from, std::size_t to, std::size_t size) {
  std::memmove(routes.data() + to, routes.data() + from, size);
}

TEST(RouteChecks, FindNothingInCleanRoutes) {
  EXPECT_THAT(names([](Bytes&) {}), testing::IsEmpty());
}

TEST(RouteChecks, FindEachKindOfDamageAndNoOther) {
  const std::vector<std::pair<std::string, Damage>> cases{
      {"expert-range", [](Bytes& r) { fill(r, 5 * kToken, 1, 200); }},
      {"duplicate-experts", [](Bytes& r) { r[7] = r[6]; }},
      {"top-k-differs", [](Bytes& r) { fill(r, 7, 1, 255); }},
      {"padding", [](Bytes& r) { fill(r, 3 * kToken, 2 * kToken, 0); }},
      {"prefix-missing", [](Bytes& r) { fill(r, 0, 6 * kToken, 255); }},
      {"missing-rows", [](Bytes& r) { fill(r, 9 * kToken + kRow, kRow, 255); }},
      {"repeated-rows", [](Bytes& r) { copy(r, 9 * kToken, 10 * kToken, kToken); }},
      {"repeated-sequence", [](Bytes& r) { copy(r, 0, 70 * kToken, 40 * kToken); }},
      {"equal-layers",
       [](Bytes& r) {
         for (std::size_t t = 0; t < 110; ++t) copy(r, t * kToken, t * kToken + kRow, kRow);
       }},
      {"equal-layers",  // in sequence 1 alone
       [](Bytes& r) {
         for (std::size_t t = 40; t < 70; ++t) copy(r, t * kToken, t * kToken + kRow, kRow);
       }},
      {"constant-rows",
       [](Bytes& r) {
         for (std::size_t t = 1; t < 39; ++t) copy(r, kRow, t * kToken + kRow, kRow);
       }},
      {"empty-layer",
       [](Bytes& r) {
         for (std::size_t t = 0; t < 110; ++t) fill(r, t * kToken + 2 * kRow, kRow, 0);
       }},
  };
  for (const auto& [check, damage] : cases) {
    const std::vector<std::string> found = names(damage);
    EXPECT_THAT(found, testing::ElementsAre(check));
  }
}

TEST(RouteChecks, AcceptFewerExpertsInAllRowsOfALayerAndIdsWithoutWeights) {
  const Damage fewer = [](Bytes& r) {
    for (std::size_t t = 0; t < 110; ++t) {
      if (std::to_integer<int>(r[t * kToken + kRow]) != 255) fill(r, t * kToken + kRow, 1, 255);
    }
  };
  EXPECT_THAT(names(fewer), testing::IsEmpty());
  const Damage weightless = [](Bytes& r) { fill(r, 5 * kToken, 1, 200); };
  EXPECT_THAT(names(weightless, {.experts = 128, .weightless_experts = 80}), testing::IsEmpty());
  EXPECT_THAT(names(weightless, {.experts = 128, .weightless_experts = 72}), testing::ElementsAre("expert-range"));
}

TEST(RouteChecks, CompareLayersWithTheirKindsInTheModel) {
  using enum LayerKind;
  const auto found = [](const std::vector<LayerKind>& kinds, int empty) {
    auto [trace, bytes] = make_random_trace(
        {.type = RouteType::kU8, .lengths = {40, 30, 40}, .num_layers = 4, .top_k = 8, .num_experts = 128});
    for (std::size_t t = 0; t < 110 && empty >= 0; ++t)
      fill(*bytes, t * kToken + static_cast<std::size_t>(empty) * kRow, kRow, 0);
    std::vector<std::string> lines;
    for (const RouteFinding& of :
         find_route_faults(trace, {.layers = 3, .dense_layers = 1, .layer_kinds = kinds}).findings)
      lines.push_back(fmt::format("{} {} {}", of.check, of.layer, of.cause.find("hash") != std::string::npos));
    return lines;
  };
  using testing::ElementsAre;
  EXPECT_THAT(found({kMoe, kMoe, kDense, kMoe}, 2), ElementsAre());
  EXPECT_THAT(found({kMoe, kMoe, kNone, kHashMoe}, 2), ElementsAre());
  EXPECT_THAT(found({kMoe, kMoe, kDense, kMoe}, 1), ElementsAre("empty-layer 1 false", "layer-shift 2 false"));
  EXPECT_THAT(found({kHashMoe, kMoe, kMoe, kMoe}, 0), ElementsAre("empty-layer 0 true"));
  EXPECT_THAT(found({kDense, kMoe, kMoe, kMoe}, -1), ElementsAre("layer-shift 0 false"));
}

TEST(RouteChecks, NameTheModelWhoseHashLayersWereLost) {
  const auto report = [](int layers, int top_k, int experts, int empty, const RouteExpectations& expected = {}) {
    auto [trace, bytes] = make_random_trace(
        {.type = RouteType::kU16, .lengths = {40, 30}, .num_layers = layers, .top_k = top_k, .num_experts = experts});
    const std::size_t row = 2 * static_cast<std::size_t>(top_k);
    for (std::size_t t = 0; t < 70; ++t)
      fill(*bytes, t * static_cast<std::size_t>(layers) * row, static_cast<std::size_t>(empty) * row, 0);
    return find_route_faults(trace, expected);
  };
  const RouteReport lost = report(43, 6, 256, 3);
  ASSERT_EQ(lost.findings.size(), 1U);
  EXPECT_EQ(lost.findings[0].check, "empty-layer");
  EXPECT_EQ(lost.findings[0].count, 3);
  EXPECT_THAT(lost.findings[0].cause, testing::HasSubstr("that DeepSeek-V4-Flash routes by hash"));
  EXPECT_THAT(report(61, 6, 384, 3).findings[0].cause, testing::HasSubstr("DeepSeek-V4-Pro"));
  for (const auto& [layers, top_k, experts] :
       std::vector<std::array<int, 3>>{{61, 8, 256}, {43, 8, 256}, {44, 6, 256}, {43, 6, 255}}) {
    const RouteReport dense = report(layers, top_k, experts, 3);
    EXPECT_THAT(dense.findings, testing::IsEmpty()) << layers << ' ' << top_k << ' ' << experts;
    EXPECT_EQ(dense.remarks.size(), 1U);
  }
  EXPECT_THAT(report(43, 6, 256, 3, {.layers = 40, .dense_layers = 3}).findings, testing::IsEmpty()) << "as expected";
}

TEST(RouteChecks, FindABlockThatRepeats) {
  const Damage aborted = [](Bytes& r) { copy(r, 0, 12 * kToken, 20 * kToken); };  // 12 rows, then the same and others
  EXPECT_THAT(names(aborted), testing::ElementsAre("repeated-block"));
  EXPECT_THAT(names([](Bytes& r) { copy(r, 0, 12 * kToken, 7 * kToken); }), testing::IsEmpty());
  const auto with_fewer_bits = [](std::size_t rows) {  // 77 bits
    auto [trace, bytes] =
        make_random_trace({.type = RouteType::kU8, .lengths = {80}, .num_layers = 4, .top_k = 4, .num_experts = 64});
    copy(*bytes, 0, 20 * 16, rows * 16);
    return find_route_faults(trace, {}).findings.size();
  };
  EXPECT_EQ(with_fewer_bits(15), 0);
  EXPECT_EQ(with_fewer_bits(16), 1);
}

TEST(RouteChecks, NoteSequencesThatAreTooShortToCompare) {
  const auto [trace, bytes] =
      make_random_trace({.type = RouteType::kU8, .lengths = {16, 15, 40, 1}, .num_layers = 4, .num_experts = 128});
  EXPECT_THAT(find_route_faults(trace, {}).remarks,
              testing::ElementsAre(testing::StartsWith("2 of 4 sequences have fewer than 16 tokens")));
}

TEST(RouteChecks, CompareWithWhatIsExpected) {
  const Damage none = [](Bytes&) {};
  using testing::ElementsAre;
  EXPECT_THAT(names(none, {.lengths = {40, 31, 40}}), ElementsAre());
  EXPECT_THAT(names(none, {.lengths = {40, 35, 40}}), ElementsAre("row-count"));
  EXPECT_THAT(names(none, {.top_k = 6}), ElementsAre("top-k-differs"));
  EXPECT_THAT(names(none, {.layers = 3}), ElementsAre("mtp-layers"));
  EXPECT_THAT(names(none, {.layers = 3, .dense_layers = 1}), ElementsAre("layer-shift"));
  EXPECT_THAT(names(none, {.weight_versions = {{"1"}, {}, {"2"}}}), ElementsAre("weight-versions"));
  EXPECT_THROW(names(none, {.lengths = {40}}), InputError);
}

TEST(RouteChecks, NameWeightVersionsThatDifferBetweenOrWithinSequences) {
  const auto [trace, bytes] = make_random_trace({.lengths = {40, 30, 20, 20}});
  const auto findings = [&, &trace = trace](const std::vector<std::vector<std::string>>& versions) {
    return find_route_faults(trace, {.weight_versions = versions}).findings;
  };
  EXPECT_THAT(findings({{}, {"7"}, {}, {"7"}}), testing::IsEmpty());
  const RouteFinding between = findings({{}, {"7"}, {"8"}, {"7", "8"}}).at(0);
  EXPECT_EQ(between.sequence, 2);
  EXPECT_EQ(between.count, 2);
  EXPECT_EQ(between.cause, "sampled with weights 8, but sequence 1 with 7");
  const RouteFinding within = findings({{}, {}, {"7", "8"}, {"7"}}).at(0);
  EXPECT_EQ(within.sequence, 2);
  EXPECT_EQ(within.count, 1);
  EXPECT_EQ(within.cause, "sampled with weights 7 and 8");
}

TEST(RouteChecks, NameTheFirstPlaceAndTheNumberOfPlaces) {
  auto [trace, bytes] =
      make_random_trace({.type = RouteType::kU8, .lengths = {40, 30}, .num_layers = 4, .top_k = 8, .num_experts = 128});
  fill(*bytes, 45 * kToken + 2 * kRow, 1, 200);
  fill(*bytes, 46 * kToken + 2 * kRow, 1, 201);
  const RouteReport report = find_route_faults(trace, {});
  const std::vector<RouteFinding>& found = report.findings;
  ASSERT_EQ(found.size(), 1);
  EXPECT_EQ(found[0].sequence, 1);
  EXPECT_EQ(found[0].token, 5);
  EXPECT_EQ(found[0].layer, 2);
  EXPECT_EQ(found[0].count, 2);
  EXPECT_THAT(describe(report)[0], testing::HasSubstr("expert-range at layer 2, sequence 1, token 5 (first of 2)"));
}

}  // namespace
}  // namespace foremoe

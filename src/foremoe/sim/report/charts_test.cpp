// Charts say what their data say: places, lengths, colours and numbers.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>

#include "foremoe/sim/report/bar_chart.h"
#include "foremoe/sim/report/box_chart.h"
#include "foremoe/sim/report/heat_map.h"
#include "foremoe/sim/report/lane_chart.h"
#include "foremoe/sim/report/numbers.h"
#include "foremoe/sim/report/scatter_chart.h"

namespace foremoe::report {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// A number of the first element with this class and tooltip.
double attribute(const std::string& svg, const std::string& css, const std::string& tooltip, const std::string& name) {
  const std::regex element("<\\w+ class=\"" + css + "\"([^>]*)><title>" + tooltip + "<");
  std::smatch match;
  if (!std::regex_search(svg, match, element)) {
    ADD_FAILURE() << "no " << css << " that says " << tooltip;
    return 0;
  }
  const std::string attributes = match[1];
  std::smatch value;
  EXPECT_TRUE(std::regex_search(attributes, value, std::regex(" " + name + "=\"([-0-9.]+)\""))) << name;
  return std::stod(value[1]);
}

BarChart two_bars() {
  return {.text = {.id = "b", .title = "Seconds", .description = "by policy"},
          .axis = "seconds",
          .series = {{.name = "experts", .css = "s2"}, {.name = "copies", .css = "s5"}},
          .bars = {{.row = {.name = "vanilla", .text = "8 s"}, .values = {8, 0}},
                   {.row = {.name = "eplb", .text = "6 s"}, .values = {4, 2}}},
          .value_text = tick_text,
          .tick_text = tick_text};
}

TEST(BarChart, LengthsAreInProportionAndPartsFollowEachOther) {
  for (const Width width : {Width::kWide, Width::kNarrow}) {
    const std::string svg = draw(two_bars(), width);
    const double vanilla = attribute(svg, "seg s2", "vanilla, experts: 8", "width");
    const double experts = attribute(svg, "seg s2", "eplb, experts: 4", "width");
    const double copies = attribute(svg, "seg s5", "eplb, copies: 2", "width");
    EXPECT_NEAR(experts / vanilla, 0.5, 0.002);
    EXPECT_NEAR(copies / vanilla, 0.25, 0.002);
    EXPECT_NEAR(attribute(svg, "seg s2", "eplb, experts: 4", "x") + experts,
                attribute(svg, "seg s5", "eplb, copies: 2", "x"), 0.15);
    EXPECT_THAT(svg, Not(HasSubstr("vanilla, copies"))) << "nothing is drawn for nothing";
  }
}

TEST(BarChart, HasTitleDescriptionNamesAndTexts) {
  const std::string svg = draw(two_bars(), Width::kWide);
  for (const char* text : {"<title id=\"b-wide-t\">Seconds</title>", "<desc id=\"b-wide-d\">by policy</desc>",
                           "role=\"img\"", ">vanilla<", ">8 s<", ">seconds<", ">copies<"}) {
    EXPECT_THAT(svg, HasSubstr(text));
  }
}

TEST(BarChart, EverythingStaysInsideOfTheDrawing) {
  for (const Width width : {Width::kWide, Width::kNarrow}) {
    const std::string svg = draw(two_bars(), width);
    const double end =
        attribute(svg, "seg s2", "vanilla, experts: 8", "x") + attribute(svg, "seg s2", "vanilla, experts: 8", "width");
    EXPECT_LT(end, drawn_width(width) - 10) << "room for the text after it";
  }
}

TEST(Quantiles, AreThoseOfNumpy) {
  const std::vector<double> values{4, 1, 3, 2};  // numpy.percentile([1, 2, 3, 4], [25, 50, 75]) = 1.75, 2.5, 3.25
  const Quantiles q = quantiles(values);
  EXPECT_DOUBLE_EQ(q.least, 1);
  EXPECT_DOUBLE_EQ(q.p25, 1.75);
  EXPECT_DOUBLE_EQ(q.median, 2.5);
  EXPECT_DOUBLE_EQ(q.p75, 3.25);
  EXPECT_DOUBLE_EQ(q.p99, 3.97);
  EXPECT_DOUBLE_EQ(q.most, 4);
  EXPECT_DOUBLE_EQ(q.mean, 2.5);
}

TEST(Quantiles, OfOneValueAreThatValueAndOfNoneZero) {
  EXPECT_DOUBLE_EQ(quantiles(std::vector<double>{7}).p99, 7);
  EXPECT_DOUBLE_EQ(quantiles({}).most, 0);
}

TEST(BoxChart, SaysEveryNumberOfARowOnHovering) {
  BoxChart chart{.text = {.id = "r", .title = "rho", .description = ""},
                 .axis = "ρ",
                 .rows = {{.row = {.name = "eplb"}, .values = quantiles(std::vector<double>{1, 1.5, 2})}},
                 .value_text = tick_text};
  EXPECT_THAT(draw(chart, Width::kWide), HasSubstr("eplb: least 1, median 1.5, mean 1.5, 99 % up to 1.99, most 2<"));
}

TEST(HeatMap, BinsAreBoundedFromBelow) {
  const std::vector<double> bounds{0.5, 1, 2};
  EXPECT_EQ(bin_of(0.2, bounds), 0);
  EXPECT_EQ(bin_of(0.5, bounds), 1);
  EXPECT_EQ(bin_of(1.99, bounds), 2);
  EXPECT_EQ(bin_of(9, bounds), 3);
}

HeatMap checkerboard() {
  HeatMap map{.text = {.id = "h", .title = "Load", .description = ""},
              .rows = {.label = "micro-step"},
              .columns = {.label = "rank"},
              .bin = Array<int, 2>({2, 3}),
              .bounds = {"1", "2"},
              .least = "cold",
              .most = "hot",
              .colours = "h",
              .cell_text = [](std::size_t r, std::size_t c) { return tick_text(static_cast<double>(10 * r + c)); }};
  map.bin(0, 2) = 2;
  map.bin(1, 0) = 1;
  return map;
}

TEST(HeatMap, ColoursAreWhereTheirValuesAre) {
  const std::string svg = draw(checkerboard(), Width::kWide);
  EXPECT_GT(attribute(svg, "cell h2", "2", "x"), attribute(svg, "cell h0", "1", "x"));
  EXPECT_DOUBLE_EQ(attribute(svg, "cell h2", "2", "y"), attribute(svg, "cell h0", "1", "y"));
  EXPECT_GT(attribute(svg, "cell h1", "10", "y"), attribute(svg, "cell h0", "0", "y"));
  for (const char* text : {">micro-step<", ">rank<", ">cold<", ">hot<"}) EXPECT_THAT(svg, HasSubstr(text));
}

TEST(HeatMap, ANarrowOneIsSmallerButHasAllColours) {
  const std::string svg = draw(checkerboard(), Width::kNarrow);
  for (const char* css : {"<path class=\"cell h0\"", "<path class=\"cell h1\"", "<path class=\"cell h2\""}) {
    EXPECT_THAT(svg, HasSubstr(css));
  }
  EXPECT_LT(svg.size(), draw(checkerboard(), Width::kWide).size());
}

TEST(ParetoFront, HasThosePointsThatNoneBeatsInBoth) {
  const auto at = [](double x, double y) { return ScatterPoint{.x = x, .y = y}; };
  //  4 |            e        a beats c (as far left, higher); b beats d; f equals b and comes later
  //  3 |      b f      d
  //  2 | a
  //  1 | c
  const std::vector<ScatterPoint> points{at(1, 2), at(3, 3), at(1, 1), at(5, 3), at(4, 4), at(3, 3)};
  EXPECT_THAT(pareto_front(points), ElementsAre(0U, 1U, 4U));
  EXPECT_TRUE(pareto_front({}).empty());
}

TEST(ScatterChart, DrawsEveryPointHigherWhereItIsMore) {
  ScatterChart chart{.text = {.id = "m", .title = "Memory", .description = ""},
                     .x_axis = "GB",
                     .y_axis = "speedup",
                     .series = {{.name = "static", .css = "p0"}},
                     .points = {{.x = 1, .y = 1, .tooltip = "low"}, {.x = 2, .y = 3, .tooltip = "high"}},
                     .x_text = tick_text,
                     .y_text = tick_text};
  const std::string svg = draw(chart, Width::kNarrow);
  EXPECT_LT(attribute(svg, "mark p0", "high", "cy"), attribute(svg, "mark p0", "low", "cy"));
  EXPECT_GT(attribute(svg, "mark p0", "high", "cx"), attribute(svg, "mark p0", "low", "cx"));
  EXPECT_THAT(svg, HasSubstr("class=\"front\""));
}

TEST(LaneChart, SpansBeginAndEndWhenTheyDid) {
  const LaneChart chart{.text = {.id = "t", .title = "Timeline", .description = ""},
                        .axis = "ms",
                        .series = {{.name = "experts", .css = "s2"}, {.name = "copies", .css = "s5"}},
                        .lanes = {{.name = "rank 0",
                                   .spans = {{.series = 0, .begin = 2, .end = 6, .beneath = false, .name = "experts"},
                                             {.series = 1, .begin = 2, .end = 4, .beneath = true, .name = "copy"}}}},
                        .end = 8,
                        .tick_text = tick_text,
                        .value_text = tick_text};
  const std::string svg = draw(chart, Width::kWide);
  const double experts = attribute(svg, "span s2", "rank 0, experts: 4", "width");
  EXPECT_NEAR(attribute(svg, "span s5", "rank 0, copy: 2", "width") / experts, 0.5, 0.002);
  EXPECT_GT(attribute(svg, "span s5", "rank 0, copy: 2", "y"), attribute(svg, "span s2", "rank 0, experts: 4", "y"));
}

}  // namespace
}  // namespace foremoe::report

#include "foremoe/sim/report/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>
#include <set>

#include "foremoe/sim/report/test_reports.h"

namespace foremoe::report {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

std::set<std::string> sections_of(const std::string& page) {
  std::set<std::string> ids;
  const std::regex section("<section id=\"([^\"]+)\"");
  for (std::sregex_iterator it(page.begin(), page.end(), section), end; it != end; ++it) ids.insert((*it)[1]);
  return ids;
}

TEST(ReportPage, HasEverySectionThatThereIsDataFor) {
  EXPECT_EQ(sections_of(to_html(test::report())),
            (std::set<std::string>{"policies", "load", "balance", "shares", "time", "ablation", "memory", "traffic",
                                   "timeline"}));
}

TEST(ReportPage, LeavesOutWhatThereIsNoDataFor) {
  Report report = test::report();
  report.loads.reset();
  report.ablation.clear();
  report.memory.clear();
  report.timelines.clear();
  EXPECT_EQ(sections_of(to_html(report)), (std::set<std::string>{"policies", "balance", "shares", "time", "traffic"}));
}

TEST(ReportPage, AReportOfNothingIsStillAPage) {
  const std::string page = to_html(Report{});
  EXPECT_THAT(page, HasSubstr("</html>"));
  EXPECT_EQ(sections_of(page), (std::set<std::string>{"policies"}));
}

TEST(ReportPage, TellsTheNumbersThatMatterInASentence) {
  Report report = test::report();
  PolicyResult& vanilla = report.policies.front();
  PolicyResult& ours = report.policies[5];
  vanilla.step_seconds = 20;
  vanilla.rho = {2.5, 3.5};
  ours.step_seconds = 12.5;
  ours.ideal_step_seconds = 12.25;
  ours.speedup = 1.6;
  ours.rho = {1.01, 1.03};
  const std::string page = to_html(report);
  for (const char* words : {"foremoe takes 12.5\u00A0s", "vanilla takes 20.0\u00A0s", "1.60× as fast",
                            "98.0\u00A0% of what perfect balance",
                            "1.020 times the mean load on average instead of 3.000", "1 guest slot per rank"}) {
    EXPECT_THAT(page, HasSubstr(words));
  }
}

TEST(ReportPage, EveryPlotHasItsNumbersInATable) {
  const std::string page = to_html(test::report());
  EXPECT_EQ(count(page, "class=\"chart wide\""), count(page, "class=\"chart narrow\""));
  EXPECT_EQ(count(page, "class=\"chart wide\""), count(page, "<details>"));
  EXPECT_GE(count(page, "<details>"), 12);
}

TEST(ReportPage, TablesHaveTheNumbersOfThePlots) {
  Report report = test::report();
  report.loads->before = Array<std::int64_t, 2>({1, 16}, 0);
  report.loads->before(0, 3) = 300;
  report.loads->before(0, 4) = 100;  // mean 25
  const std::string page = to_html(report);
  EXPECT_THAT(page, HasSubstr("<td>12.00</td><td>4.00</td><td>0.00</td>"));
  EXPECT_THAT(page, HasSubstr("micro-step 0, rank 3: 12.0 × mean"));
}

TEST(ReportPage, ASkippedPolicyIsToldWithItsReasonAndNotDrawn) {
  const std::string page = to_html(test::report());
  EXPECT_EQ(count(page, "finemoe-symmetric"), 1);
  EXPECT_THAT(page, HasSubstr("skipped: needs 8 guest slots, there is 1"));
}

TEST(ReportPage, HostileNamesAreText) {
  const std::string evil = "</title></style><script>alert(1)</script><img src=x onerror=\"alert(2)\">'";
  Report report = test::report();
  report.model = report.cluster = report.input = evil;
  for (PolicyResult& p : report.policies) p.policy += evil;
  report.policies.back().skipped = evil;
  report.before += evil;
  report.after += evil;
  report.settings.push_back({evil, evil});
  report.ablation.front().stages = evil;
  report.memory.front().residency = evil;
  report.traffic.front().policy = evil;
  report.timelines.front().policy = report.timelines.front().what = evil;
  report.timelines.front().lanes.front().name = evil;
  report.timelines.front().lanes.front().spans.front() = {evil, evil, 0, 1e-3, false};
  report.policies.front().recompute.parts.front().name = evil;
  report.policies.front().links.front().link = evil;
  const std::string page = to_html(report);
  EXPECT_THAT(page, Not(HasSubstr("<script")));
  EXPECT_THAT(page, Not(HasSubstr("<img")));
  EXPECT_THAT(page, Not(HasSubstr("onerror=\"")));
  EXPECT_EQ(count(page, "</title></style>"), 0);
  EXPECT_GT(count(page, "&lt;script&gt;"), 40);
}

TEST(ReportPage, NeedsNothingBesideItself) {
  const std::string page = to_html(test::report());
  for (const char* never : {"http://", "https://", "<script", "<link rel=\"stylesheet\"", "@import", "url(",
                            " style=\"", " src=", "javascript:"}) {
    EXPECT_THAT(page, Not(HasSubstr(never)));
  }
  EXPECT_THAT(page, HasSubstr("Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-"));
}

TEST(ReportPage, IdsAreUnique) {
  const std::string page = to_html(test::report());
  std::set<std::string> ids;
  const std::regex id(" id=\"([^\"]+)\"");
  for (std::sregex_iterator it(page.begin(), page.end(), id), end; it != end; ++it) {
    EXPECT_TRUE(ids.insert((*it)[1]).second) << (*it)[1];
  }
}

TEST(ReportPage, ManyRanksAreShownInGroupsByTheirMostLoaded) {
  const std::string page = to_html(test::report({.ranks = 1024, .micro_steps = 100}));
  EXPECT_THAT(page, HasSubstr("ranks, 16 in a cell: the most loaded"));
  EXPECT_THAT(page, HasSubstr("micro-steps, 2 in a cell: the most loaded"));
  EXPECT_LT(page.size(), 3'000'000U);
}

TEST(ReportPage, OneNodeShowsTheTrafficInsideOfIt) {
  const std::string page = to_html(test::report({.ranks = 8}));
  EXPECT_THAT(page, HasSubstr("Traffic inside the node"));
  EXPECT_THAT(page, Not(HasSubstr("Bytes from node to node")));
}

TEST(ReportPage, EqualReportsAreEqualBytes) { EXPECT_EQ(to_html(test::report()), to_html(test::report())); }

}  // namespace
}  // namespace foremoe::report

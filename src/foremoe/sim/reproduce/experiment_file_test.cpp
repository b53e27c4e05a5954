#include "foremoe/sim/reproduce/experiment_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/core/error.h"
#include "foremoe/sim/reproduce/test_experiment_text.h"

namespace foremoe {
namespace {

const std::string kSmall = std::string(test::kExperimentHead) + R"(
columns = ["rho_mean", "straggler"]

[every_input]
routing = "w2"
ranks = 4
experts = 16
top_k = 2

[[input]]
label = "{layers} layers"
layers = [1, 3]

[every_system]
guest_slots = 1

[[system]]
label = "none"
policy = "vanilla"

[[system]]
label = "ours"
policy = "foremoe"
guest_slots = 2
stages = "BT"

[[published]]
input = "1 layers"
system = "ours"
column = "rho_mean"
value = 1.25

[[aim]]
column = "rho_mean"
at_most = 2
)";

std::string with(std::string_view from, std::string_view to) { return test::with(kSmall, from, to); }

void expect_refused(const std::string& text, const std::vector<std::string>& words) {
  try {
    (void)parse_experiment(text, "mine.toml");
    ADD_FAILURE() << "accepted";
  } catch (const InputError& error) {
    EXPECT_EQ(error.where().file, "mine.toml");
    for (const std::string& word : words) EXPECT_THAT(error.what(), testing::HasSubstr(word));
  }
}

TEST(ExperimentFile, ListsMakeOneInputOfEachValueAndCommonKeysHoldForAll) {
  const Experiment experiment = parse_experiment(kSmall, "folder/mine.toml");
  EXPECT_EQ(experiment.name, "mine");
  ASSERT_EQ(experiment.inputs.size(), 2);
  EXPECT_EQ(experiment.inputs[0].label, "1 layers");
  EXPECT_EQ(experiment.inputs[1].label, "3 layers");
  EXPECT_EQ(experiment.inputs[1].options.num_layers, 3);
  EXPECT_EQ(experiment.inputs[1].options.num_ranks, 4);
}

TEST(ExperimentFile, ATableSaysOtherwiseThanWhatAllHaveInCommon) {
  const Experiment experiment = parse_experiment(kSmall, "mine.toml");
  ASSERT_EQ(experiment.systems.size(), 2);
  EXPECT_EQ(experiment.systems[0].options.guest_slots, 1);
  EXPECT_EQ(experiment.systems[1].options.guest_slots, 2);
  EXPECT_TRUE(experiment.systems[1].options.stages.base);
  EXPECT_FALSE(experiment.systems[1].options.stages.replication);
  EXPECT_TRUE(experiment.systems[1].options.stages.tokens);
}

TEST(ExperimentFile, WhatIsWrongIsNamedWithFileKeyAndIndex) {
  expect_refused(with("title = \"A hot rank\"", ""), {"title", "is missing"});
  expect_refused(with("title = \"A hot rank\"", "title = 3"), {"title", "expected a text"});
  expect_refused(with("ranks = 4", "ranks = 0"), {"input[0].ranks", "expected 1"});
  expect_refused(with("ranks = 4", "rank = 4"), {"input[0].rank", "no such key"});
  expect_refused(with("routing = \"w2\"", "routing = \"w9\""), {"input[0].routing", "'w9'", "zipf"});
  expect_refused(with("stages = \"BT\"", "stages = \"BX\""), {"system[1].stages", "'BX'"});
  expect_refused(with("policy = \"foremoe\"", "policy = \"nobody\""), {"system[1].policy", "'nobody'", "vanilla"});
  expect_refused(with("guest_slots = 2", "guest_slots = \"two\""),
                 {"system[1].guest_slots", "'two' is not a whole number"});
  expect_refused(with("at_most = 2", ""), {"aim[0].at_least"});
  expect_refused(with("value = 1.25", ""), {"published[0].value", "is missing"});
  expect_refused(with("\"straggler\"]", "\"stragler\"]"), {"columns", "'stragler'", "straggler_less"});
  expect_refused(with("label = \"ours\"", "label = \"none\""), {"system", "'none' twice"});
  expect_refused(with("system = \"ours\"", "system = \"yours\""), {"published", "no system 'yours'"});
  expect_refused(with("title = \"A hot rank\"", "title = "), {"line 2"});
}

TEST(ExperimentFile, AModelledFigureNeedsAClusterAndAModel) {
  expect_refused(with("\"straggler\"]", "\"speedup\"]"), {"columns", "'speedup' needs cluster and model"});
}

TEST(ExperimentFile, AnInputHasNoMoreLayersThanItsModel) {
  const std::string modelled = with("ranks = 4", "ranks = 4\ncluster = \"h100\"\nmodel = \"Mixtral-8x7B\"");
  const auto layers = [&](const char* list) { return test::with(modelled, "layers = [1, 3]", list); };
  (void)parse_experiment(layers("layers = [1, 32]"), "mine.toml");
  expect_refused(layers("layers = [1, 33]"), {"input[1].layers", "33", "32 MoE layers"});
}

TEST(ExperimentFile, AnUnknownNameIsAnsweredWithThoseThereAre) {
  try {
    (void)find_experiment("nothing-like-this");
    ADD_FAILURE();
  } catch (const InputError& error) {
    for (const std::string& name : experiment_names()) EXPECT_THAT(error.what(), testing::HasSubstr(name));
  }
}

TEST(ExperimentFile, EveryExperimentOfTheProgramCanBeRead) {
  EXPECT_FALSE(experiment_names().empty());
  for (const std::string& name : experiment_names()) {
    SCOPED_TRACE(name);
    const Experiment experiment = find_experiment(name);
    EXPECT_EQ(experiment.name, name);
    EXPECT_FALSE(experiment.finding.empty()) << "what came out is not told";
  }
}

}  // namespace
}  // namespace foremoe

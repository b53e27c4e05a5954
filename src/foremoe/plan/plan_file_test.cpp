#include "foremoe/plan/plan_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "foremoe/core/error.h"
#include "foremoe/core/safetensors.h"
#include "foremoe/testing/random_plans.h"
#include "foremoe/testing/same_plan.h"

namespace foremoe {
namespace {

using test::expect_same_plan;

class PlanFile : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }

  const std::string path_ =
      testing::TempDir() + testing::UnitTest::GetInstance()->current_test_info()->name() + ".safetensors";
};

TEST_F(PlanFile, RoundTripsEveryPlan) {
  const LoadTable load = test::random_load({.micro_steps = 4}, 1);
  for (const Residency residency : {Residency::kStatic, Residency::kResident, Residency::kShared, Residency::kFree}) {
    for (const int in_flight : {1, 2, 8}) {
      StepPlan plan = test::random_plan(load, {residency, 2, in_flight}, 1);
      plan.options = R"({"guest-slots": 2, "note": "größer"})";
      write_plan(plan, path_);
      expect_same_plan(read_plan(path_), plan);
    }
  }
}

TEST_F(PlanFile, OmitsBoundsThatThePlanDoesNotRecord) {
  StepPlan plan = test::random_plan(test::random_load({}, 1), {}, 1);
  plan.max_load = plan.lower_bound = {};
  write_plan(plan, path_);
  EXPECT_FALSE(Safetensors::open(path_).has("max_load"));
  expect_same_plan(read_plan(path_), plan);
}

TEST_F(PlanFile, StoresTheNarrowestTypesThatHoldAllValues) {
  StepPlan plan = test::random_plan(test::random_load({}, 1), {}, 1);
  write_plan(plan, path_);
  EXPECT_EQ(Safetensors::open(path_).tensors().at("slot_expert").dtype, DType::kI16);
  EXPECT_EQ(Safetensors::open(path_).tensors().at("slot_tokens").dtype, DType::kU32);

  plan.slot_tokens(0, 0, 0, 0) = Tokens{std::int64_t{1} << 32};
  write_plan(plan, path_);
  EXPECT_EQ(Safetensors::open(path_).tensors().at("slot_tokens").dtype, DType::kI64);
  expect_same_plan(read_plan(path_), plan);

  const StepPlan wide = test::random_plan(
      test::random_load({.micro_steps = 1, .layers = 1, .ranks = 1, .experts = 32769, .ranks_per_node = 1}, 1, 2), {},
      1);
  write_plan(wide, path_);
  EXPECT_EQ(Safetensors::open(path_).tensors().at("slot_expert").dtype, DType::kI32);
  expect_same_plan(read_plan(path_), wide);
}

TEST_F(PlanFile, IsRejectedForAnotherLoad) {
  const LoadTable load = test::random_load({}, 1);
  write_plan(test::random_plan(load, {}, 1), path_);
  EXPECT_EQ(read_plan_for(load, path_).load_digest, load_digest(load));
  EXPECT_THROW(read_plan_for(test::random_load({}, 2), path_), InputError);
}

// ---- malformed files ----

std::vector<std::byte> bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

TEST_F(PlanFile, IsRejectedIfItsOptionsAreDeepOrLong) {
  StepPlan plan = test::random_plan(test::random_load({}, 1), {}, 1);
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  for (const std::string& option : {deep, deep.substr(99'990, 20), '"' + std::string(1 << 16, 'x') + '"'}) {
    plan.options = R"({"note": )" + option + "}";
    write_plan(plan, path_);
    EXPECT_THROW(read_plan(path_), InputError) << option.size();
  }
}

TEST_F(PlanFile, IsRejectedIfTruncatedAnywhere) {
  write_plan(test::random_plan(test::random_load({}, 1), {}, 1), path_);
  const std::vector<std::byte> bytes = bytes_of(path_);
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_THROW(read_plan(Safetensors::parse(std::span(bytes).first(length), "cut")), InputError) << length;
  }
  EXPECT_NO_THROW(read_plan(Safetensors::parse(bytes, "whole")));
}

TEST_F(PlanFile, IsReadOrRejectedIfAnyByteIsDamaged) {
  write_plan(test::random_plan(test::random_load({}, 1), {.in_flight = 2}, 1), path_);
  const std::vector<std::byte> bytes = bytes_of(path_);
  int refused = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (const int flip : {0x01, 0x10, 0x80, 0xff}) {
      std::vector<std::byte> damaged = bytes;
      damaged[i] ^= static_cast<std::byte>(flip);
      try {
        read_plan(Safetensors::parse(damaged, "damaged"));
      } catch (const InputError& error) {
        EXPECT_EQ(error.where().file, "damaged");
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, static_cast<int>(bytes.size()));
}

// The parts of a plan file. A test changes one part and writes the file again.
struct Parts {
  struct Tensor {
    DType dtype;
    std::vector<std::size_t> shape;
    std::vector<std::int64_t> values;
  };
  std::map<std::string, Tensor> tensors;
  Metadata metadata;

  explicit Parts(const Safetensors& file) : metadata(file.metadata()) {
    for (const auto& [name, view] : file.tensors()) {
      tensors[name] = {view.dtype, view.shape, view.to_vector<std::int64_t>()};
    }
  }
  std::vector<std::byte> put_together() const {
    std::map<std::string, std::vector<std::byte>> storage;
    std::vector<TensorData> data;
    for (const auto& [name, tensor] : tensors) {
      std::vector<std::byte>& bytes = storage[name];
      for (const std::int64_t value : tensor.values) {  // little-endian: the low bytes come first
        const auto* low = reinterpret_cast<const std::byte*>(&value);
        bytes.insert(bytes.end(), low, low + size_of(tensor.dtype));
      }
      data.push_back({name, tensor.dtype, tensor.shape, bytes});
    }
    return to_safetensors(std::move(data), metadata);
  }
};

struct Damage {
  const char* name;
  const char* field;
  const char* index;
  int in_flight;
  void (*damage)(Parts&);
};

void PrintTo(const Damage& damage, std::ostream* out) { *out << damage.name; }

// Three micro-steps, two layers, four ranks, eight experts, one guest slot: three slots per rank.
const Damage kDamages[] = {
    {"AnotherFormat", "__metadata__.format", "", 1, [](Parts& p) { p.metadata["format"] = "foremoe.plan/2"; }},
    {"NoPolicy", "__metadata__.policy", "", 1, [](Parts& p) { p.metadata.erase("policy"); }},
    {"NoResidency", "__metadata__.residency", "", 1, [](Parts& p) { p.metadata.erase("residency"); }},
    {"UnknownResidency", "residency", "", 1, [](Parts& p) { p.metadata["residency"] = "sticky"; }},
    {"NegativeGuestSlots", "__metadata__.guest_slots", "", 1, [](Parts& p) { p.metadata["guest_slots"] = "-1"; }},
    {"NoneInFlight", "__metadata__.in_flight", "", 1, [](Parts& p) { p.metadata["in_flight"] = "0"; }},
    {"NoNodes", "__metadata__.ranks_per_node", "", 1, [](Parts& p) { p.metadata["ranks_per_node"] = "0"; }},
    {"OptionsThatAreNoObject", "options", "", 1, [](Parts& p) { p.metadata["options"] = "[]"; }},
    {"OptionsThatAreNoJson", "options", "", 1, [](Parts& p) { p.metadata["options"] = "{\"a\":}"; }},
    {"ShortDigest", "load_digest", "", 1, [](Parts& p) { p.metadata["load_digest"].pop_back(); }},
    {"DigestThatIsNotHex", "load_digest", "", 1, [](Parts& p) { p.metadata["load_digest"][5] = 'g'; }},
    {"NoSlots", "slot_expert", "", 1, [](Parts& p) { p.tensors.erase("slot_expert"); }},
    {"WrongTypeOfSlots", "slot_expert", "", 1, [](Parts& p) { p.tensors["slot_expert"].dtype = DType::kI64; }},
    {"SlotsOfThreeAxes", "slot_expert", "", 1,
     [](Parts& p) {
       p.tensors["slot_expert"].shape = {6, 4, 3};
     }},
    {"EmptySlots", "slot_expert", "", 1,
     [](Parts& p) {
       p.tensors["slot_expert"] = {DType::kI16, {0, 2, 4, 3}, {}};
     }},
    {"MoreGuestSlotsThanThereAre", "slot_expert", "", 1, [](Parts& p) { p.metadata["guest_slots"] = "2"; }},
    {"ExpertBelowEmpty", "slot_expert", "[1, 0, 3, 2]", 1, [](Parts& p) { p.tensors["slot_expert"].values[35] = -2; }},
    {"ExpertOutOfRange", "slot_expert", "[2, 1, 3, 2]", 1, [](Parts& p) { p.tensors["slot_expert"].values[71] = 8; }},
    {"NoQuotas", "slot_tokens", "", 1, [](Parts& p) { p.tensors.erase("slot_tokens"); }},
    {"WrongTypeOfQuotas", "slot_tokens", "", 1, [](Parts& p) { p.tensors["slot_tokens"].dtype = DType::kI32; }},
    {"QuotasOfAnotherShape", "slot_tokens", "", 1,
     [](Parts& p) {
       p.tensors["slot_tokens"].shape = {3, 2, 3, 4};
     }},
    {"NegativeQuota", "slot_tokens", "[0, 0, 1, 1]", 1,
     [](Parts& p) {
       p.tensors["slot_tokens"].dtype = DType::kI64;
       p.tensors["slot_tokens"].values[4] = -1;
     }},
    {"AbsurdQuota", "slot_tokens", "[0, 0, 1, 1]", 1,
     [](Parts& p) {
       p.tensors["slot_tokens"].dtype = DType::kI64;
       p.tensors["slot_tokens"].values[4] = std::numeric_limits<std::int64_t>::max();
     }},
    {"NoHomes", "home", "", 1, [](Parts& p) { p.tensors.erase("home"); }},
    {"WrongTypeOfHomes", "home", "", 1, [](Parts& p) { p.tensors["home"].dtype = DType::kI16; }},
    {"HomesOfAnotherLayerCount", "home", "", 1,
     [](Parts& p) {
       p.tensors["home"].shape = {1, 16};
     }},
    {"ExpertsThatDoNotSpreadEvenly", "home", "", 1,
     [](Parts& p) {
       p.tensors["home"] = {DType::kI32, {2, 7}, std::vector<std::int64_t>(14)};
     }},
    {"NoExperts", "home", "", 1,
     [](Parts& p) {
       p.tensors["home"] = {DType::kI32, {2, 0}, {}};
     }},
    {"NegativeHome", "home", "[0, 1]", 1, [](Parts& p) { p.tensors["home"].values[1] = -1; }},
    {"HomeOutOfRange", "home", "[1, 7]", 1, [](Parts& p) { p.tensors["home"].values[15] = 4; }},
    {"TooManyHomesOnARank", "home", "[1, 3]", 1, [](Parts& p) { p.tensors["home"].values[8] = 1; }},
    {"WrongTypeOfEvents", "event_micro_step", "", 1,
     [](Parts& p) { p.tensors["event_micro_step"].dtype = DType::kI64; }},
    {"TooFewEvents", "event_micro_step", "", 1,
     [](Parts& p) {
       p.tensors["event_micro_step"] = {DType::kI32, {2}, {0, 1}};
     }},
    {"EventsOutOfOrder", "event_micro_step", "[1]", 1, [](Parts& p) { p.tensors["event_micro_step"].values[1] = 2; }},
    {"BackwardWithOneInFlight", "event_pass", "[2]", 1, [](Parts& p) { p.tensors["event_pass"].values[2] = 1; }},
    {"PassesOutOfOrder", "event_pass", "[2]", 2, [](Parts& p) { p.tensors["event_pass"].values[2] = 0; }},
    {"PassThatIsNone", "event_pass", "[0]", 1, [](Parts& p) { p.tensors["event_pass"].values[0] = 2; }},
    {"WrongTypeOfPasses", "event_pass", "", 1, [](Parts& p) { p.tensors["event_pass"].dtype = DType::kI8; }},
    {"OddEventsWithTwoInFlight", "slot_expert", "", 1, [](Parts& p) { p.metadata["in_flight"] = "2"; }},
    {"AnotherOrder", "event_micro_step", "[2]", 2, [](Parts& p) { p.metadata["in_flight"] = "3"; }},
    {"MaxLoadOfAnotherShape", "max_load", "", 1,
     [](Parts& p) {
       p.tensors["max_load"].shape = {2, 3};
     }},
    {"NegativeMaxLoad", "max_load", "[1, 1]", 1, [](Parts& p) { p.tensors["max_load"].values[3] = -1; }},
    {"WrongTypeOfMaxLoad", "max_load", "", 1, [](Parts& p) { p.tensors["max_load"].dtype = DType::kU32; }},
    {"LowerBoundPerEvent", "lower_bound", "", 2,
     [](Parts& p) {
       p.tensors["lower_bound"] = {DType::kI64, {6, 2}, std::vector<std::int64_t>(12)};
     }},
};

class DamagedPlanFile : public testing::TestWithParam<Damage> {};

TEST_P(DamagedPlanFile, IsRejectedWithFileFieldAndIndex) {
  const Damage& damage = GetParam();
  const std::string path = testing::TempDir() + "damaged_" + damage.name + ".safetensors";
  write_plan(test::random_plan(test::random_load({}, 1), {.in_flight = damage.in_flight}, 1), path);
  Parts parts{Safetensors::open(path)};
  std::filesystem::remove(path);
  EXPECT_NO_THROW(read_plan(Safetensors::parse(parts.put_together(), "plan")));
  damage.damage(parts);
  const std::vector<std::byte> bytes = parts.put_together();
  try {
    read_plan(Safetensors::parse(bytes, "plan"));
    FAIL() << "was read";
  } catch (const InputError& error) {
    EXPECT_EQ(error.where().file, "plan") << error.what();
    EXPECT_EQ(error.where().field, damage.field) << error.what();
    EXPECT_EQ(error.where().index, damage.index) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(By, DamagedPlanFile, testing::ValuesIn(kDamages), testing::PrintToStringParamName());

}  // namespace
}  // namespace foremoe

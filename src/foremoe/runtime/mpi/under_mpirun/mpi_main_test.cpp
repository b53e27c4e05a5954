// Every rank runs every test, in the same order. Rank 0 reports progress; other ranks report only failures.

#include <gtest/gtest.h>

#include <iostream>
#include <memory>

#include "foremoe/runtime/mpi/under_mpirun/world.h"

namespace {

class Failures : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed()) std::cerr << "rank " << foremoe::world().rank().value << ": " << result.summary() << std::endl;
  }
};

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (foremoe::world().rank() != foremoe::RankId{0}) {
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    const std::unique_ptr<testing::TestEventListener> printer(listeners.Release(listeners.default_result_printer()));
    listeners.Append(new Failures);  // `listeners` owns it
  }
  const int failed = RUN_ALL_TESTS();
  foremoe::leave_world();
  return failed;
}

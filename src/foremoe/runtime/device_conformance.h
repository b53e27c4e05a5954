#pragma once

// What every Device promises, as tests. A backend's test program says, in one source:
//
//   #include "foremoe/runtime/device_conformance.h"
//   std::unique_ptr<foremoe::Device> make() { … null where the machine has none … }
//   FOREMOE_DEVICE_CONFORMANCE(Cpu, make);

#include "foremoe/runtime/conformance/experts.h"
#include "foremoe/runtime/conformance/memory.h"
#include "foremoe/runtime/conformance/router.h"
#include "foremoe/runtime/conformance/rows.h"
#include "foremoe/runtime/conformance/updates.h"

#define FOREMOE_DEVICE_CONFORMANCE(name, make_device)                                           \
  namespace foremoe {                                                                           \
  INSTANTIATE_TEST_SUITE_P(name, DeviceConformance, testing::Values(MakeDevice{make_device}));  \
  INSTANTIATE_TEST_SUITE_P(name, ExpertsConformance, testing::Values(MakeDevice{make_device})); \
  INSTANTIATE_TEST_SUITE_P(name, RouterConformance, testing::Values(MakeDevice{make_device}));  \
  }                                                                                             \
  static_assert(true)

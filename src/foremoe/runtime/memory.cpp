#include "foremoe/runtime/memory.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "foremoe/core/error.h"
#include "foremoe/core/memory_limit.h"

namespace foremoe {

namespace {

constexpr std::align_val_t kAlignment{64};

[[noreturn]] void refuse(Bytes bytes, const std::string& why) {
  throw InputError({.file = "memory", .field = {}, .index = {}},
                   "cannot have " + std::to_string(bytes.value) + " bytes: " + why);
}

}  // namespace

void Memory::Free::operator()(std::byte* data) const { ::operator delete(data, kAlignment); }

Memory allocate_memory(Bytes bytes) {
  if (bytes.value < 0) refuse(bytes, "negative size");
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes.value, 64));
  expect_memory(static_cast<double>(size), {.file = "memory"});
  void* data = ::operator new(size, kAlignment, std::nothrow);
  if (data == nullptr) refuse(bytes, "allocation failed");
  Memory memory;
  memory.data_.reset(static_cast<std::byte*>(data));
  memory.bytes_ = bytes;
  std::memset(data, 0, size);
  return memory;
}

}  // namespace foremoe

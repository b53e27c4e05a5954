#include "foremoe/core/sha256.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace foremoe {
namespace {

std::span<const std::byte> bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

TEST(Sha256, GivesTheDigestsOfTheStandard) {  // FIPS 180-4
  EXPECT_EQ(sha256_hex(bytes("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_hex({}), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST(Sha256, DoesNotDependOnHowTheBytesArrive) {
  const std::string text(1'000, 'x');
  Sha256 hash;
  for (std::size_t at = 0; at < text.size(); at += 7)
    hash.update(bytes(text).subspan(at, std::min<std::size_t>(7, text.size() - at)));
  EXPECT_EQ(hash.hex(), sha256_hex(bytes(text)));
}

}  // namespace
}  // namespace foremoe

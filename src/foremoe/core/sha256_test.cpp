#include "foremoe/core/sha256.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>

namespace foremoe {
namespace {

std::span<const std::byte> bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

// NIST's examples for FIPS 180-4, with messages from zero to many blocks.
TEST(Sha256, GivesTheDigestsOfTheStandard) {
  EXPECT_EQ(sha256_hex({}), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_hex(bytes("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_hex(bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256_hex(bytes("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqr"
                             "lmnopqrsmnopqrstnopqrstu")),
            "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(sha256_hex(bytes(std::string(1'000'000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PadsMessagesThatEndNearTheEndOfABlock) {  // digests from sha256sum
  EXPECT_EQ(sha256_hex(bytes(std::string(55, 'a'))),
            "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  EXPECT_EQ(sha256_hex(bytes(std::string(56, 'a'))),
            "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
  EXPECT_EQ(sha256_hex(bytes(std::string(64, 'a'))),
            "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
}

TEST(Sha256, DoesNotDependOnTheSizesOfUpdates) {
  const std::string text(1'000, 'x');
  for (const std::size_t piece : {1U, 7U, 63U, 64U, 65U, 200U}) {
    Sha256 hash;
    for (std::size_t at = 0; at < text.size(); at += piece)
      hash.update(bytes(text).subspan(at, std::min(piece, text.size() - at)));
    EXPECT_EQ(hash.hex(), sha256_hex(bytes(text))) << piece;
  }
}

TEST(Sha256, IsTheSameWithTheProcessorsExtensionsAndWithout) {
  const Sha256Blocks extensions = sha256_blocks_extensions();
  if (extensions == nullptr) GTEST_SKIP() << "this processor has no SHA extensions";
  std::string text(64 * 9, '\0');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 131 + i / 7);
  for (std::size_t blocks = 0; blocks <= 9; ++blocks) {
    Sha256State a{1, 0xffffffff, 3, 0x80000000, 5, 6, 7, 8};
    Sha256State b = a;
    extensions(a, bytes(text).data(), blocks);
    sha256_blocks_portable(b, bytes(text).data(), blocks);
    EXPECT_EQ(a, b) << blocks;
  }
}

}  // namespace
}  // namespace foremoe

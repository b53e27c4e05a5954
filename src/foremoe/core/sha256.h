#pragma once

// SHA-256, by OpenSSL. Names what a plan was made for.

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace foremoe {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void update(std::span<const std::byte> bytes);
  std::string hex();  // 64 lower-case digits; once, after the last update

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

std::string sha256_hex(std::span<const std::byte> bytes);

}  // namespace foremoe

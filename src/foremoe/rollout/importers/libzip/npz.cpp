// numpy's .npz: a zip whose members are .npy files, stored or deflated. If members are called routed_experts…
// they are the sequences; else all members are. Order is that of the archive.

#include <fmt/format.h>
#include <zip.h>

#include <memory>

#include "foremoe/rollout/importers/formats.h"

namespace foremoe {

namespace {

constexpr std::uint64_t kMaxDeflation = 1032;  // what deflate can reach; a member that claims more is lying
// Small archives may be all padding. Of large ones routes are some of it: int64 of 128 experts deflate to a ninth.
constexpr std::uint64_t kMaxDeflationOfRoutes = 100;
constexpr std::uint64_t kFreeBytes = std::uint64_t{64} << 20;
constexpr std::size_t kReadBytes = std::size_t{1} << 20;
constexpr std::string_view kRoutes = "routed_experts";

struct CloseArchive {
  void operator()(zip_t* archive) const { zip_discard(archive); }
};
struct CloseMember {
  void operator()(zip_file_t* member) const { zip_fclose(member); }
};
using Archive = std::unique_ptr<zip_t, CloseArchive>;

Archive open_archive(const ImportSource& source) {
  zip_error_t error;
  zip_error_init(&error);
  const auto failed = [&] {
    const std::string what = zip_error_strerror(&error);
    zip_error_fini(&error);
    return InputError({.file = source.name}, fmt::format("is no readable zip archive: {}", what));
  };
  zip_source_t* bytes = zip_source_buffer_create(source.bytes.data(), source.bytes.size(), 0, &error);
  if (!bytes) throw failed();
  Archive archive(zip_open_from_source(bytes, ZIP_RDONLY | ZIP_CHECKCONS, &error));
  if (!archive) {
    zip_source_free(bytes);
    throw failed();
  }
  zip_error_fini(&error);
  return archive;
}

struct Member {
  zip_uint64_t index;
  Where where;
  std::uint64_t size;
  std::uint64_t compressed;
};

Member inspect(zip_t* archive, zip_uint64_t index, const ImportSource& source) {
  Member member{.index = index, .where = {.file = source.name, .field = fmt::format("member {}", index)}};
  zip_stat_t stat;
  zip_stat_init(&stat);
  constexpr zip_uint64_t kNeeded = ZIP_STAT_NAME | ZIP_STAT_SIZE | ZIP_STAT_COMP_SIZE | ZIP_STAT_COMP_METHOD;
  if (zip_stat_index(archive, index, 0, &stat) != 0 || (stat.valid & kNeeded) != kNeeded) {
    throw InputError(member.where, "has no readable entry");
  }
  member.where.field = stat.name;
  member.size = stat.size;
  member.compressed = stat.comp_size;
  if (stat.comp_method != ZIP_CM_STORE && stat.comp_method != ZIP_CM_DEFLATE) {
    throw InputError(member.where, "is neither stored nor deflated");
  }
  if (stat.comp_size > source.bytes.size() || stat.size / kMaxDeflation > stat.comp_size) {
    throw InputError(member.where, fmt::format("claims {} bytes from {}", stat.size, stat.comp_size));
  }
  return member;
}

// Before anything is inflated.
void expect_routes(const std::vector<Member>& members, const ImportSource& source) {
  std::uint64_t size = 0;
  std::uint64_t compressed = 0;
  for (const Member& member : members) {  // fit 64 bits: each claims at most 1032 times its share of the archive
    size += member.size;
    compressed += member.compressed;
  }
  if (size <= kFreeBytes || size / kMaxDeflationOfRoutes <= compressed) return;
  throw InputError({.file = source.name},
                   fmt::format("claims {} bytes deflated to {}, more than {} to one, which routes never are; if it is "
                               "right, unpack it and import its .npy files",
                               size, compressed, kMaxDeflationOfRoutes));
}

// Grows with what is really there, so that a claimed size costs nothing. What is no array of the claimed size is
// refused by its beginning.
std::vector<std::byte> read(zip_t* archive, const Member& member) {
  const std::unique_ptr<zip_file_t, CloseMember> file(zip_fopen_index(archive, member.index, 0));
  if (!file) throw InputError(member.where, fmt::format("cannot be opened: {}", zip_strerror(archive)));
  std::vector<std::byte> bytes;
  for (;;) {
    const std::size_t begin = bytes.size();
    bytes.resize(begin + kReadBytes);
    const auto got = zip_fread(file.get(), bytes.data() + begin, kReadBytes);
    if (got < 0) throw InputError(member.where, fmt::format("is damaged: {}", zip_file_strerror(file.get())));
    bytes.resize(begin + static_cast<std::size_t>(got));
    if (bytes.size() > member.size)
      throw InputError(member.where, fmt::format("holds more than the {} bytes it claims", member.size));
    if (begin == 0 && bytes.size() < member.size) expect_npy(bytes, member.size, member.where);
    if (got == 0) return bytes;
  }
}

}  // namespace

void import_npz(const ImportSource& source, TraceAssembler& assembler) {
  const Archive archive = open_archive(source);
  std::vector<Member> all, routes;
  std::uint64_t compressed = 0;
  for (zip_int64_t i = 0; i < zip_get_num_entries(archive.get(), 0); ++i) {
    Member member = inspect(archive.get(), static_cast<zip_uint64_t>(i), source);
    compressed += member.compressed;
    if (compressed > source.bytes.size()) throw InputError(member.where, "overlaps other members");
    if (member.where.field.starts_with(kRoutes)) routes.push_back(member);
    all.push_back(std::move(member));
  }
  const std::vector<Member>& members = routes.empty() ? all : routes;
  expect_routes(members, source);
  for (const Member& member : members) {
    add_npy(assembler, member.where, read(archive.get(), member));
  }
}

}  // namespace foremoe

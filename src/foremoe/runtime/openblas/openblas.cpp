// OpenBLAS, loaded when the first thread is about to multiply.
//
// Why not linked. The threads of this program are the ranks, so OpenBLAS must start none of its own; how many it
// starts is settled while it is loaded, from its environment. Linked, it starts them in every command, and where they
// find too little address space they wait for ever, and so does the command that wants to end. The build of OpenBLAS
// without threads is no way out: as Debian packages it, two callers at the same time may get the same buffer
// and wrong products. Where only that build is installed, products are made one at a time.

#include <dlfcn.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/runtime/cpu/blas.h"

namespace foremoe::cpu {
namespace {

// The values of the C interface.
constexpr int kRowMajor = 101;
constexpr int kPlain = 111;
constexpr int kTransposed = 112;
constexpr int kSequentialBuild = 0;

constexpr int kFewestBuffers = 50;  // of any build

template <class T>
using Gemm = void (*)(int order, int transpose_a, int transpose_b, int m, int n, int k, T alpha, const T* a, int lda,
                      const T* b, int ldb, T beta, T* c, int ldc);

// One thread, whatever the environment says; what it says is put back.
class OneThread {
 public:
  OneThread() {
    if (const char* value = std::getenv(kName)) {  // NOLINT(concurrency-mt-unsafe): see load()
      had_ = true;
      before_ = value;
    }
    setenv(kName, "1", 1);  // NOLINT(concurrency-mt-unsafe)
  }
  ~OneThread() {
    if (had_) {
      setenv(kName, before_.c_str(), 1);  // NOLINT(concurrency-mt-unsafe)
    } else {
      unsetenv(kName);  // NOLINT(concurrency-mt-unsafe)
    }
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  static constexpr const char* kName = "OPENBLAS_NUM_THREADS";
  bool had_ = false;
  std::string before_;
};

struct Library {
  Gemm<float> sgemm = nullptr;
  Gemm<double> dgemm = nullptr;
  // The buffer of one product, and its return; null where the build does not export them. OpenBLAS keeps what it
  // mapped.
  void* (*take_buffer)(int) = nullptr;
  void (*return_buffer)(void*) = nullptr;
  int most_at_once = 1;  // products
};

// OpenBLAS has two buffers for each thread that its build knows of, and fails beyond them.
int buffers_of(std::string_view config) {
  constexpr std::string_view kKey = "MAX_THREADS=";
  const auto at = config.find(kKey);
  int threads = 0;
  if (at != std::string_view::npos)
    std::from_chars(config.data() + at + kKey.size(), config.data() + config.size(), threads);
  return std::max(kFewestBuffers, 2 * threads);
}

Library load() {
  const OneThread one_thread;
  void* handle = nullptr;
  std::string error;
  for (const char* file : {"libopenblas.so.0", FOREMOE_OPENBLAS_FILE}) {
    handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) break;
    if (error.empty()) error = dlerror();  // NOLINT(concurrency-mt-unsafe): loaded once, by one thread
  }
  if (handle == nullptr) throw InputError({.file = "OpenBLAS"}, "cannot be loaded: " + error);
  const auto find = [&](const char* name) {
    void* const address = dlsym(handle, name);
    if (address == nullptr) throw InputError({.file = "OpenBLAS"}, fmt::format("has no function {}", name));
    return address;
  };
  Library library{.sgemm = reinterpret_cast<Gemm<float>>(find("cblas_sgemm")),
                  .dgemm = reinterpret_cast<Gemm<double>>(find("cblas_dgemm")),
                  .take_buffer = reinterpret_cast<void* (*)(int)>(dlsym(handle, "blas_memory_alloc")),
                  .return_buffer = reinterpret_cast<void (*)(void*)>(dlsym(handle, "blas_memory_free"))};
  if (reinterpret_cast<int (*)()>(find("openblas_get_parallel"))() != kSequentialBuild)
    library.most_at_once = buffers_of(reinterpret_cast<const char* (*)()>(find("openblas_get_config"))());
  reinterpret_cast<void (*)(int)>(find("openblas_set_num_threads"))(1);  // where OpenMP counts threads
  return library;
}

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

// Admits as many products at a time as there are buffers, and none while buffers are mapped: those that products hold
// would not be among the ones that mapping takes, which would then map more than there is room for.
class Gate {
 public:
  void enter() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !closed_ && inside_ < library().most_at_once; });
    ++inside_;
  }
  void leave() {
    {
      const std::lock_guard lock(mutex_);
      --inside_;
    }
    changed_.notify_all();
  }
  void close() {
    std::unique_lock lock(mutex_);
    closed_ = true;
    changed_.wait(lock, [&] { return inside_ == 0; });
  }
  void open() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = false;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int inside_ = 0;       // products; guarded by mutex_
  bool closed_ = false;  // likewise
};
Gate gate;

// What OpenBLAS maps for each thread that multiplies at the same time, on the machines where it is largest.
constexpr std::size_t kBufferBytes = std::size_t{160} << 20;

std::mutex threads_mutex;
int threads_now = 0;     // guarded by threads_mutex
int threads_so_far = 0;  // likewise: for so many there are buffers, and OpenBLAS gives none back to the system

// Takes as many buffers at once, which are then different ones, and returns them.
void take_buffers(int threads) {
  if (library().take_buffer == nullptr || library().return_buffer == nullptr) return;
  std::vector<void*> buffers;
  buffers.reserve(static_cast<std::size_t>(threads));
  gate.close();
  for (int i = 0; i < threads; ++i) {
    void* const buffer = library().take_buffer(0);
    if (buffer == nullptr) break;
    buffers.push_back(buffer);
  }
  for (void* const buffer : buffers) library().return_buffer(buffer);
  gate.open();
  if (buffers.size() < static_cast<std::size_t>(threads)) {
    throw std::system_error(
        ENOMEM, std::generic_category(),
        fmt::format("OpenBLAS has buffers for {} of {} threads that multiply", buffers.size(), threads));
  }
}

// Under the mutex.
void map_buffers(int threads) {
  threads = std::min(threads, library().most_at_once);
  if (threads <= threads_so_far) return;
  const std::size_t bytes = kBufferBytes * static_cast<std::size_t>(threads - threads_so_far);
  void* const room = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) {
    throw std::system_error(ENOMEM, std::generic_category(),
                            fmt::format("OpenBLAS needs {} MiB of address space for each of {} threads that multiply",
                                        kBufferBytes >> 20, threads));
  }
  munmap(room, bytes);
  take_buffers(threads);
  threads_so_far = threads;
}

template <class T>
void multiply_by(Gemm<T> gemm, const Product& p, const T* a, const T* b, T* c) {
  if (p.rows == 0 || p.columns == 0 || p.depth == 0) return;
  const auto size = [](std::int64_t n) { return static_cast<int>(n); };
  gate.enter();
  gemm(kRowMajor, p.transpose_a ? kTransposed : kPlain, p.transpose_b ? kTransposed : kPlain, size(p.rows),
       size(p.columns), size(p.depth), T{1}, a, size(p.transpose_a ? p.rows : p.depth), b,
       size(p.transpose_b ? p.depth : p.columns), p.add ? T{1} : T{0}, c, size(p.columns));
  gate.leave();
}

}  // namespace

bool blas_is_built() { return true; }

void reserve_blas(int threads) {
  library();
  const std::lock_guard lock(threads_mutex);
  map_buffers(threads);
}

BlasThread::BlasThread() {
  library();
  const std::lock_guard lock(threads_mutex);
  map_buffers(threads_now + 1);
  ++threads_now;
}

BlasThread::~BlasThread() {
  const std::lock_guard lock(threads_mutex);
  --threads_now;
}

void multiply(const Product& product, const float* a, const float* b, float* c) {
  multiply_by(library().sgemm, product, a, b, c);
}

void multiply(const Product& product, const double* a, const double* b, double* c) {
  multiply_by(library().dgemm, product, a, b, c);
}

}  // namespace foremoe::cpu

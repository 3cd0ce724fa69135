// Work shared between the threads of torch's own OpenMP runtime, so that a process has one pool of threads and one
// limit on them. Without that runtime everything is computed by the caller.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace bifolio {

using Region = void (*)(void (*body)(void *), void *argument, unsigned threads, unsigned flags);  // GOMP_parallel
static Region region = nullptr;

// f(i) for every i below count: each thread takes the next that nobody has taken.
template <class F>
static void parallel(int threads, int64_t count, const F &f) {
  if (threads > count) threads = (int)count;
  if (threads < 2 || !region) {
    for (int64_t i = 0; i < count; i++) f(i);
    return;
  }
  struct Shared {
    const F &f;
    int64_t count;
    std::atomic<int64_t> next{0};
  } shared{f, count};
  auto body = [](void *argument) {
    auto &s = *static_cast<Shared *>(argument);
    for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.count;) s.f(i);
  };
  region(body, &shared, (unsigned)threads, 0);
}

// Memory that a thread keeps from one call to the next: `static thread_local`, one for each purpose. Cache lines.
class Buffer {
 public:
  ~Buffer() { std::free(memory_); }
  // Room for `count` of T, holding anything.
  template <class T>
  T *of(int64_t count) {
    size_t bytes = ((size_t)count * sizeof(T) + 63) / 64 * 64;
    if (bytes > size_) {
      std::free(memory_);
      memory_ = std::aligned_alloc(64, size_ = bytes);
      if (!memory_) std::abort();
    }
    return static_cast<T *>(memory_);
  }

 private:
  void *memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace bifolio

// Items given out to threads one at a time.  Which thread gets an item never changes a result.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

namespace magi {

// Calls work(item) for every item in [0, count).  False if memory ran out.
template <class Work>
bool parallel_items(int threads, int64_t count, Work work) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> ok{true};
  const auto drain = [&] {
    try {
      for (int64_t item; ok && (item = next++) < count;) work(item);
    } catch (const std::bad_alloc&) {
      ok = false;
    }
  };
  threads = int(std::min<int64_t>(threads, count));
  if (threads <= 1) {
    drain();
    return ok;
  }
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
  drain();
#else
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(drain);
  drain();
  for (auto& other : others) other.join();
#endif
  return ok;
}

// Float32 scratch, aligned to a cache line, kept by its thread between calls.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  // One block of the given sizes (floats); every part begins on a cache line.
  void reserve(std::initializer_list<size_t> sizes) {
    size_t total = 0;
    for (size_t size : sizes) total += round_up(size);
    if (total > capacity_) {
      std::free(data_);
      capacity_ = 0;
      data_ = static_cast<float*>(std::aligned_alloc(kAlign, total * sizeof(float)));
      if (data_ == nullptr) throw std::bad_alloc();
      capacity_ = total;
    }
    used_ = 0;
  }
  float* take(size_t size) {
    float* part = data_ + used_;
    used_ += round_up(size);
    return part;
  }

 private:
  static constexpr size_t kAlign = 64;
  static size_t round_up(size_t size) { return (size + 15) / 16 * 16; }
  float* data_ = nullptr;
  size_t capacity_ = 0, used_ = 0;
};

}  // namespace magi

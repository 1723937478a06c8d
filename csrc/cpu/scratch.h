// Memory that the threads of a driver use while they compute.
#pragma once

#include <cstddef>
#include <cstdlib>

namespace kvq {

static inline size_t align64(size_t bytes) { return (bytes + 63) & ~size_t(63); }

// Scratch memory of a thread, kept between calls.
class Scratch {
 public:
  char* reserve(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = align64(bytes);
      data_ = static_cast<char*>(std::aligned_alloc(64, size_));
    }
    return data_;
  }
  ~Scratch() { std::free(data_); }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace kvq

// Memory that the threads of a driver use while they compute.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace kvq {

static inline size_t align64(size_t bytes) { return (bytes + 63) & ~size_t(63); }

// Scratch memory of a thread, kept between calls.
class Scratch {
 public:
  char* reserve(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = static_cast<char*>(std::aligned_alloc(64, align64(bytes)));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = align64(bytes);
    }
    return data_;
  }
  ~Scratch() { std::free(data_); }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace kvq

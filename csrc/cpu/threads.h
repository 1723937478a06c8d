// Parallel loops on the threads that PyTorch and vLLM already use.
//
// vLLM pins the OpenMP pool of the libgomp that PyTorch loads; a second pool would fight it for the cores. So nothing
// is linked: GOMP_parallel (a stable ABI, offered by LLVM's runtime too) is looked up in the process, where PyTorch or
// LD_PRELOAD has put it. Without it, loops run on the calling thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

#ifdef KVQ_STD_THREADS
// For the thread sanitizer, which doesn't know what OpenMP's barriers order.
#include <thread>
#include <vector>

namespace kvq {
inline void GOMP_parallel(void (*fn)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> team;
  for (unsigned i = 1; i < threads; ++i) team.emplace_back(fn, data);
  fn(data);
  for (std::thread& t : team) t.join();
}
inline constexpr bool HAVE_THREADS = true;
}  // namespace kvq
#else
extern "C" {
void GOMP_parallel(void (*fn)(void*), void* data, unsigned threads, unsigned flags) __attribute__((weak));
}

namespace kvq {
inline const bool HAVE_THREADS = GOMP_parallel != nullptr;
}
#endif

namespace kvq {

// Calls body(i) for i in [0, count), on at most `threads` threads, next index to whoever is free. What a call throws
// (std::bad_alloc) is thrown here, once all threads have finished: in a thread it would silently kill the process.
template <class Body>
void parallel(int threads, int64_t count, Body&& body) {
  struct Loop {
    std::atomic<int64_t> next{0};
    int64_t count;
    Body* body;
    std::atomic<bool> failed{false};
    std::exception_ptr error;
  } loop;
  loop.count = count;
  loop.body = &body;
  const auto run = [](void* p) {
    Loop& l = *static_cast<Loop*>(p);
    try {
      for (int64_t i = l.next.fetch_add(1); i < l.count && !l.failed; i = l.next.fetch_add(1)) (*l.body)(i);
    } catch (...) {
      if (!l.failed.exchange(true)) l.error = std::current_exception();
    }
  };
  const int64_t team = count < threads ? count : threads;
  if (team <= 1 || !HAVE_THREADS) {
    run(&loop);
  } else {
    GOMP_parallel(run, &loop, unsigned(team), 0);
  }
  if (loop.error) std::rethrow_exception(loop.error);
}

}  // namespace kvq

#include "core/threads.h"

#include <pthread.h>

#include <atomic>
#include <exception>

namespace epiloq {
namespace {

std::atomic<OpenMpParallel> lent{nullptr};

// Ranges for each thread: one that comes late, or shares its core, leaves its own to the others.
constexpr std::int64_t kRanges = 4;

struct Work {
  void const* body;
  RangeCall call;
  std::int64_t count, ranges;
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error{};

  void run() noexcept {
    try {
      for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < ranges;)
        call(body, start(i), start(i + 1));
    } catch (...) {
      next = ranges;
      if (!failed.exchange(true)) error = std::current_exception();
    }
  }
  // No product of both that would overflow.
  std::int64_t start(std::int64_t i) const { return count / ranges * i + count % ranges * i / ranges; }
};

}  // namespace

void use_openmp(OpenMpParallel parallel) {
  if (lent.exchange(parallel) == nullptr) pthread_atfork(nullptr, nullptr, [] { lent = nullptr; });
}

void share(std::int64_t count, int threads, void const* body, RangeCall call) {
  OpenMpParallel const parallel = lent;
  threads = static_cast<int>(std::min<std::int64_t>(threads, count));
  if (parallel == nullptr || threads <= 1) return call(body, 0, count);
  Work work{.body = body, .call = call, .count = count, .ranges = std::min(count, kRanges * threads)};
  parallel([](void* data) { static_cast<Work*>(data)->run(); }, &work, static_cast<unsigned>(threads), 0);
  if (work.error) std::rethrow_exception(work.error);
}

}  // namespace epiloq

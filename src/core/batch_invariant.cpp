#include "epiloq/batch_invariant.h"

#include <atomic>

namespace epiloq {
namespace {

std::atomic<bool> of_every_thread{false};
thread_local std::optional<bool> t_own;

}  // namespace

void set_batch_invariant(bool on) { of_every_thread.store(on, std::memory_order_relaxed); }
void set_batch_invariant_here(std::optional<bool> on) { t_own = on; }
std::optional<bool> batch_invariant_here() { return t_own; }
bool batch_invariant() { return t_own ? *t_own : of_every_thread.load(std::memory_order_relaxed); }

}  // namespace epiloq

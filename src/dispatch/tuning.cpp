#include "dispatch/tuning.h"

#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "core/ceil_div.h"
#include "kernel_hash.h"

namespace epiloq {
namespace {

struct Table {
  std::mutex mutex;
  std::map<std::pair<int, std::string>, std::string> names;
  std::set<int> loaded;
  std::function<void(int)> load;
};
// Never destroyed: the loader may belong to an interpreter that has already gone.
Table& table() {
  static auto* const instance = new Table;
  return *instance;
}
std::atomic<std::uint64_t> g_epoch{1};
thread_local std::string t_forced_kernel;

// Once a device, before its first problem. The loader calls set_tuned_kernel, so no lock is held.
void load_once(int device) {
  std::function<void(int)> load;
  {
    std::scoped_lock const lock(table().mutex);
    if (device == kNoDevice || !table().load || !table().loaded.insert(device).second) return;
    load = table().load;
  }
  load(device);
}

}  // namespace

void force_kernel(std::string const& name) { t_forced_kernel = name; }

void set_tuned_kernel(int device, std::string const& key, std::string const& name) {
  std::scoped_lock const lock(table().mutex);
  table().names[{device, key}] = name;
  ++g_epoch;
}

void clear_tuned_kernels(int device) {
  std::scoped_lock const lock(table().mutex);
  std::erase_if(table().names, [device](auto const& entry) { return entry.first.first == device; });
  ++g_epoch;
}

std::string kernel_hash() { return EPILOQ_KERNEL_HASH; }

void on_first_dispatch(std::function<void(int device)> load) {
  std::scoped_lock const lock(table().mutex);
  table().load = std::move(load);
  table().loaded.clear();
  ++g_epoch;
}

namespace tuning {

std::string const& forced_kernel() { return t_forced_kernel; }
std::uint64_t epoch() { return g_epoch.load(std::memory_order_relaxed); }

std::optional<std::string> tuned_kernel(int device, std::string const& key) {
  load_once(device);
  std::scoped_lock const lock(table().mutex);
  auto const found = table().names.find({device, key});
  if (found == table().names.end()) return std::nullopt;
  return found->second;
}

std::string fixed(double value, int decimals) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", decimals, value);
  return text;
}

Tokens tokens_of(std::int64_t m) {
  constexpr struct {
    std::int64_t most, step;
  } kSteps[] = {{8, 1}, {64, 8}, {256, 16}};
  constexpr std::int64_t kLargest = 128;
  for (auto const& [most, step] : kSteps) {
    if (m <= most) return {ceil_div(m, step) * step, m % kLargest == 0};
  }
  return {ceil_div(m, kLargest) * kLargest, m % kLargest == 0};
}

std::string key_of(char const* operation, std::int64_t m, std::int64_t n, std::int64_t k) {
  Tokens const tokens = tokens_of(m);
  return std::string(operation) + " m<=" + std::to_string(tokens.bucket) + (tokens.whole ? " whole" : "") +
         " n=" + std::to_string(n) + " k=" + std::to_string(k);
}

}  // namespace tuning
}  // namespace epiloq

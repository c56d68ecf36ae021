// Fibers and the schedule.

#include "machine.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "state.h"

namespace emulated {
namespace {

constexpr std::size_t kStackBytes = 64 * 1024, kPageBytes = 4096, kAlignment = 1024;
constexpr unsigned char kPoison = 0xff;  // NaN in every format
std::mt19937 g_random;
Machine* g_machine = nullptr;

// Stacks that all runs use, each above a page that nobody may touch.
char* stacks(std::size_t count) {
  static std::size_t have = 0;
  static char* memory = nullptr;
  if (count > have) {
    if (have > 0) munmap(memory, have * kStackBytes);
    void* const pages =
        mmap(nullptr, count * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    memory = static_cast<char*>(pages), have = count;
    for (std::size_t i = 0; i < count; ++i) mprotect(memory + i * kStackBytes, kPageBytes, PROT_NONE);
  }
  return memory;
}

// Any one of some, which it leaves.
template <class T>
T taken(std::vector<T>& some) {
  std::swap(some[g_random() % some.size()], some.back());
  T one = std::move(some.back());
  some.pop_back();
  return one;
}

void make_fiber(ucontext_t& context, char* stack, void (*enter)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, enter, 0);
}

}  // namespace

void reseed(std::uint32_t seed) { g_random.seed(seed); }

void run(Launch const& launch, std::function<void()> const& kernel) {
  for (unsigned first = 0; first < launch.blocks * launch.rows * launch.planes; first += launch.cluster) {
    Machine machine(launch, first, kernel);
    g_machine = &machine;
    machine.run();
  }
}

// Poison, and as much behind it that stays.
Block::Block(unsigned rank_, unsigned index_, Launch const& launch)
    : rank(rank_),
      index(index_),
      live(static_cast<int>(launch.threads)),
      storage(launch.shared_bytes + 2 * kAlignment, kPoison) {
  auto const begin = reinterpret_cast<std::uintptr_t>(storage.data());
  memory = storage.data() + (kAlignment - begin % kAlignment) % kAlignment;
}

void Block::end(std::size_t bytes) {
  auto const is_poison = [](unsigned char byte) { return byte == kPoison; };
  bool const is_whole = std::all_of(memory + bytes, memory + bytes + kAlignment, is_poison);
  if (!is_whole) Machine::now().fail("wrote past its memory");
  for (auto const& [address, barrier] : barriers) {
    if (barrier.bytes != 0) Machine::now().fail("leaves bytes under way to the barrier at " + std::to_string(address));
  }
  std::fill_n(memory, bytes, kPoison);
}

Machine& Machine::now() { return *g_machine; }

Machine::Machine(Launch const& launch, unsigned first_block, std::function<void()> const& kernel)
    : launch_(launch), kernel_(kernel) {
  operations_ = any_of({0.01, 0.5, 0.99});
  for (bool& is_late : are_late_) is_late = any_of({false, false, true});
  pauses_ = any_of({0., 0.02, 0.3});
  for (unsigned rank = 0; rank < launch.cluster; ++rank) {
    blocks_.push_back(std::make_unique<Block>(rank, first_block + rank, launch));
    double const late_warps = any_of({0., 0., 0.3, 1.});
    for (unsigned i = 0; i < launch.threads; ++i) add_thread(*blocks_.back(), i, late_warps);
  }
  cluster_.threads = static_cast<int>(threads_.size());
}

void Machine::add_thread(Block& block, unsigned index, double late_warps) {
  int const lane = static_cast<int>(index) % kWarpLanes;
  if (lane == 0) {
    auto& warp = *warps_.emplace_back(std::make_unique<Warp>());
    warp.index = static_cast<int>(index) / kWarpLanes, warp.leader = g_random() % kWarpLanes;
    warp.meeting.threads = kWarpLanes;
    warp.is_late = chance(late_warps);
  }
  char* const stack = stacks(launch_.cluster * launch_.threads) + threads_.size() * kStackBytes;
  auto& thread = *threads_.emplace_back(std::make_unique<Thread>());
  thread.block = &block, thread.warp = warps_.back().get(), thread.index = index, thread.lane = lane;
  thread.warp->lanes[lane] = &thread;
  make_fiber(thread.context, stack, enter);
  make_ready(thread);
}

void Machine::run() {
  while (step()) {
    if (failure_) std::rethrow_exception(failure_);
  }
  if (cluster_.threads > 0) throw Failure(deadlock());
}

bool Machine::step() {
  Pool& pool = prompt_.is_empty() ? late_ : prompt_;
  if (pool.is_empty()) return false;
  bool const is_operation = pool.threads.empty() || (!pool.operations.empty() && chance(operations_));
  is_operation ? perform(taken(pool.operations)) : resume(taken(pool.threads));
  return true;
}

void Machine::issue(Operation operation) {
  Stream* const stream = operation.stream;
  if (stream != nullptr && stream->is_busy) return stream->behind.push_back(std::move(operation));
  if (stream != nullptr) stream->is_busy = true;
  give(std::move(operation));
}

void Machine::give(Operation operation) {
  Pool& pool = are_late_[static_cast<int>(operation.kind)] ? late_ : prompt_;
  pool.operations.push_back(std::move(operation));
}

void Machine::perform(Operation operation) {
  operation.perform();
  Stream* const stream = operation.stream;
  if (stream == nullptr) return;
  stream->is_busy = !stream->behind.empty();
  if (!stream->is_busy) return;
  give(std::move(stream->behind.front()));
  stream->behind.pop_front();
}

void Machine::end_group(Kind kind, Stream& stream) {
  ++stream.groups;
  issue({kind,
         [this, &stream] {
           ++stream.done_groups;
           wake(stream.waiting);
         },
         &stream});
}

// Until all but so many of the first `groups` are done.
void Machine::await(Stream& stream, int groups, int pending, char const* what) {
  wait_until([&] { return groups - stream.done_groups <= pending; }, stream.waiting, what);
}

void Machine::resume(Thread* thread) {
  current_ = thread;
  thread->waits_for = nullptr;
  threadIdx = {thread->index, 0, 0}, blockDim = {launch_.threads, 1, 1};
  unsigned const index = thread->block->index, row = index / launch_.blocks;
  blockIdx = {index % launch_.blocks, row % launch_.rows, row / launch_.rows};
  if (launch_.clusters_along_y) blockIdx = {index / launch_.rows % launch_.blocks, index % launch_.rows, 0};
  gridDim = {launch_.blocks, launch_.rows, launch_.planes};
  swapcontext(&scheduler_, &thread->context);
}

void Machine::pause() { swapcontext(&current_->context, &scheduler_); }

void Machine::may_pause() {
  if (!chance(pauses_)) return;
  make_ready(*current_);
  pause();
}

void Machine::wake(WaitList& list) {
  for (Thread* thread : list) make_ready(*thread);
  list.clear();
}

void Machine::make_ready(Thread& thread) { (thread.warp->is_late ? late_ : prompt_).threads.push_back(&thread); }

// A fiber's whole life. What it throws is thrown by run(): no stack may be unwound from one to another.
void Machine::enter() {
  Machine& machine = now();
  try {
    machine.kernel_();
    machine.end_thread();
  } catch (...) {
    machine.failure_ = std::current_exception();
  }
  machine.pause();
}

void Machine::end_thread() {
  Warp& warp = *current_->warp;
  if (warp.meets_at != nullptr) fail(std::string("ends while lanes of its warp wait at ") + warp.meets_at);
  warp.has_ended = true;
  if (--current_->block->live == 0) current_->block->end(launch_.shared_bytes);
  if (current_->cluster_phase == cluster_.uses + 1) --cluster_.arrived;
  --cluster_.threads;
  settle_cluster();
}

void Machine::arrive_at_cluster() {
  if (current_->cluster_phase != 0) fail("arrives at the cluster's barrier twice");
  current_->cluster_phase = cluster_.uses + 1;
  ++cluster_.arrived;
  settle_cluster();
}

void Machine::cluster_sync() {
  unsigned const phase = current_->cluster_phase;
  if (phase == 0) fail("waits for the cluster without having arrived");
  wait_until([&] { return cluster_.uses >= phase; }, cluster_.waiting, "the cluster's barrier");
  current_->cluster_phase = 0;
}

void Machine::settle_cluster() {
  if (cluster_.arrived == 0 || cluster_.arrived < cluster_.threads) return;
  cluster_.arrived = 0;
  ++cluster_.uses;
  wake(cluster_.waiting);
}

Block& Machine::block(unsigned rank) {
  if (rank >= blocks_.size()) fail("names a block that its cluster does not have");
  return *blocks_[rank];
}

Address Machine::global(Address address) const {
  return address >> kRankBit != 0 ? address : address | (current_->block->rank + 1) << kRankBit;
}

unsigned char* Machine::memory(Address global, int bytes) {
  Block& of = block((global >> kRankBit) - 1);
  Address const offset = global & ((1u << kRankBit) - 1);
  if (of.live == 0) fail("reaches into a block that has ended");
  if (offset + bytes > launch_.shared_bytes) fail("reaches past shared memory, to " + std::to_string(offset + bytes));
  return of.memory + offset;
}

bool Machine::chance(double probability) { return g_random() < probability * 0x1p32; }

template <class T, std::size_t kCount>
T Machine::any_of(T const (&values)[kCount]) {
  return values[g_random() % kCount];
}

// Operations are reported as the last thread's: those that fail were asked for long ago.
void Machine::fail(std::string const& what) {
  std::ostringstream text;
  text << "block " << current_->block->index << ", thread " << current_->index
       << " or an operation behind it: " << what;
  throw Failure(text.str());
}

std::string Machine::deadlock() const {
  std::map<std::string, int> waiting;
  for (auto const& thread : threads_) {
    if (thread->waits_for == nullptr) continue;
    std::ostringstream text;
    text << "block " << thread->block->index << ", warp " << thread->warp->index << ": " << thread->waits_for;
    auto const barrier = thread->block->barriers.find(thread->waits_at);
    if (thread->waits_at != kNowhere && barrier != thread->block->barriers.end()) {
      text << " at " << thread->waits_at << " (" << barrier->second.missing << " arrivals and " << barrier->second.bytes
           << " bytes missing)";
    }
    ++waiting[text.str()];
  }
  std::ostringstream text;
  text << "deadlock";
  for (auto const& [what, lanes] : waiting) text << "\n  " << what << ", " << lanes << " lanes";
  return text.str();
}

}  // namespace emulated

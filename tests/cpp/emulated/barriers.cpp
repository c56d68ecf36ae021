// Where threads wait for each other, and for bytes.

#include <cuda_runtime_api.h>

#include "machine.h"
#include "state.h"

namespace emulated {
namespace {

// Lanes of a warp at a collective operation, each with a value for the lanes that ask for it.
std::uint32_t meet(char const* operation, std::uint32_t value, int source) {
  Machine& machine = Machine::now();
  Thread& self = machine.thread();
  Warp& warp = *self.warp;
  if (warp.has_ended) machine.fail(std::string("waits for lanes that have ended, at ") + operation);
  if (warp.meets_at != nullptr && warp.meets_at != std::string_view(operation)) {
    machine.fail(std::string("is at ") + operation + ", other lanes at " + warp.meets_at);
  }
  warp.meets_at = operation;
  self.given = value, self.source = source;
  Meeting& meeting = warp.meeting;
  if (++meeting.arrived < meeting.threads) {
    machine.wait_until([&, use = meeting.uses] { return meeting.uses != use; }, meeting.waiting, operation);
    return self.taken;
  }
  for (Thread* lane : warp.lanes) lane->taken = warp.lanes[lane->source]->given;
  warp.meets_at = nullptr;
  meeting.arrived = 0;
  ++meeting.uses;
  machine.wake(meeting.waiting);
  return self.taken;
}

void use_named_barrier(int number, int threads, bool waits) {
  Machine& machine = Machine::now();
  Meeting& meeting = machine.thread().block->named[number];
  if (threads % kWarpLanes != 0) machine.fail("names threads that are no whole warps, at a named barrier");
  bool const is_agreed = meeting.arrived == 0 || meeting.threads == threads;
  if (!is_agreed) machine.fail("disagrees with others about a named barrier's threads");
  meeting.threads = threads;
  if (++meeting.arrived == threads) {
    meeting.arrived = 0;
    ++meeting.uses;
    machine.wake(meeting.waiting);
  } else if (waits) {
    machine.wait_until([&, use = meeting.uses] { return meeting.uses != use; }, meeting.waiting, "a named barrier");
  }
}

void arrive(Barrier& barrier) {
  if (barrier.missing == 0) Machine::now().fail("is one arrival too many at a barrier");
  --barrier.missing;
  settle(barrier);
}

}  // namespace

void sync_warp() { meet("__syncwarp", 0, 0); }
std::uint32_t shuffle(std::uint32_t value, int lane) { return meet("__shfl_sync", value, lane); }
bool elect() {
  meet("elect.sync", 0, 0);
  Thread const& self = Machine::now().thread();
  return self.lane == self.warp->leader;
}

void wait_at_named_barrier(int number, int threads) { use_named_barrier(number, threads, true); }
void arrive_at_named_barrier(int number, int threads) { use_named_barrier(number, threads, false); }
void sync_threads() { wait_at_named_barrier(0, static_cast<int>(blockDim.x)); }

// Both are for whole warps.
void arrive_at_cluster() {
  meet("barrier.cluster.arrive", 0, 0);
  Machine::now().arrive_at_cluster();
}
void cluster_sync() {
  meet("barrier.cluster.wait", 0, 0);
  Machine::now().cluster_sync();
}

Barrier& Machine::barrier(Address global) {
  memory(global, 8);
  auto& barriers = block((global >> kRankBit) - 1).barriers;
  auto const found = barriers.find(global & ((1u << kRankBit) - 1));
  if (found == barriers.end()) fail("uses a barrier that nobody made");
  return found->second;
}

void settle(Barrier& barrier) {
  if (barrier.missing != 0 || barrier.bytes != 0) return;
  barrier.missing = barrier.arrivals;
  ++barrier.phase;
  Machine::now().wake(barrier.waiting);
}

void complete_bytes(Address global_barrier, int bytes) {
  Barrier& barrier = Machine::now().barrier(global_barrier);
  barrier.bytes -= bytes;
  settle(barrier);
}

void mbarrier_init(Address barrier, int arrivals) {
  Machine::now().thread().block->barriers[barrier] = {arrivals, arrivals, 0, 0, {}};
}

void mbarrier_arrive(Address barrier) {
  Machine& machine = Machine::now();
  arrive(machine.barrier(machine.global(barrier)));
  machine.may_pause();
}

void arrive_at_distant_barrier(Address barrier) {
  Machine& machine = Machine::now();
  machine.issue({Kind::kSend, [at = machine.global(barrier)] { arrive(Machine::now().barrier(at)); }});
  machine.may_pause();
}

void mbarrier_expect_tx(Address barrier, int bytes) {
  Machine& machine = Machine::now();
  Barrier& expecting = machine.barrier(machine.global(barrier));
  expecting.bytes += bytes;
  arrive(expecting);
  machine.may_pause();
}

// The phase before has the other parity; a thread that sleeps through two phases waits for the third.
void mbarrier_wait(Address barrier, unsigned parity) {
  Machine& machine = Machine::now();
  Barrier& waited = machine.barrier(machine.global(barrier));
  machine.may_pause();
  machine.wait_until([&] { return waited.phase % 2 != parity; }, waited.waiting, "an mbarrier",
                     static_cast<int>(barrier));
}

void arrive_after_small_copies(Address barrier) {
  Machine& machine = Machine::now();
  machine.issue({Kind::kSmallCopy, [at = machine.global(barrier)] { arrive(Machine::now().barrier(at)); },
                 &machine.thread().copies});
}

}  // namespace emulated

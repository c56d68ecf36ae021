#pragma once

// What the machine's parts know of each other.

#include <ucontext.h>

#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "machine.h"

namespace emulated {

constexpr int kWarpLanes = 32;
constexpr int kRankBit = 24;
constexpr int kNowhere = -1;

struct Thread;
using WaitList = std::vector<Thread*>;

// Asynchronous operations by what does them.
enum class Kind { kLoad, kSmallCopy, kSend, kStore, kProduct };
constexpr int kKinds = 5;

struct Stream;
struct Operation {
  Kind kind;
  std::function<void()> perform;
  Stream* stream = nullptr;  // null: in no order
};
// Operations that are done in their order, with the ends of groups among them.
struct Stream {
  std::deque<Operation> behind;  // the one whose turn it is
  bool is_busy = false;
  int groups = 0, done_groups = 0;
  WaitList waiting;
};

struct Barrier {
  int arrivals, missing;  // of a phase
  int bytes = 0;          // that are expected; fewer than none where they come before that is said
  unsigned phase = 0;
  WaitList waiting;
};
struct Meeting {  // of so many threads, again and again
  int threads = 0, arrived = 0;
  unsigned uses = 0;
  WaitList waiting;
};

// An array that wgmma sums into, as it is meanwhile.
struct Accumulators {
  void* registers;
  std::vector<std::uint32_t> values;
  int last_group;
};
// What all lanes of a warp ask for, one by one: a product, or the end of a group.
struct Request {
  Element element{};
  std::uint64_t a = 0, b = 0;
  int columns = 0;
  bool add = false, ends_group = false;
  int asked = 0;  // lanes
  Accumulators* sums[kWarpLanes]{};
};

struct Warp {
  int index;   // in its block
  int leader;  // whom it elects
  bool is_late;
  Thread* lanes[kWarpLanes];
  char const* meets_at = nullptr;  // the collective operation at which some lanes are
  Meeting meeting;
  bool has_ended = false;  // a lane
  std::deque<Request> requests;
  int given_requests = 0;  // that are no longer there
  Stream products;
};

struct Block {
  unsigned rank, index;
  int live;  // threads
  std::vector<unsigned char> storage;
  unsigned char* memory;
  std::map<Address, Barrier> barriers;
  std::map<int, Meeting> named;

  Block(unsigned rank_, unsigned index_, Launch const& launch);
  void end(std::size_t bytes);  // of its memory
};

struct Thread {
  ucontext_t context;
  Block* block;
  Warp* warp;
  unsigned index;  // in its block
  int lane;
  std::uint32_t given = 0, taken = 0;  // of a shuffle
  int source = 0;
  unsigned cluster_phase = 0;  // which ends what the thread has arrived at; 0: it has not
  Stream copies, stores;
  int requests = 0, product_groups = 0;  // of the warp's products
  std::list<Accumulators> accumulators;
  char const* waits_for = nullptr;
  int waits_at = kNowhere;  // an mbarrier's offset, if it is one
};

// What may go on. The late have no turn while others have one.
struct Pool {
  std::vector<Thread*> threads;
  std::vector<Operation> operations;
  bool is_empty() const { return threads.empty() && operations.empty(); }
};

// Of one cluster.
class Machine {
 public:
  Machine(Launch const& launch, unsigned first_block, std::function<void()> const& kernel);
  void run();

  static Machine& now();
  Thread& thread() { return *current_; }
  Block& block(unsigned rank);
  // An address that says its block, and what is there.
  Address global(Address address) const;
  unsigned char* memory(Address global, int bytes);
  Barrier& barrier(Address global);

  void issue(Operation operation);
  void wake(WaitList& list);
  // Other threads may go on here: between any two instructions, but it is these that others see.
  void may_pause();
  template <class Done>
  void wait_until(Done done, WaitList& list, char const* what, int where = kNowhere) {
    while (!done()) {
      current_->waits_for = what, current_->waits_at = where;
      list.push_back(current_);
      pause();
    }
  }
  void end_group(Kind kind, Stream& stream);
  void await(Stream& stream, int groups, int pending, char const* what);
  void arrive_at_cluster();
  void cluster_sync();
  [[noreturn]] void fail(std::string const& what);

 private:
  static void enter();
  void add_thread(Block& block, unsigned index, double late_warps);
  void pause();
  bool step();
  void perform(Operation operation);
  void give(Operation operation);
  void resume(Thread* thread);
  void make_ready(Thread& thread);
  void end_thread();
  void settle_cluster();
  bool chance(double probability);
  template <class T, std::size_t kCount>
  T any_of(T const (&values)[kCount]);
  std::string deadlock() const;

  Launch launch_;
  std::function<void()> const& kernel_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<std::unique_ptr<Warp>> warps_;
  std::vector<std::unique_ptr<Thread>> threads_;
  Pool prompt_, late_;
  Meeting cluster_;
  ucontext_t scheduler_;
  Thread* current_ = nullptr;
  std::exception_ptr failure_;
  // Of this run: how likely an operation is done rather than a thread resumed, and a thread pauses where it may; and
  // which kinds are late.
  double operations_, pauses_;
  bool are_late_[kKinds];
};

void settle(Barrier& barrier);
void complete_bytes(Address global_barrier, int bytes);

}  // namespace emulated

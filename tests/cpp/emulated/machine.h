#pragma once

// An SM90 on the CPU: what kernels written by hand ask of the hardware, beside C++. Threads are fibers of one thread of
// the system, asynchronous operations wait in a list, and a seeded generator says who goes on next; so a wait that is
// missing, or one too many, fails in some schedule. Memory is sequentially consistent, proxies need no fences, and each
// warp of a warpgroup multiplies for itself: what is wrong only where that is otherwise is not found. The headers in
// stand_ins/ give the kernels' own names to what is here.

#include <cuda.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>

namespace emulated {

// A kernel that waits for ever, or does what the hardware does not define.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Launch {
  unsigned blocks, threads, cluster;  // of the grid along x, a block, and blocks a cluster
  std::size_t shared_bytes;           // a block
  unsigned rows = 1, planes = 1;      // of the grid, along y and z
  bool clusters_along_y = false;      // of one plane
};
// Runs a kernel in a schedule that the next of the seed's random numbers say, one cluster after the other.
void run(Launch const& launch, std::function<void()> const& kernel);
void reseed(std::uint32_t seed);

// Shared memory: an offset in the thread's own block, or, with its number in high bits, in another of the cluster.
using Address = unsigned;
unsigned char* dynamic_smem();
Address address_of(void const* shared);
unsigned char* memory_at(Address address, int bytes);
Address dsmem_address(Address address, int rank);
int rank_in_cluster();

// By all lanes of a warp.
void sync_warp();
std::uint32_t shuffle(std::uint32_t value, int lane);
bool elect();

// Barriers of so many threads of a block, and of all of a cluster that have not ended.
void wait_at_named_barrier(int number, int threads);
void arrive_at_named_barrier(int number, int threads);
void sync_threads();
void arrive_at_cluster();
void cluster_sync();

// mbarriers, in shared memory.
void mbarrier_init(Address barrier, int arrivals);
void mbarrier_arrive(Address barrier);
void arrive_at_distant_barrier(Address barrier);      // of a cluster's block, at some time
void mbarrier_expect_tx(Address barrier, int bytes);  // and arrives
void mbarrier_wait(Address barrier, unsigned parity);

// cp.async, and zeros up to so many bytes.
void copy_small(Address to, void const* from, int bytes, int filled = 0);
void commit_small_copies();
void wait_for_small_copies(int pending);
void arrive_after_small_copies(Address barrier);

// st.async.
void st_async(Address to, void const* value, int bytes, Address barrier);

// TMA. A box may be written to the same place of several blocks, which bits of `ranks` name; none names the thread's.
void load_box(Address to, CUtensorMap const& map, int column, int row, Address barrier, unsigned ranks = 0);
void load_bytes(Address to, void const* from, int bytes, Address barrier);
void tma_store(CUtensorMap const& map, int column, int row, Address from);
void tma_store_commit();
void tma_store_wait(int pending);  // until shared memory has been read

// wgmma's 64 rows by 32 bytes of K, of tiles in lines of the 128-byte swizzle. A thread's sums are poison from when
// they are given to it until they are waited for.
enum class Element { kInt8, kE4M3, kE5M2 };
void multiply(Element element, std::uint64_t a, std::uint64_t b, void* sums, int columns, bool add);
void commit_products();
void wait_for_products(int pending);

}  // namespace emulated

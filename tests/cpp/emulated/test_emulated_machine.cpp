// The emulated SM90 itself: small kernels that are right are right in every schedule, and with a flaw fail in some;
// what the hardware does not define is named.

#include <cuda_runtime_api.h>

#include <array>
#include <bit>
#include <cstring>
#include <numeric>
#include <vector>

#include "check.h"
#include "machine.h"

namespace {

using namespace emulated;

constexpr int kSchedules = 60;

// Of so many schedules, those in which `is_right` says so and nothing is thrown.
int right_ones(std::function<bool()> const& is_right) {
  int right = 0;
  for (int seed = 0; seed < kSchedules; ++seed) {
    reseed(seed);
    try {
      right += is_right();
    } catch (Failure const&) {
    }
  }
  return right;
}

// A kernel by its flaws, of which the first is none.
template <class Flaw>
void catches(int line, bool (*is_right)(Flaw), std::initializer_list<Flaw> flaws) {
  test::equal(__FILE__, line, right_ones([&] { return is_right(Flaw{}); }), kSchedules);
  for (Flaw flaw : flaws) {
    if (right_ones([&] { return is_right(flaw); }) < kSchedules) continue;
    test::report(__FILE__, line, "flaw " + std::to_string(static_cast<int>(flaw)) + " was never noticed");
  }
}

int warp() { return static_cast<int>(threadIdx.x) / 32; }
int lane() { return static_cast<int>(threadIdx.x) % 32; }

template <class T>
T& shared(Address address) {
  return *reinterpret_cast<T*>(memory_at(address, sizeof(T)));
}

// A warp has TMA fill a pipeline of stages, another adds up what is there.
enum class PipelineFlaw { kNone, kReadsEarly, kFillsEarly, kNoRelease, kReleasesEarly, kFewerBytes, kOtherParity };
bool pipeline(PipelineFlaw flaw) {
  constexpr int kStages = 3, kSteps = 20, kLine = 128, kBarriers = kStages * kLine;
  std::vector<std::uint32_t> data(kSteps * 32);
  std::iota(data.begin(), data.end(), 1);
  std::uint64_t sum = 0;
  run({1, 64, 1, 1024}, [&] {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2 * kStages; ++i) mbarrier_init(kBarriers + i * 8, 1);
    }
    sync_threads();
    for (int step = 0; step < kSteps; ++step) {
      Address const stage = step % kStages * kLine, full = kBarriers + step % kStages * 8, empty = full + kStages * 8;
      unsigned const parity = step / kStages % 2;
      if (warp() == 0) {
        if (!elect()) continue;
        if (flaw != PipelineFlaw::kFillsEarly)
          mbarrier_wait(empty, parity ^ (flaw == PipelineFlaw::kOtherParity ? 0 : 1));
        mbarrier_expect_tx(full, kLine - (flaw == PipelineFlaw::kFewerBytes ? 16 : 0));
        load_bytes(stage, &data[step * 32], kLine, full);
      } else {
        if (flaw != PipelineFlaw::kReadsEarly) mbarrier_wait(full, parity);
        if (flaw == PipelineFlaw::kReleasesEarly && lane() == 0) mbarrier_arrive(empty);
        sum += shared<std::uint32_t>(stage + lane() * 4);
        sync_warp();
        bool const releases = flaw != PipelineFlaw::kNoRelease && flaw != PipelineFlaw::kReleasesEarly;
        if (releases && lane() == 0) mbarrier_arrive(empty);
      }
    }
  });
  return sum == std::accumulate(data.begin(), data.end(), std::uint64_t{0});
}

// A lane has TMA store a slot that the warp fills again and again.
enum class StoreFlaw { kNone, kDoesNotWait, kNoLaneWaits, kEndsEarly };
bool stores(StoreFlaw flaw) {
  constexpr int kSteps = 6, kColumns = 32;
  alignas(16) std::array<std::uint32_t, kSteps * kColumns> out{};
  CUtensorMap const map{
      reinterpret_cast<unsigned char*>(out.data()), {kColumns, kSteps}, kColumns * 4, {kColumns, 1}, 4, 0};
  run({1, 32, 1, 128}, [&] {
    for (int step = 0; step < kSteps; ++step) {
      bool const leads = elect();
      if (leads && flaw != StoreFlaw::kDoesNotWait) tma_store_wait(0);
      if (flaw != StoreFlaw::kNoLaneWaits) sync_warp();
      shared<std::uint32_t>(lane() * 4) = step * kColumns + lane();
      sync_warp();
      if (!leads) continue;
      tma_store(map, 0, step, 0);
      tma_store_commit();
    }
    if (flaw != StoreFlaw::kEndsEarly && elect()) tma_store_wait(0);
  });
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (out[i] != i) return false;
  }
  return true;
}

// A warpgroup multiplies tiles of ones, 8 columns: twice onto the same sums, in a group each.
enum class ProductFlaw { kNone, kReadsEarly, kOverwrites, kOnto };
bool products(ProductFlaw flaw) {
  constexpr int kRows = 64, kWeights = kRows * 128, kColumns = 8;
  int wrong = 0;
  run({1, 128, 1, kWeights + kColumns * 128}, [&] {
    std::memset(memory_at(threadIdx.x * 72, 72), 1, 72);
    sync_threads();
    std::uint32_t sums[kColumns / 2] = {5, 5, 5, 5};
    for (int group = 0; group < 2; ++group) {
      multiply(Element::kInt8, group * 2, kWeights >> 4, sums, kColumns, group != 0 || flaw == ProductFlaw::kOnto);
      commit_products();
    }
    wait_for_products(flaw == ProductFlaw::kReadsEarly || flaw == ProductFlaw::kOverwrites ? 1 : 0);
    sync_threads();
    if (flaw == ProductFlaw::kOverwrites) std::memset(memory_at(threadIdx.x * 72, 72), 0, 72);
    wait_for_products(flaw == ProductFlaw::kReadsEarly ? 1 : 0);
    for (std::uint32_t sum : sums) wrong += sum != 64;
  });
  return wrong == 0;
}

// A tile of ones times itself, in each format.
void formats_are_known() {
  constexpr struct {
    Element element;
    int one;
    std::uint32_t sum;
  } kFormats[] = {{Element::kInt8, 1, 32},
                  {Element::kE4M3, 0x38, std::bit_cast<std::uint32_t>(32.f)},
                  {Element::kE5M2, 0x3c, std::bit_cast<std::uint32_t>(32.f)}};
  for (auto const& format : kFormats) {
    run({1, 128, 1, 64 * 128}, [&] {
      std::memset(memory_at(threadIdx.x * 64, 64), format.one, 64);
      sync_threads();
      std::uint32_t sums[8 / 2];
      multiply(format.element, 0, 0, sums, 8, false);
      commit_products();
      wait_for_products(0);
      for (std::uint32_t got : sums) CHECK_EQUAL(got, format.sum);
    });
  }
}

// Of two blocks one sends, the other waits for the bytes; and threads copy into what they then read.
enum class ClusterFlaw { kNone, kSendsEarly, kReadsEarly, kCopiesLate };
bool cluster(ClusterFlaw flaw) {
  constexpr Address kBarrier = 1024, kCopied = 512;
  int wrong = 0;
  std::array<std::uint32_t, 64> data{};
  std::iota(data.begin(), data.end(), 7);
  run({2, 64, 2, 2048}, [&] {
    copy_small(kCopied + threadIdx.x * 4, &data[threadIdx.x], 4);
    commit_small_copies();
    if (rank_in_cluster() == 0 && threadIdx.x == 0) {
      mbarrier_init(kBarrier, 1);
      mbarrier_expect_tx(kBarrier, 64 * 4);
    }
    arrive_at_cluster();
    if (flaw != ClusterFlaw::kSendsEarly) emulated::cluster_sync();
    if (flaw != ClusterFlaw::kCopiesLate) wait_for_small_copies(0);
    std::uint32_t const value = shared<std::uint32_t>(kCopied + threadIdx.x * 4);
    if (rank_in_cluster() == 1) {
      st_async(dsmem_address(threadIdx.x * 4, 0), &value, 4, dsmem_address(kBarrier, 0));
    } else {
      if (flaw != ClusterFlaw::kReadsEarly) mbarrier_wait(kBarrier, 0);
      wrong += shared<std::uint32_t>(threadIdx.x * 4) != data[threadIdx.x];
    }
    wrong += value != data[threadIdx.x];
  });
  return wrong == 0;
}

// Each of two blocks says something to the other and, before its memory goes, waits for what it is told.
enum class PartingFlaw { kNone, kMeetsInstead };
bool parting(PartingFlaw flaw) {
  run({2, 32, 2, 1024}, [&] {
    if (threadIdx.x == 0) mbarrier_init(0, 1);
    arrive_at_cluster();
    emulated::cluster_sync();
    if (threadIdx.x == 0) arrive_at_distant_barrier(dsmem_address(0, rank_in_cluster() ^ 1));
    if (flaw == PartingFlaw::kNone) return mbarrier_wait(0, 0);
    sync_warp();
    arrive_at_cluster();
    emulated::cluster_sync();
  });
  return true;
}

// Two warps take turns at a slot, by a pair of named barriers.
enum class TurnFlaw { kNone, kNoTurn };
bool turns(TurnFlaw flaw) {
  int wrong = 0;
  run({1, 64, 1, 128}, [&] {
    if (warp() == 1) arrive_at_named_barrier(1, 64);
    for (int turn = 0; turn < 4; ++turn) {
      if (flaw != TurnFlaw::kNoTurn) wait_at_named_barrier(1 + warp(), 64);
      shared<int>(lane() * 4) = warp();
      wrong += shared<int>(lane() * 4) != warp();
      arrive_at_named_barrier(2 - warp(), 64);
    }
    if (warp() == 0) wait_at_named_barrier(1, 64);
  });
  return wrong == 0;
}

// A box that reaches over the matrix on all sides: zeros come in, and out goes but what is inside.
void boxes_are_cut() {
  constexpr int kRows = 3, kColumns = 48, kBox = 64, kBarrier = 1024;
  alignas(16) unsigned char in[kRows * kColumns], out[(kRows + 1) * kColumns];
  std::iota(std::begin(in), std::end(in), 1);
  std::memset(out, 0, sizeof out);
  CUtensorMap const from{in, {kColumns, kRows}, kColumns, {kBox, 8}, 1, 64};
  CUtensorMap const to{out, {kColumns, kRows}, kColumns, {kBox, 8}, 1, 64};
  run({1, 1, 1, 2048}, [&] {
    mbarrier_init(kBarrier, 1);
    mbarrier_expect_tx(kBarrier, kBox * 8);
    load_box(0, from, -16, -1, kBarrier);
    mbarrier_wait(kBarrier, 0);
    CHECK_EQUAL(int{shared<unsigned char>(0)}, 0);
    CHECK_EQUAL(int{shared<unsigned char>(64 + 16)}, 1);  // the second piece of the second row, whose lines are one
    CHECK_EQUAL(int{shared<unsigned char>((3 * 64 + 32) ^ 16)}, 2 * kColumns + 17);
    tma_store(to, -16, -1, 0);
    tma_store_commit();
    tma_store_wait(0);
  });
  CHECK(std::equal(std::begin(in), std::end(in), out));
  CHECK_EQUAL(std::count(std::end(out) - kColumns, std::end(out), 0), kColumns);
}

void misuse_is_named() {
  auto const one_block = [](std::function<void()> const& kernel) { run({1, 64, 1, 1024}, kernel); };
  CHECK_THROWS(Failure, one_block([] { lane() < 5 ? sync_warp() : void(shuffle(0, 0)); }), "__syncwarp", "__shfl_sync");
  CHECK_THROWS(Failure, one_block([] {
                 if (lane() != 3) sync_warp();
               }),
               "__syncwarp");
  CHECK_THROWS(Failure, one_block([] {
                 if (threadIdx.x == 0) mbarrier_init(8, 60);
                 sync_threads();
                 mbarrier_arrive(8);
                 sync_threads();
                 mbarrier_wait(8, 1);
               }),
               "deadlock", "warp 1: an mbarrier at 8 (56 arrivals and 0 bytes missing), 32 lanes");
  CHECK_THROWS(Failure, one_block([] {
                 if (threadIdx.x == 0) mbarrier_init(0, 2), mbarrier_expect_tx(0, 16);
                 sync_threads();
                 mbarrier_arrive(0);
               }),
               "one arrival too many");
  CHECK_THROWS(Failure, one_block([] { mbarrier_arrive(8); }), "a barrier that nobody made");
  CHECK_THROWS(Failure, one_block([] { memory_at(1020, 8); }), "past shared memory, to 1028");
  CHECK_THROWS(Failure, one_block([] { dynamic_smem()[1024 + threadIdx.x] = 0; }), "wrote past its memory");
  CHECK_THROWS(Failure, one_block([] { wait_at_named_barrier(1, warp() == 0 ? 64 : 32); }), "named barrier");
  CHECK_THROWS(Failure, one_block([] { multiply(Element::kInt8, threadIdx.x, 0, dynamic_smem(), 8, false); }),
               "another product than other lanes");
  CHECK_THROWS(Failure,
               run({2, 32, 2, 1024},
                   [] {
                     if (rank_in_cluster() == 0) return;
                     arrive_at_cluster();
                     emulated::cluster_sync();  // for those that have not ended
                     memory_at(dsmem_address(0, 0), 4);
                   }),
               "a block that has ended");
  CHECK_THROWS(Failure, run({1, 32, 1, 1024}, [] { memory_at(dsmem_address(0, 1), 4); }),
               "a block that its cluster does not have");
}

}  // namespace

int main() {
  catches(__LINE__, pipeline,
          {PipelineFlaw::kReadsEarly, PipelineFlaw::kFillsEarly, PipelineFlaw::kNoRelease, PipelineFlaw::kReleasesEarly,
           PipelineFlaw::kFewerBytes, PipelineFlaw::kOtherParity});
  catches(__LINE__, stores, {StoreFlaw::kDoesNotWait, StoreFlaw::kNoLaneWaits, StoreFlaw::kEndsEarly});
  catches(__LINE__, products, {ProductFlaw::kReadsEarly, ProductFlaw::kOverwrites, ProductFlaw::kOnto});
  catches(__LINE__, cluster, {ClusterFlaw::kSendsEarly, ClusterFlaw::kReadsEarly, ClusterFlaw::kCopiesLate});
  catches(__LINE__, parting, {PartingFlaw::kMeetsInstead});
  catches(__LINE__, turns, {TurnFlaw::kNoTurn});
  formats_are_known();
  boxes_are_cut();
  misuse_is_named();
  return test::failures != 0;
}

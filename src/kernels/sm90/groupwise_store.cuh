#pragma once

// Store path of the groupwise GEMM: whole lines by TMA, at once or during the next tile's products.

#include "kernels/common/ptx/cp_async.cuh"
#include "kernels/common/ptx/tma.cuh"
#include "kernels/sm90/groupwise_epilogue.cuh"

namespace epiloq::gemm {

// A warp's output path: it writes its rows to staging slots in shared memory, from which TMA stores whole ones
// asynchronously; the warp copies the rest. As all SMs finish tiles together and their stores would delay the next
// loads, a tile's slots may be stored one by one during the next tile's products.
template <class C>
class GroupwiseStore {
 public:
  using Sum = typename C::Sum;
  using Epilogue = GroupwiseEpilogue<C>;
  using Exchange = typename Epilogue::Exchange;

  // TMA writes whole 16-byte units only.
  static bool can_store_boxes(GroupwiseProblem const& p) {
    return C::kStoresBoxes && Slot::has_lines(p) && (C::kTransposesD ? p.m : p.n) % Slot::kUnit == 0;
  }

  // `first_row`: the warp's first row in a tile; the rows of the next round follow kRoundRows later.
  __device__ GroupwiseStore(GroupwiseParams const& params, typename C::Shared const& shared, int warp, int first_row,
                            int lane)
      : params_(params),
        epilogue_(params, shared, warp, first_row, lane),
        staging_(shared.staging(warp)),
        first_row_(first_row),
        lane_(lane) {}

  // Before a tile's products, and after them.
  __device__ __forceinline__ void load_operands(GroupwiseTile const& tile) { epilogue_.load_operands(tile); }
  __device__ __forceinline__ void await_operands() const { epilogue_.await_operands(); }

  // Moves the sums of the first round to their slots, which are all stored once the last round has filled its own.
  __device__ __forceinline__ void fill_first_round(Sum const (&sums)[C::kRounds][C::kRowSums],
                                                   GroupwiseTile const& tile) {
    store_all_pending();
    await_operands();
    acquire_slots<0>();
    fill_round<0>(sums, tile);
  }

  // Stores the warp's rows of a tile through the epilogue, during the next tile's products unless that has none or too
  // few. (A tile with split K has half as many; what is left is stored before the next tile's epilogue.)
  __device__ __forceinline__ void store(Sum const (&sums)[C::kRounds][C::kRowSums], GroupwiseTile const& tile,
                                        bool is_last_or_short, Exchange const& exchange) {
    if constexpr (C::kFillsSlotsEarly) {
      fill_round<1>(sums, tile);
      store_slots(tile, is_last_or_short);
    } else {
      store_all_pending();
      // warp_uniform, for the sake of the products' addresses: a branch lies between them.
      bool const by_box = stores_by_box(tile.first_row + first_row_ + kLastRound, tile.end_row);
      bool const later = C::kDefersStores && warp_uniform(!is_last_or_short && by_box);
      params_.p.bias == nullptr ? store_parts<false>(sums, tile, later, exchange)
                                : store_parts<true>(sums, tile, later, exchange);
    }
  }

  // Between two products: stores one pending slot of the previous tile.
  __device__ __forceinline__ void store_pending() {
    if (!C::kDefersStores || pending_ == 0) return;
    int const part = C::kParts - pending_;
    --pending_;
    if (elect_one()) {
      issue_store(part, part, pending_row_, pending_column_);
      tma_store_commit();
    }
  }

  __device__ __forceinline__ void store_all_pending() {
#pragma unroll 1
    while (pending_ > 0) store_pending();
  }

  // Waits for all stores before shared memory is released.
  __device__ void finish() {
    store_all_pending();
    if constexpr (C::kStoresBoxes) {
      if (elect_one()) tma_store_wait<0>();
    }
  }

 private:
  using Slot = GroupwiseSlot<C>;
  static constexpr int kLastRound = (C::kRounds - 1) * C::kRoundRows;

  // Fills a slot, and stores it at once or leaves it to store_pending.
  template <bool kHasBias>
  __device__ __forceinline__ void store_parts(Sum const (&sums)[C::kRounds][C::kRowSums], GroupwiseTile const& tile,
                                              bool later, Exchange const& exchange) {
    int const tile_row = tile.first_row + first_row_;
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      int const round = part / C::kChunks, chunk = part % C::kChunks, slot = part % C::kSlots;
      if constexpr (C::kSplitsLastWave) {
        if (exchange.sends()) {
#pragma unroll
          for (int j = 0; j < Epilogue::kColumnGroups; ++j) {
            if (!Epilogue::in_tile(chunk, j)) continue;
            int const first = Epilogue::kGroupSums * (chunk * Epilogue::kColumnGroups + j);
            exchange.template send<Epilogue::kGroupSums>(sums[round] + first, first);
          }
          continue;
        }
      }
      if (part == 0) acquire_slots<0>();
      if (part >= C::kSlots) acquire_slots<C::kSlots - 1>();
      epilogue_.template fill_slot<kHasBias>(slot_at(slot), sums[round], round, chunk, tile, exchange);
      if (later) continue;
      bool const by_box = stores_by_box(tile_row + round * C::kRoundRows, tile.end_row);
      if constexpr (C::kStoresBoxes) fence_proxy_async();
      __syncwarp();
      if constexpr (C::kStoresBoxes) {
        if (elect_one()) {
          if (by_box) issue_store(slot, part, tile_row, tile.first_column);
          tma_store_commit();  // one group per slot, even an empty one
        }
      }
      if (!by_box) copy_part(slot, part, tile);
    }
    if (!later) return;
    fence_proxy_async();
    __syncwarp();
    defer(tile);
  }

  // With two rounds, whose parts have a slot each.
  template <int kRound>
  __device__ __forceinline__ void fill_round(Sum const (&sums)[C::kRounds][C::kRowSums],
                                             GroupwiseTile const& tile) const {
    static_assert(C::kRounds == 2 && C::kParts <= C::kSlots);
    params_.p.bias == nullptr ? fill_parts<kRound, false>(sums[kRound], tile)
                              : fill_parts<kRound, true>(sums[kRound], tile);
  }
  template <int kRound, bool kHasBias>
  __device__ __forceinline__ void fill_parts(Sum const (&sums)[C::kRowSums], GroupwiseTile const& tile) const {
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk) {
      epilogue_.template fill_slot<kHasBias>(slot_at(kRound * C::kChunks + chunk), sums, kRound, chunk, tile, {});
    }
  }

  // Stores all filled slots. Few instructions on either path: code between two tiles must be fetched.
  __device__ __forceinline__ void store_slots(GroupwiseTile const& tile, bool is_last_or_short) {
    int const tile_row = tile.first_row + first_row_;
    // warp_uniform, as in `store`.
    bool const by_box = warp_uniform(stores_by_box(tile_row + kLastRound, tile.end_row));
    bool const later = warp_uniform(!is_last_or_short);
    fence_proxy_async();
    __syncwarp();
    if (!by_box) {
#pragma unroll 1
      for (int part = 0; part < C::kParts; ++part) copy_part(part, part, tile);
    } else if (later) {
      defer(tile);
    } else if (elect_one()) {
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) issue_store(part, part, tile_row, tile.first_column);
      tma_store_commit();
    }
  }

  // Leaves the slots to store_pending.
  __device__ __forceinline__ void defer(GroupwiseTile const& tile) {
    pending_ = C::kParts, pending_row_ = tile.first_row + first_row_, pending_column_ = tile.first_column;
  }

  __device__ __forceinline__ unsigned char* slot_at(int slot) const { return staging_ + slot * C::kSlotBytes; }

  // Waits until all but the last kPending stores have read their slots.
  template <int kPending>
  __device__ __forceinline__ void acquire_slots() const {
    if constexpr (C::kStoresBoxes) {
      if (elect_one()) tma_store_wait<kPending>();
    }
    __syncwarp();
  }

  // By one lane, which then commits.
  __device__ __forceinline__ void issue_store(int slot, int part, int tile_row, int tile_column) const {
    constexpr int kBytes = sizeof(typename C::Out);
    int const row = tile_row + part / C::kChunks * C::kRoundRows, column = tile_column + part % C::kChunks * C::kChunk;
    SharedAddress const from = shared_address(slot_at(slot));
    if constexpr (C::kTransposesD) {
      tma_store(params_.output, row * kBytes, column, from);
    } else {
      tma_store(params_.output, column * kBytes, row, from);
    }
  }

  // By the warp's threads, where TMA cannot store.
  __device__ __forceinline__ void copy_part(int slot, int part, GroupwiseTile const& tile) const {
    int const row = tile.first_row + first_row_ + part / C::kChunks * C::kRoundRows;
    int const column = part % C::kChunks * C::kChunk;
    Slot::copy(slot_at(slot), params_.p, row, tile.end_row, tile.first_column + column, min(C::kChunk, C::kN - column),
               lane_);
  }

  // TMA clips at D's last row and column; an expert's rows may end before.
  __device__ __forceinline__ bool stores_by_box(int first_row, int end_row) const {
    auto const& p = params_.p;
    bool const last_is_own = p.offs == nullptr && p.masked_m == nullptr;
    return C::kStoresBoxes && params_.stores_boxes && (last_is_own || first_row + C::kWarpRows <= end_row);
  }

  GroupwiseParams const& params_;
  Epilogue epilogue_;
  unsigned char* staging_;
  int first_row_, lane_;
  int pending_ = 0, pending_row_ = 0,
      pending_column_ = 0;  // parts of the previous tile that are pending, and its position
};

}  // namespace epiloq::gemm

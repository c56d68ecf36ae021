#pragma once

// How the group-wise kernel's tiles leave: by whole lines, at once or during the next one's products.

#include "kernels/common/ptx/cp_async.cuh"
#include "kernels/common/ptx/tma.cuh"
#include "kernels/sm90/groupwise_epilogue.cuh"

namespace epiloq::gemm {

// A warp's way out. It writes its rows into slots of shared memory. TMA takes whole ones from there to D while the warp
// goes on; where it cannot, the warp copies. All SMs end their tiles together, and what they store at once holds up
// what they read for the next: so a tile's slots may leave one by one between the next one's products.
template <class C>
class GroupwiseStore {
 public:
  using Sum = typename C::Sum;
  using Epilogue = GroupwiseEpilogue<C>;
  using Exchange = typename Epilogue::Exchange;

  // TMA would write a last piece of a row whole.
  static bool can_store_boxes(GroupwiseProblem const& p) {
    return C::kStoresBoxes && Slot::has_lines(p) && p.n % Slot::kUnit == 0;
  }

  // `first_row` of the warp's in a tile; those of the next round are kRoundRows further.
  __device__ GroupwiseStore(GroupwiseParams const& params, typename C::Shared const& shared, int warp, int first_row,
                            int lane)
      : params_(params),
        epilogue_(params, shared, warp, first_row, lane),
        staging_(shared.staging(warp)),
        first_row_(first_row),
        lane_(lane) {}

  // Before a tile's products, and behind them.
  __device__ __forceinline__ void expect(GroupwiseTile const& tile) { epilogue_.expect(tile); }
  __device__ __forceinline__ void await_operands() const { epilogue_.await_operands(); }

  // Those of a first round into their slots, from which all leave once the last round has filled its own.
  __device__ __forceinline__ void fill_first_round(Sum const (&sums)[C::kRounds][C::kRowSums],
                                                   GroupwiseTile const& tile) {
    send_rest();
    await_operands();
    take_slots<0>();
    fill_round<0>(sums, tile);
  }

  // The warp's rows of a tile: sums, through the epilogue if there is one, and bias as Out. They may leave during the
  // next tile's products, unless there are none, or too few. (A tile whose K is shared has half as many: what has not
  // left during those leaves before it is stored.)
  __device__ __forceinline__ void store(Sum const (&sums)[C::kRounds][C::kRowSums], GroupwiseTile const& tile,
                                        bool is_last_or_short, Exchange const& exchange) {
    if constexpr (C::kFillsEarly) {
      fill_round<1>(sums, tile);
      leave(tile, is_last_or_short);
    } else {
      send_rest();
      // Said to be uniform, for the sake of products' addresses: a branch stands between them.
      bool const by_box = leaves_by_box(tile.first_row + first_row_ + kLastRound, tile.end_row);
      bool const later = C::kSendsLater && warp_uniform(!is_last_or_short && by_box);
      params_.p.bias == nullptr ? store_parts<false>(sums, tile, later, exchange)
                                : store_parts<true>(sums, tile, later, exchange);
    }
  }

  // Between two products: a slot of the tile before, if there is one left.
  __device__ __forceinline__ void send_one() {
    if (!C::kSendsLater || unsent_ == 0) return;
    int const part = C::kParts - unsent_;
    --unsent_;
    if (elect_one()) {
      send(part, part, unsent_row_, unsent_column_);
      tma_store_commit();
    }
  }

  __device__ __forceinline__ void send_rest() {
#pragma unroll 1
    while (unsent_ > 0) send_one();
  }

  // Before shared memory goes.
  __device__ void finish() {
    send_rest();
    if constexpr (C::kStoresBoxes) {
      if (elect_one()) tma_store_wait<0>();
    }
  }

 private:
  using Slot = GroupwiseSlot<C>;
  static constexpr int kLastRound = (C::kRounds - 1) * C::kRoundRows;

  // A slot leaves at once, or all are kept for send_one.
  template <bool kHasBias>
  __device__ __forceinline__ void store_parts(Sum const (&sums)[C::kRounds][C::kRowSums], GroupwiseTile const& tile,
                                              bool later, Exchange const& exchange) {
    int const tile_row = tile.first_row + first_row_;
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      int const round = part / C::kChunks, chunk = part % C::kChunks, slot = part % C::kSlots;
      if constexpr (C::kSplitsLastWave) {
        if (exchange.gives()) {
#pragma unroll
          for (int j = 0; j < Epilogue::kEights; ++j) {
            if (!Epilogue::is_there(chunk, j)) continue;
            int const first = Epilogue::kTogether * (chunk * Epilogue::kEights + j);
            exchange.template give<Epilogue::kTogether>(sums[round] + first, first);
          }
          continue;
        }
      }
      if (part == 0) take_slots<0>();
      if (part >= C::kSlots) take_slots<C::kSlots - 1>();
      epilogue_.template fill_slot<kHasBias>(slot_at(slot), sums[round], round, chunk, tile, exchange);
      if (later) continue;
      bool const by_box = leaves_by_box(tile_row + round * C::kRoundRows, tile.end_row);
      if constexpr (C::kStoresBoxes) fence_proxy_async();
      __syncwarp();
      if constexpr (C::kStoresBoxes) {
        if (elect_one()) {
          if (by_box) send(slot, part, tile_row, tile.first_column);
          tma_store_commit();  // a slot is a group, if an empty one
        }
      }
      if (!by_box) copy_part(slot, part, tile);
    }
    if (!later) return;
    fence_proxy_async();
    __syncwarp();
    keep(tile);
  }

  // Of two rounds, whose parts have a slot each.
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

  // All slots, once they are filled. In few instructions, whatever the way: what stands between the end of one tile and
  // the beginning of the next has to be fetched.
  __device__ __forceinline__ void leave(GroupwiseTile const& tile, bool is_last_or_short) {
    int const tile_row = tile.first_row + first_row_;
    // Said to be uniform, as in `store`.
    bool const by_box = warp_uniform(leaves_by_box(tile_row + kLastRound, tile.end_row));
    bool const later = warp_uniform(!is_last_or_short);
    fence_proxy_async();
    __syncwarp();
    if (!by_box) {
#pragma unroll 1
      for (int part = 0; part < C::kParts; ++part) copy_part(part, part, tile);
    } else if (later) {
      keep(tile);
    } else if (elect_one()) {
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) send(part, part, tile_row, tile.first_column);
      tma_store_commit();
    }
  }

  // For send_one.
  __device__ __forceinline__ void keep(GroupwiseTile const& tile) {
    unsent_ = C::kParts, unsent_row_ = tile.first_row + first_row_, unsent_column_ = tile.first_column;
  }

  __device__ __forceinline__ unsigned char* slot_at(int slot) const { return staging_ + slot * C::kSlotBytes; }

  // Once all but the last kPending that were given have been read.
  template <int kPending>
  __device__ __forceinline__ void take_slots() const {
    if constexpr (C::kStoresBoxes) {
      if (elect_one()) tma_store_wait<kPending>();
    }
    __syncwarp();
  }

  // By one lane, which then commits.
  __device__ __forceinline__ void send(int slot, int part, int tile_row, int tile_column) const {
    int const column = (tile_column + part % C::kChunks * C::kChunk) * static_cast<int>(sizeof(typename C::Out));
    tma_store(params_.output, column, tile_row + part / C::kChunks * C::kRoundRows, shared_address(slot_at(slot)));
  }

  // By the warp, where TMA cannot.
  __device__ __forceinline__ void copy_part(int slot, int part, GroupwiseTile const& tile) const {
    int const row = tile.first_row + first_row_ + part / C::kChunks * C::kRoundRows;
    int const column = part % C::kChunks * C::kChunk;
    Slot::copy(slot_at(slot), params_.p, row, tile.end_row, tile.first_column + column, min(C::kChunk, C::kN - column),
               lane_);
  }

  // TMA leaves out what is past D's own last row and column; an expert's rows may end before.
  __device__ __forceinline__ bool leaves_by_box(int first_row, int end_row) const {
    auto const& p = params_.p;
    bool const last_is_own = p.offs == nullptr && p.masked_m == nullptr;
    return C::kStoresBoxes && params_.stores_boxes && (last_is_own || first_row + C::kWarpRows <= end_row);
  }

  GroupwiseParams const& params_;
  Epilogue epilogue_;
  unsigned char* staging_;
  int first_row_, lane_;
  int unsent_ = 0, unsent_row_ = 0, unsent_column_ = 0;  // parts of the tile before that have not left, and its place
};

}  // namespace epiloq::gemm

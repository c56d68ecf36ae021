#pragma once

// How the group-wise kernel's tiles leave: scales of whole rows, bias, conversion, whole lines.

#include "core/async_copy.cuh"
#include "epilogue/eval.h"
#include "gemm/sm90_groupwise_share.cuh"
#include "gemm/sm90_groupwise_slot.cuh"
#include "gemm/sm90_groupwise_tile.cuh"
#include "gemm/tma.cuh"

namespace epiloq::gemm {

// A warp's way out. It writes its rows into slots of shared memory. TMA takes whole ones from there to D while the warp
// goes on; where it cannot, the warp copies. All SMs end their tiles together, and what they store at once holds up
// what they read for the next: so a tile's slots may leave one by one between the next one's products. Scales of whole
// rows are asked for before there is anything to multiply by them, and then the epilogue's expression is evaluated in
// registers.
template <class C>
class GroupwiseStore {
 public:
  using Out = typename C::Out;
  using Sum = typename C::Sum;
  struct NoExchange {};
  using Exchange = std::conditional_t<C::kSharesLastWave, RingExchange<C>, NoExchange>;

  // TMA would write a last piece of a row whole.
  static bool can_store_boxes(GroupwiseProblem const& p) {
    return C::kStoresBoxes && Slot::has_lines(p) && p.n % Slot::kUnit == 0;
  }

  // `first_row` of the warp's in a tile; those of the next round are kRoundRows further.
  __device__ GroupwiseStore(GroupwiseParams const& params, typename C::Shared const& shared, int warp, int first_row,
                            int lane)
      : params_(params),
        staging_(shared.staging(warp)),
        of_rows_(shared.row_operands(warp)),
        of_columns_(shared.column_operands(C::kSharesColumns ? 0 : warp)),
        first_row_(first_row),
        lane_(lane),
        own_(Slot::swizzled(lane / 4, 2 * (lane % 4))) {}

  // Before a tile's products: asks for the operands of its epilogue.
  __device__ __forceinline__ void expect(GroupwiseTile const& tile) {
    if constexpr (C::kWholeRows) {
      auto const& p = params_.p;
      int const row = tile.first_row + first_row_ + lane_ / C::kWarpRows * C::kRoundRows + lane_ % C::kWarpRows;
      int const known_row = min(row, max(tile.end_row - 1, 0));
      __syncwarp();  // those of the tile before have been read
      if constexpr (C::kSharesColumns) {
        of_columns_ += to_other_copy_;
        to_other_copy_ = -to_other_copy_;
      }
      float const* const scale_b = p.scale_b.ptr + std::int64_t{tile.expert} * p.scale_b_expert;
      copy_columns(of_columns_, scale_b, p.scale_b.stride_row, tile.first_column);
      copy_rows(of_rows_, p.scale_a.ptr, p.scale_a.stride_row, known_row);
      if constexpr (C::kHasZeroPoint) {
        copy_columns(column_zero_points(), p.azp_adj, 1, tile.first_column);
        copy_rows(row_zero_points(), p.azp, p.azp_stride, known_row);
      }
      commit_copies();
    }
  }

  // Until they are there: those that this warp asked for. Before others may use them, too, warps have to meet.
  __device__ __forceinline__ void await_operands() const {
    if constexpr (C::kWholeRows) {
      wait_for_copies<0>();
      __syncwarp();
    }
  }

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
      bool const later = C::kSendsLater && uniform(!is_last_or_short && by_box);
      params_.p.bias == nullptr ? store_parts<false>(sums, tile, later, exchange)
                                : store_parts<true>(sums, tile, later, exchange);
    }
  }

  // Between two products: a slot of the tile before, if there is one left.
  __device__ __forceinline__ void send_one() {
    if (!C::kSendsLater || unsent_ == 0) return;
    int const part = C::kParts - unsent_;
    --unsent_;
    if (is_elected()) {
      send(part, part, unsent_row_, unsent_column_);
      commit_stores();
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
      if (is_elected()) wait_for_stores<0>();
    }
  }

 private:
  using Slot = GroupwiseSlot<C>;
  static constexpr int kEights = C::kChunk / 8;  // columns of a slot
  static constexpr int kLastRound = (C::kRounds - 1) * C::kRoundRows;
  static constexpr int kEightRows = C::kWarpRows / 8;  // of a thread, eight apart
  static constexpr int kTogether = 2 * kEightRows;     // sums of eight columns
  static constexpr bool is_there(int chunk, int eight) { return chunk * kEights + eight < C::kN / 8; }

  // One value a column or a row, all 4 bytes; null rows are 1.
  template <class T>
  __device__ __forceinline__ void copy_columns(T* to, T const* columns, int stride, int first_column) const {
    constexpr int kCopiers = C::kSharesColumns ? 32 * C::kMathWarps : 32;
    int const first = C::kSharesColumns ? threadIdx.x : lane_;
#pragma unroll
    for (int i = 0; i < C::kN; i += kCopiers) {
      int const column = min(first_column + i + first, params_.p.n - 1);
      if (i + first < C::kN) copy4(shared_address(to + i + first), columns + std::int64_t{column} * stride);
    }
  }

  template <class T>
  __device__ __forceinline__ void copy_rows(T* to, T const* rows, int stride, int row) const {
    if (lane_ >= C::kWarpRows * C::kRounds) return;
    if (rows != nullptr) {
      copy4(shared_address(to + lane_), rows + std::int64_t{row} * stride);
    } else {
      to[lane_] = T(1);
    }
  }

  // A slot leaves at once, or all are kept for send_one.
  template <bool kHasBias>
  __device__ __forceinline__ void store_parts(Sum const (&sums)[C::kRounds][C::kRowSums], GroupwiseTile const& tile,
                                              bool later, Exchange const& exchange) {
    int const tile_row = tile.first_row + first_row_;
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      int const round = part / C::kChunks, chunk = part % C::kChunks, slot = part % C::kSlots;
      if constexpr (C::kSharesLastWave) {
        if (exchange.gives()) {
#pragma unroll
          for (int j = 0; j < kEights; ++j) {
            if (!is_there(chunk, j)) continue;
            int const first = kTogether * (chunk * kEights + j);
            exchange.template give<kTogether>(sums[round] + first, first);
          }
          continue;
        }
      }
      if (part == 0) take_slots<0>();
      if (part >= C::kSlots) take_slots<C::kSlots - 1>();
      fill_slot<kHasBias>(slot_at(slot), sums[round], round, chunk, tile, exchange);
      if (later) continue;
      bool const by_box = leaves_by_box(tile_row + round * C::kRoundRows, tile.end_row);
      if constexpr (C::kStoresBoxes) fence_stored();
      __syncwarp();
      if constexpr (C::kStoresBoxes) {
        if (is_elected()) {
          if (by_box) send(slot, part, tile_row, tile.first_column);
          commit_stores();  // a slot is a group, if an empty one
        }
      }
      if (!by_box) copy_part(slot, part, tile);
    }
    if (!later) return;
    fence_stored();
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
      fill_slot<kHasBias>(slot_at(kRound * C::kChunks + chunk), sums, kRound, chunk, tile, {});
    }
  }

  // All slots, once they are filled. In few instructions, whatever the way: what stands between the end of one tile and
  // the beginning of the next has to be fetched.
  __device__ __forceinline__ void leave(GroupwiseTile const& tile, bool is_last_or_short) {
    int const tile_row = tile.first_row + first_row_;
    // Said to be uniform, as in `store`.
    bool const by_box = uniform(leaves_by_box(tile_row + kLastRound, tile.end_row));
    bool const later = uniform(!is_last_or_short);
    fence_stored();
    __syncwarp();
    if (!by_box) {
#pragma unroll 1
      for (int part = 0; part < C::kParts; ++part) copy_part(part, part, tile);
    } else if (later) {
      keep(tile);
    } else if (is_elected()) {
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) send(part, part, tile_row, tile.first_column);
      commit_stores();
    }
  }

  // For send_one.
  __device__ __forceinline__ void keep(GroupwiseTile const& tile) {
    unsent_ = C::kParts, unsent_row_ = tile.first_row + first_row_, unsent_column_ = tile.first_column;
  }

  // What the epilogue takes besides sums: of a slot's columns, two neighbours of each eight, and of two rows.
  struct OfColumns {
    float2 scale[kEights], bias[kEights];
    int2 azp_adj[kEights];
  };
  struct OfRows {
    float scale[2];
    int azp[2];
  };

  // All that is read stands before what is written: the compiler takes one for the other.
  template <bool kHasBias>
  __device__ __forceinline__ void fill_slot(unsigned char* slot, Sum const (&sums)[C::kRowSums], int round, int chunk,
                                            GroupwiseTile const& tile, Exchange const& exchange) const {
    Sum whole[kEights][kTogether];  // with those of the other block
    OfColumns columns;
    OfRows rows{{1.f, 1.f}, {1, 1}};
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      int const column = 8 * (chunk * kEights + j) + 2 * (lane_ % 4);
      columns.bias[j] = kHasBias && is_there(chunk, j) ? bias_of(tile.first_column + column) : float2{};
      if (!C::kWholeRows || !is_there(chunk, j)) continue;
      columns.scale[j] = *reinterpret_cast<float2 const*>(of_columns_ + column);
      if (C::kHasZeroPoint) columns.azp_adj[j] = *reinterpret_cast<int2 const*>(column_zero_points() + column);
    }
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      if (!is_there(chunk, j)) continue;
      int const first = kTogether * (chunk * kEights + j);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) whole[j][i] = sums[first + i];
      if constexpr (C::kSharesLastWave) {
        if (exchange.takes()) exchange.template add_others<kTogether>(whole[j], first);
      }
    }
#pragma unroll
    for (int i = 0; i < kEightRows && C::kWholeRows; ++i) {
      int const row = round * C::kWarpRows + lane_ / 4 + 8 * i;
      rows.scale[i] = of_rows_[row];
      if (C::kHasZeroPoint) rows.azp[i] = row_zero_points()[row];
    }
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      if (!is_there(chunk, j)) continue;
      float values[2 * kEightRows];
      finish_sums<kHasBias>(values, whole[j], rows, columns, j);
      unsigned char* const at = slot + (own_ ^ (8 * j * static_cast<int>(sizeof(Out))));
#pragma unroll
      for (int i = 0; i < kEightRows; ++i) Slot::put(at + 8 * i * C::kLine, values[2 * i], values[2 * i + 1]);
    }
  }

  __device__ __forceinline__ float2 bias_of(int column) const {
    auto const* const bias = static_cast<Out const*>(params_.p.bias);
    int const n = params_.p.n;
    return {column < n ? static_cast<float>(bias[column]) : 0.f,
            column + 1 < n ? static_cast<float>(bias[column + 1]) : 0.f};
  }

  __device__ __forceinline__ int* row_zero_points() const {
    return reinterpret_cast<int*>(of_rows_ + C::kRowOperands / 2);
  }
  __device__ __forceinline__ int* column_zero_points() const {
    return reinterpret_cast<int*>(of_columns_ + C::kColumnOperands / 2);
  }

  // Two neighbours of a row, and of the eighth after it if the warp has that.
  template <bool kHasBias>
  __device__ __forceinline__ void finish_sums(float (&values)[2 * kEightRows], Sum const* sums, OfRows const& rows,
                                              OfColumns const& columns, int j) const {
#pragma unroll
    for (int i = 0; i < 2 * kEightRows; ++i) {
      bool const second = i % 2 == 1;
      float const of_bias = second ? columns.bias[j].y : columns.bias[j].x;
      if constexpr (C::kWholeRows) {
        float const of_column = second ? columns.scale[j].y : columns.scale[j].x;
        int const adj = C::kHasZeroPoint ? second ? columns.azp_adj[j].y : columns.azp_adj[j].x : 0;
        epilogue::Operands with;
        with.scale_a = &rows.scale[i / 2], with.scale_b = &of_column, with.bias = &of_bias;
        with.azp_adj = &adj, with.azp = &rows.azp[i / 2];
        using Value = std::conditional_t<C::kExact, std::int32_t, float>;
        values[i] = epilogue::eval(C::Epilogue::template make<float>(with), static_cast<Value>(sums[i]), 0, 0);
      } else {
        values[i] = kHasBias ? sums[i] + of_bias : sums[i];
      }
    }
  }

  __device__ __forceinline__ unsigned char* slot_at(int slot) const { return staging_ + slot * C::kSlotBytes; }

  // Once all but the last kPending that were given have been read.
  template <int kPending>
  __device__ __forceinline__ void take_slots() const {
    if constexpr (C::kStoresBoxes) {
      if (is_elected()) wait_for_stores<kPending>();
    }
    __syncwarp();
  }

  // By one lane, which then commits.
  __device__ __forceinline__ void send(int slot, int part, int tile_row, int tile_column) const {
    int const column = (tile_column + part % C::kChunks * C::kChunk) * static_cast<int>(sizeof(Out));
    store_box(params_.output, column, tile_row + part / C::kChunks * C::kRoundRows, shared_address(slot_at(slot)));
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
  unsigned char* staging_;
  float *of_rows_, *of_columns_;            // operands of the epilogue, before their zero points
  int to_other_copy_ = C::kColumnOperands;  // of columns
  int first_row_, lane_;
  int own_;                                              // where the lane's first two values of a slot are
  int unsent_ = 0, unsent_row_ = 0, unsent_column_ = 0;  // parts of the tile before that have not left, and its place
};

}  // namespace epiloq::gemm

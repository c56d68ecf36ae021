#pragma once

// How the group-wise kernel's tiles leave: scales of whole rows, bias, conversion, whole lines.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/async_copy.cuh"
#include "epilogue/eval.h"
#include "gemm/sm90_groupwise_tile.cuh"
#include "gemm/tma.cuh"

namespace epiloq::gemm {

// A warp's way out. It writes 16 rows by a line of columns into a slot of shared memory, in the order of TMA's swizzle,
// of which no two lanes' writes meet in a bank. TMA takes whole slots from there to D while the warp goes on; where it
// cannot, the warp copies. Scales of whole rows are asked for before there is anything to multiply by them, and then
// the epilogue's expression is evaluated in registers.
template <class C>
class GroupwiseStore {
 public:
  using Out = typename C::Out;
  using Sum = typename C::Sum;

  // Whether D can be written 16 bytes at a time.
  static __host__ __device__ bool has_lines(GroupwiseProblem const& p) {
    return p.stride_d % kUnit == 0 && reinterpret_cast<std::uintptr_t>(p.d) % 16 == 0;
  }

  // `first_row` of the warp's first 16 in a tile; those of the next round are 64 further.
  __device__ GroupwiseStore(GroupwiseParams const& params, typename C::Shared const& shared, int warp, int first_row,
                            int lane)
      : params_(params),
        staging_(shared.staging(warp)),
        operands_(shared.whole_scales(warp)),
        first_row_(first_row),
        lane_(lane),
        own_(swizzled(lane / 4, 2 * (lane % 4))) {}

  // Before a tile's products: asks for the operands of its epilogue.
  __device__ __forceinline__ void expect(GroupwiseTile const& tile) const {
    if constexpr (C::kWholeRows) {
      auto const& p = params_.p;
      int const row = tile.first_row + first_row_ + lane_ / 16 * 64 + lane_ % 16;
      int const known_row = min(row, max(tile.end_row - 1, 0));
      __syncwarp();  // those of the tile before have been read
      float const* const scale_b = p.scale_b.ptr + std::int64_t{tile.expert} * p.scale_b_expert;
      copy_operands(operands_, scale_b, p.scale_b.stride_row, tile.first_column, p.scale_a.ptr, p.scale_a.stride_row,
                    known_row);
      if constexpr (C::kHasZeroPoint) {
        int* const zero_points = reinterpret_cast<int*>(operands_ + C::kScalesOfWarp);
        copy_operands(zero_points, p.azp_adj, 1, tile.first_column, p.azp, p.azp_stride, known_row);
      }
      commit_copies();
    }
  }

  // The warp's rows of a tile: sums, through the epilogue if there is one, and bias as Out.
  __device__ __forceinline__ void store(Sum const (&sums)[C::kRounds][C::kSums], GroupwiseTile const& tile) {
    if constexpr (C::kWholeRows) {
      wait_for_copies<0>();
      __syncwarp();
    }
#pragma unroll
    for (int round = 0; round < C::kRounds; ++round) {
      params_.p.bias == nullptr ? store_round<false>(sums[round], round, tile)
                                : store_round<true>(sums[round], round, tile);
    }
  }

  // Before shared memory goes.
  __device__ void finish() const {
    if constexpr (C::kStoresBoxes) {
      if (is_elected()) wait_for_stores<0>();
    }
  }

 private:
  static constexpr int kUnit = 16 / sizeof(Out);  // elements that are written at once

  // One value a column and one a row, all 4 bytes; null rows are 1.
  template <class T>
  __device__ __forceinline__ void copy_operands(T* to, T const* columns, int column_stride, int first_column,
                                                T const* rows, int row_stride, int row) const {
    SharedAddress const own = shared_address(to + lane_);
#pragma unroll
    for (int i = 0; i < C::kN; i += 32) {
      int const column = min(first_column + i + lane_, params_.p.n - 1);
      if (i + lane_ < C::kN) copy4(own + i * 4, columns + std::int64_t{column} * column_stride);
    }
    if (lane_ >= 16 * C::kRounds) return;
    if (rows != nullptr) {
      copy4(own + C::kN * 4, rows + std::int64_t{row} * row_stride);
    } else {
      to[C::kN + lane_] = T(1);
    }
  }

  template <bool kHasBias>
  __device__ __forceinline__ void store_round(Sum const (&sums)[C::kSums], int round, GroupwiseTile const& tile) {
    int const first_row = tile.first_row + first_row_ + round * 64;
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk) {
      constexpr int kOfChunk = C::kChunk / 8;
      unsigned char* const slot = take_slot();
#pragma unroll
      for (int j = 0; j < kOfChunk && chunk * kOfChunk + j < C::kN / 8; ++j) {
        int const eight = chunk * kOfChunk + j, column = 8 * eight + 2 * (lane_ % 4);
        float2 const bias = kHasBias ? bias_of(tile.first_column + column) : float2{};
        float values[4];
        finish_sums<kHasBias>(values, sums + 4 * eight, round, column, bias);
        unsigned char* const at = slot + (own_ ^ (8 * j * static_cast<int>(sizeof(Out))));
        put(at, values[0], values[1]);
        put(at + 8 * C::kLine, values[2], values[3]);
      }
      int const columns = min(C::kChunk, C::kN - chunk * C::kChunk);
      give(slot, first_row, tile.end_row, tile.first_column + chunk * C::kChunk, columns);
    }
  }

  __device__ __forceinline__ float2 bias_of(int column) const {
    auto const* const bias = static_cast<Out const*>(params_.p.bias);
    int const n = params_.p.n;
    return {column < n ? static_cast<float>(bias[column]) : 0.f,
            column + 1 < n ? static_cast<float>(bias[column + 1]) : 0.f};
  }

  // Two neighbours of a row, and of the eighth after it.
  template <bool kHasBias>
  __device__ __forceinline__ void finish_sums(float (&values)[4], Sum const* sums, int round, int column,
                                              float2 const& bias) const {
    if constexpr (C::kWholeRows) {
      // The operands of two columns and two rows, in registers.
      int const row = C::kN + round * 16 + lane_ / 4;
      float2 const scale_b = *reinterpret_cast<float2 const*>(operands_ + column);
      float const* const scale_a = operands_ + row;
      [[maybe_unused]] int2 azp_adj{};
      [[maybe_unused]] int const* azp = nullptr;
      if constexpr (C::kHasZeroPoint) {
        auto const* const zero_points = reinterpret_cast<int const*>(operands_ + C::kScalesOfWarp);
        azp_adj = *reinterpret_cast<int2 const*>(zero_points + column);
        azp = zero_points + row;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bool const second = i % 2 == 1;
        float const of_row = scale_a[i / 2 * 8], of_column = second ? scale_b.y : scale_b.x;
        float const of_bias = second ? bias.y : bias.x;
        epilogue::Operands with;
        with.scale_a = &of_row, with.scale_b = &of_column, with.bias = &of_bias;
        int const adj = second ? azp_adj.y : azp_adj.x, zero = C::kHasZeroPoint ? azp[i / 2 * 8] : 1;
        with.azp_adj = &adj, with.azp = &zero;
        using Value = std::conditional_t<C::kExact, std::int32_t, float>;
        values[i] = epilogue::eval(C::Epilogue::template make<float>(with), static_cast<Value>(sums[i]), 0, 0);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = kHasBias ? sums[i] + (i % 2 == 0 ? bias.x : bias.y) : sums[i];
    }
  }

  static __device__ __forceinline__ int swizzled(int row, int column) {
    return (row * C::kLine + column * static_cast<int>(sizeof(Out))) ^ (row % 8 * 16);
  }

  // The slot that was given longest ago, once it has been read.
  __device__ __forceinline__ unsigned char* take_slot() {
    if constexpr (C::kStoresBoxes) {
      if (is_elected()) wait_for_stores<C::kSlots - 1>();
    }
    __syncwarp();
    unsigned char* const slot = staging_ + next_ * C::kSlotBytes;
    next_ = next_ + 1 < C::kSlots ? next_ + 1 : 0;
    return slot;
  }

  // A slot's `columns`, of which some may be past D's last, as rows past the tile's. TMA leaves out what is past D's
  // own last row and column; an expert's rows may end before.
  __device__ __forceinline__ void give(unsigned char const* slot, int first_row, int end_row, int first_column,
                                       int columns) const {
    auto const& p = params_.p;
    bool const has_rows = first_row + 16 <= end_row;
    if constexpr (C::kStoresBoxes) {
      bool const stores = params_.stores_boxes && (has_rows || (p.offs == nullptr && p.masked_m == nullptr));
      fence_stored();
      __syncwarp();
      if (is_elected()) {
        if (stores) {
          store_box(params_.output, first_column * static_cast<int>(sizeof(Out)), first_row, shared_address(slot));
        }
        commit_stores();  // a slot is a group, if an empty one
      }
      if (stores) return;
    } else {
      __syncwarp();
    }
    auto* const target = static_cast<Out*>(p.d) + first_row * p.stride_d + first_column;
    if (!C::kStoresBoxes && has_rows && first_column + columns <= p.n && has_lines(p)) {
      int const units = columns / kUnit;
#pragma unroll
      for (int i = lane_; i < 16 * units; i += 32) {
        int const row = i / units, column = i % units * kUnit;
        *reinterpret_cast<int4*>(target + row * p.stride_d + column) =
            *reinterpret_cast<int4 const*>(slot + swizzled(row, column));
      }
    } else {
      int const rows = min(16, end_row - first_row), known = min(columns, p.n - first_column);
#pragma unroll 1
      for (int i = lane_; i < rows * C::kChunk; i += 32) {
        int const row = i / C::kChunk, column = i % C::kChunk;
        if (column < known) {
          target[row * p.stride_d + column] = *reinterpret_cast<Out const*>(slot + swizzled(row, column));
        }
      }
    }
  }

  static __device__ __forceinline__ void put(unsigned char* at, float a, float b) {
    if constexpr (std::is_same_v<Out, __nv_bfloat16>) {
      *reinterpret_cast<__nv_bfloat162*>(at) = __floats2bfloat162_rn(a, b);
    } else if constexpr (std::is_same_v<Out, __half>) {
      *reinterpret_cast<__half2*>(at) = __floats2half2_rn(a, b);
    } else {
      *reinterpret_cast<float2*>(at) = {a, b};
    }
  }

  GroupwiseParams const& params_;
  unsigned char* staging_;
  float* operands_;  // of the epilogue: of columns, of rows, and their zero points
  int first_row_, lane_;
  int own_;  // where the lane's first two values of a slot are
  int next_ = 0;
};

}  // namespace epiloq::gemm

#pragma once

// Epilogue of the groupwise GEMM: per-row scales, zero points, bias and conversion on the way from registers to the
// output staging buffer.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "epilogue/eval.h"
#include "kernels/common/ptx/cp_async.cuh"
#include "kernels/sm90/groupwise_split_k.cuh"
#include "kernels/sm90/groupwise_tile.cuh"
#include "problems/groupwise_gemm.h"

namespace epiloq::gemm {

// One output staging slot: a warp's rows by kChunk columns, in TMA's swizzled order, free of bank conflicts. Of D^T a
// line is a column's.
template <class C>
struct GroupwiseSlot {
  using Out = typename C::Out;
  static constexpr int kUnit = 16 / sizeof(Out);  // elements per 16-byte write

  // Whether D can be written 16 bytes at a time.
  static __host__ __device__ bool has_lines(GroupwiseProblem const& p) {
    return p.stride_d % kUnit == 0 && reinterpret_cast<std::uintptr_t>(p.d) % 16 == 0;
  }

  // In bytes.
  static __device__ __forceinline__ int swizzled(int row, int column) {
    if constexpr (C::kTransposesD) {  // lines of 32 bytes, of which every other four exchange their halves
      return (column * C::kLine + row * static_cast<int>(sizeof(Out))) ^ (column / 4 % 2 * 16);
    }
    return (row * C::kLine + column * static_cast<int>(sizeof(Out))) ^ (row % 8 * 16);
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

  // Copies a slot to D by threads; columns past D's last and rows past the tile's last are left out.
  static __device__ __forceinline__ void copy(unsigned char const* slot, GroupwiseProblem const& p, int first_row,
                                              int end_row, int first_column, int columns, int lane) {
    if constexpr (C::kTransposesD) {
      return copy_transposed(slot, p, first_row, min(C::kWarpRows, end_row - first_row), first_column,
                             min(columns, p.n - first_column), lane);
    }
    auto* const target = static_cast<Out*>(p.d) + first_row * p.stride_d + first_column;
    int const rows = min(C::kWarpRows, end_row - first_row);
    if (first_column + columns <= p.n && has_lines(p)) {
      int const units = columns / kUnit;
#pragma unroll
      for (int i = lane; i < C::kWarpRows * units; i += 32) {
        int const row = i / units, column = i % units * kUnit;
        int4 const unit = *reinterpret_cast<int4 const*>(slot + swizzled(row, column));
        if (row < rows) *reinterpret_cast<int4*>(target + row * p.stride_d + column) = unit;
      }
    } else {
      int const valid_columns = min(columns, p.n - first_column);
#pragma unroll 1
      for (int i = lane; i < rows * C::kChunk; i += 32) {
        int const row = i / C::kChunk, column = i % C::kChunk;
        if (column < valid_columns) {
          target[row * p.stride_d + column] = *reinterpret_cast<Out const*>(slot + swizzled(row, column));
        }
      }
    }
  }

  // Column c of the slot is part of D's row `first_column` + c.
  static __device__ __forceinline__ void copy_transposed(unsigned char const* slot, GroupwiseProblem const& p,
                                                         int first_row, int rows, int first_column, int columns,
                                                         int lane) {
    auto* const target = static_cast<Out*>(p.d) + first_column * p.stride_d + first_row;
    if (rows == C::kWarpRows && has_lines(p)) {
      constexpr int kUnits = C::kWarpRows / kUnit;
#pragma unroll 1
      for (int i = lane; i < columns * kUnits; i += 32) {
        int const column = i / kUnits, row = i % kUnits * kUnit;
        *reinterpret_cast<int4*>(target + column * p.stride_d + row) =
            *reinterpret_cast<int4 const*>(slot + swizzled(row, column));
      }
    } else {
#pragma unroll 1
      for (int i = lane; i < columns * C::kWarpRows; i += 32) {
        int const column = i / C::kWarpRows, row = i % C::kWarpRows;
        if (row < rows) {
          target[column * p.stride_d + row] = *reinterpret_cast<Out const*>(slot + swizzled(row, column));
        }
      }
    }
  }
};

// A warp's epilogue. Operands are loaded before the products are complete; then the epilogue expression is evaluated in
// registers.
template <class C>
class GroupwiseEpilogue {
 public:
  using Out = typename C::Out;
  using Sum = typename C::Sum;
  struct NoExchange {};
  using Exchange = std::conditional_t<C::kSplitsLastWave, StageExchange<C>, NoExchange>;
  static constexpr int kColumnGroups = C::kChunk / 8;  // of 8 columns, per slot
  static constexpr int kRowGroups = C::kWarpRows / 8;  // rows per thread, eight apart
  static constexpr int kGroupSums = 2 * kRowGroups;    // per thread and column group
  static constexpr bool in_tile(int chunk, int group) { return chunk * kColumnGroups + group < C::kN / 8; }

  // `first_row`: the warp's first row in a tile; the rows of the next round follow kRoundRows later.
  __device__ GroupwiseEpilogue(GroupwiseParams const& params, typename C::Shared const& shared, int warp, int first_row,
                               int lane)
      : params_(params),
        row_operands_(shared.row_operands(warp)),
        column_operands_(shared.column_operands(C::kSharesColumnOperands ? 0 : warp)),
        first_row_(first_row),
        lane_(lane),
        slot_offset_(Slot::swizzled(lane / 4, 2 * (lane % 4))) {}

  // Before a tile's products: issues the loads of its epilogue operands.
  __device__ __forceinline__ void load_operands(GroupwiseTile const& tile) {
    if constexpr (C::kTransposesD) {
      __syncwarp();  // the previous tile's operands have been read
      copy_columns(column_operands_, params_.p.scale_b.ptr, params_.p.scale_b.stride_row, tile.first_column);
      cp_async_commit();
    }
    if constexpr (C::kPerRowScales) {
      auto const& p = params_.p;
      int const row = tile.first_row + first_row_ + lane_ / C::kWarpRows * C::kRoundRows + lane_ % C::kWarpRows;
      int const clamped_row = min(row, max(tile.end_row - 1, 0));
      __syncwarp();  // the previous tile's operands have been read
      if constexpr (C::kSharesColumnOperands) {
        column_operands_ += to_other_copy_;
        to_other_copy_ = -to_other_copy_;
      }
      float const* const scale_b = p.scale_b.ptr + std::int64_t{tile.expert} * p.scale_b_expert;
      copy_columns(column_operands_, scale_b, p.scale_b.stride_row, tile.first_column);
      copy_rows(row_operands_, p.scale_a.ptr, p.scale_a.stride_row, clamped_row);
      if constexpr (C::kHasZeroPoint) {
        copy_columns(column_zero_points(), p.azp_adj, 1, tile.first_column);
        copy_rows(row_zero_points(), p.azp, p.azp_stride, clamped_row);
      }
      cp_async_commit();
    }
  }

  // Waits for the operands that this warp loaded. Other warps may use them only after a barrier.
  __device__ __forceinline__ void await_operands() const {
    if constexpr (C::kPerRowScales || C::kTransposesD) {
      cp_async_wait<0>();
      __syncwarp();
    }
  }

  // One part of a tile: a warp's rows, through the epilogue, into a slot. All reads come before the writes, as the
  // compiler cannot tell them apart.
  template <bool kHasBias>
  __device__ __forceinline__ void fill_slot(unsigned char* slot, Sum const (&sums)[C::kRowSums], int round, int chunk,
                                            GroupwiseTile const& tile, Exchange const& exchange) const {
    if constexpr (C::kTransposesD) return fill_transposed<kHasBias>(slot, sums, round, chunk, tile, exchange);
    Sum whole[kColumnGroups][kGroupSums];  // including the other CTA's partial sums
    ColumnOperands columns;
    RowOperands rows{{1.f, 1.f}, {1, 1}};
#pragma unroll
    for (int j = 0; j < kColumnGroups; ++j) {
      int const column = 8 * (chunk * kColumnGroups + j) + 2 * (lane_ % 4);
      columns.bias[j] = kHasBias && in_tile(chunk, j) ? bias_of(tile.first_column + column) : float2{};
      if (!C::kPerRowScales || !in_tile(chunk, j)) continue;
      columns.scale[j] = *reinterpret_cast<float2 const*>(column_operands_ + column);
      if (C::kHasZeroPoint) columns.azp_adj[j] = *reinterpret_cast<int2 const*>(column_zero_points() + column);
    }
#pragma unroll
    for (int j = 0; j < kColumnGroups; ++j) {
      if (!in_tile(chunk, j)) continue;
      int const first = kGroupSums * (chunk * kColumnGroups + j);
#pragma unroll
      for (int i = 0; i < kGroupSums; ++i) whole[j][i] = sums[first + i];
      if constexpr (C::kSplitsLastWave) {
        if (exchange.receives()) exchange.template add_received<kGroupSums>(whole[j], first);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowGroups && C::kPerRowScales; ++i) {
      int const row = round * C::kWarpRows + lane_ / 4 + 8 * i;
      rows.scale[i] = row_operands_[row];
      if (C::kHasZeroPoint) rows.azp[i] = row_zero_points()[row];
    }
#pragma unroll
    for (int j = 0; j < kColumnGroups; ++j) {
      if (!in_tile(chunk, j)) continue;
      float values[2 * kRowGroups];
      finish_sums<kHasBias>(values, whole[j], rows, columns, j);
      unsigned char* const at = slot + (slot_offset_ ^ (8 * j * static_cast<int>(sizeof(Out))));
#pragma unroll
      for (int i = 0; i < kRowGroups; ++i) Slot::put(at + 8 * i * C::kLine, values[2 * i], values[2 * i + 1]);
    }
  }

 private:
  using Slot = GroupwiseSlot<C>;

  // The same of D^T: columns are scaled, rows have the bias. Two column groups at a time.
  template <bool kHasBias>
  __device__ __forceinline__ void fill_transposed(unsigned char* slot, Sum const (&sums)[C::kRowSums], int round,
                                                  int chunk, GroupwiseTile const& tile,
                                                  Exchange const& exchange) const {
    static_assert(C::kN % 16 == 0 && kRowGroups == 2);
    int const row = tile.first_row + first_row_ + round * C::kRoundRows + lane_ / 4;
    float const bias[2] = {kHasBias ? bias_at(row, tile.end_row) : 0.f,
                           kHasBias ? bias_at(row + 8, tile.end_row) : 0.f};
    // Lane l gives the address of column l % 8 of matrix l / 8: rows 0 and 8 of the first column group, then of the
    // second.
    SharedAddress const to = shared_address(slot) + Slot::swizzled(lane_ / 8 % 2 * 8, lane_ / 16 * 8 + lane_ % 8);
#pragma unroll
    for (int j = 0; j < kColumnGroups; j += 2) {
      if (!in_tile(chunk, j)) continue;
      unsigned matrices[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const group = chunk * kColumnGroups + j + i / 2, first = kGroupSums * group + i % 2 * 2;
        float pair[2] = {sums[first], sums[first + 1]};
        if constexpr (C::kSplitsLastWave) {
          if (exchange.receives()) exchange.template add_received<2>(pair, first);
        }
        float2 const scale = *reinterpret_cast<float2 const*>(column_operands_ + 8 * group + 2 * (lane_ % 4));
        Slot::put(reinterpret_cast<unsigned char*>(&matrices[i]), fmaf(pair[0], scale.x, bias[i % 2]),
                  fmaf(pair[1], scale.y, bias[i % 2]));
      }
      stmatrix_x4_trans(to + 8 * j * C::kLine, matrices);
    }
  }

  __device__ __forceinline__ float bias_at(int row, int end_row) const {
    return row < end_row ? static_cast<float>(static_cast<Out const*>(params_.p.bias)[row]) : 0.f;
  }

  // Epilogue operands of a thread's two neighbouring columns of each column group, and of its rows.
  struct ColumnOperands {
    float2 scale[kColumnGroups], bias[kColumnGroups];
    int2 azp_adj[kColumnGroups];
  };
  struct RowOperands {
    float scale[2];
    int azp[2];
  };

  // One 4-byte value per column or row; null rows are 1.
  template <class T>
  __device__ __forceinline__ void copy_columns(T* to, T const* columns, int stride, int first_column) const {
    constexpr int kCopiers = C::kSharesColumnOperands ? 32 * C::kConsumerWarps : 32;
    int const first = C::kSharesColumnOperands ? threadIdx.x : lane_;
#pragma unroll
    for (int i = 0; i < C::kN; i += kCopiers) {
      int const column = min(first_column + i + first, params_.p.n - 1);
      if (i + first < C::kN) cp_async4(shared_address(to + i + first), columns + std::int64_t{column} * stride);
    }
  }

  template <class T>
  __device__ __forceinline__ void copy_rows(T* to, T const* rows, int stride, int row) const {
    if (lane_ >= C::kWarpRows * C::kRounds) return;
    if (rows != nullptr) {
      cp_async4(shared_address(to + lane_), rows + std::int64_t{row} * stride);
    } else {
      to[lane_] = T(1);
    }
  }

  __device__ __forceinline__ float2 bias_of(int column) const {
    auto const* const bias = static_cast<Out const*>(params_.p.bias);
    int const n = params_.p.n;
    return {column < n ? static_cast<float>(bias[column]) : 0.f,
            column + 1 < n ? static_cast<float>(bias[column + 1]) : 0.f};
  }

  __device__ __forceinline__ int* row_zero_points() const {
    return reinterpret_cast<int*>(row_operands_ + C::kRowOperands / 2);
  }
  __device__ __forceinline__ int* column_zero_points() const {
    return reinterpret_cast<int*>(column_operands_ + C::kColumnOperands / 2);
  }

  // Two neighbouring columns of a row, and of the row eight below if the warp has it.
  template <bool kHasBias>
  __device__ __forceinline__ void finish_sums(float (&values)[2 * kRowGroups], Sum const* sums, RowOperands const& rows,
                                              ColumnOperands const& columns, int j) const {
#pragma unroll
    for (int i = 0; i < 2 * kRowGroups; ++i) {
      bool const second = i % 2 == 1;
      float const of_bias = second ? columns.bias[j].y : columns.bias[j].x;
      if constexpr (C::kPerRowScales) {
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

  GroupwiseParams const& params_;
  float *row_operands_, *column_operands_;  // operands, followed by their zero points
  int to_other_copy_ = C::kColumnOperands;  // of the column operands
  int first_row_, lane_;
  int slot_offset_;  // of the lane's first two values in a slot
};

}  // namespace epiloq::gemm

#pragma once

// Store path of the online_quant_mm GEMM: sums of D^T in wgmma's layout become rows of D.

#include "kernels/common/device_code.cuh"
#include "kernels/common/ptx/shared_memory.cuh"
#include "kernels/common/ptx/tma.cuh"
#include "kernels/sm90/online_quant/online_quant_producer.cuh"
#include "kernels/sm90/online_quant/online_quant_split_k.cuh"

namespace epiloq::gemm {

// A thread's sums are of weight rows r and r + 8, r = 16 warp + lane / 4, and of two neighbours of each 8 tokens.
template <class T>
class OnlineQuantSm90Store {
 public:
  using Sums = float[T::kTokens / 2];
  using TileOrigin = typename T::TileOrigin;

  __device__ OnlineQuantSm90Store(OnlineQuantSm90Params const& params, typename T::Shared const& shared, int group)
      : params_(params),
        shared_(shared),
        slots_(shared_address(shared.slots + group * T::kGroupSlots)),
        group_(group),
        warp_(warp_uniform(threadIdx.x / 32 % 4)),
        lane_(threadIdx.x % 32) {}

  __device__ void store(Sums const& sums, TileOrigin const& origin, bool is_split) const {
    if (is_split) return OnlineQuantSm90SplitK<T>(params_.p, shared_, group_ * 4 + warp_, lane_).store(sums, origin);
    if (!params_.stores_boxes) return store_rows(sums, origin);
    if (params_.p.dtype == DType::kFloat16) {
      store_boxes<__half>(sums, origin);
    } else {
      store_boxes<__nv_bfloat16>(sums, origin);
    }
  }

  // Waits for all stores before shared memory is released.
  __device__ void finish() const {
    if (params_.stores_boxes && is_sender()) tma_store_wait<0>();
  }

 private:
  static constexpr int kOfChunk = T::kChunk / 2;  // sums
  static constexpr int kChunks = T::kTokens / T::kChunk;

  __device__ bool is_sender() const { return threadIdx.x % T::kGroupThreads == 0; }
  __device__ void wait_for_group() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group_), "n"(T::kGroupThreads) : "memory");
  }

  // 16-bit outputs, by TMA: boxes of 64 weight rows (a line of 128 bytes) by some tokens; one is stored while the next
  // is prepared, and the last ones during the next tile's products.
  template <class Out>
  __device__ void store_boxes(Sums const& sums, TileOrigin const& origin) const {
    int const first_row = origin.first_n + group_ * T::kGroupRows;
    float const bias[2] = {bias_of<Out>(first_row + 16 * warp_ + lane_ / 4),
                           bias_of<Out>(first_row + 16 * warp_ + lane_ / 4 + 8)};
    // stmatrix transposes four 8 x 8 matrices: lane l gives the address of row l % 8 of matrix l / 8, a token: rows r
    // and r + 8 of eight tokens, and of the next eight.
    int const token = lane_ / 16 * 8 + lane_ % 8, unit = 2 * warp_ + lane_ / 8 % 2;
    SharedAddress const own = slots_ + token * T::kLine + ((unit ^ token % 8) << 4);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (is_sender()) wait_for_slot(chunk);
      wait_for_group();
      SharedAddress const slot = own + chunk % T::kSlots * T::kSlotBytes;
#pragma unroll
      for (int i = 0; i < kOfChunk; i += 8) {
        float const* const eight = sums + chunk * kOfChunk + i;
        unsigned words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = finished<Out>(eight[2 * w], eight[2 * w + 1], bias[w % 2]);
        stmatrix_x4_trans(slot + i / 8 * 16 * T::kLine, words);
      }
      fence_proxy_async();
      wait_for_group();
      if (is_sender()) {
        tma_store(params_.output, first_row * static_cast<int>(sizeof(Out)), origin.first_m + chunk * T::kChunk,
                  slots_ + chunk % T::kSlots * T::kSlotBytes);
        tma_store_commit();
      }
    }
  }

  // Chunks alternate between the slots; a tile always begins with the first slot.
  static __device__ __forceinline__ void wait_for_slot(int chunk) {
    if (chunk == 0) {
      tma_store_wait<0>();
    } else {
      tma_store_wait<T::kSlots - 1>();
    }
  }

  template <class Out>
  __device__ float bias_of(int row) const {
    auto const* const bias = static_cast<Out const*>(params_.p.bias);
    return bias != nullptr && row < params_.p.n ? static_cast<float>(bias[row]) : 0.f;
  }

  template <class Out>
  __device__ unsigned finished(float a, float b, float bias) const {
    auto const& p = params_.p;
    alignas(4) Out const both[2] = {static_cast<Out>(clamped(a + bias, p.lo, p.hi)),
                                    static_cast<Out>(clamped(b + bias, p.lo, p.hi))};
    return *reinterpret_cast<unsigned const*>(both);
  }

  // Rows that TMA cannot write, and float32 outputs.
  __device__ void store_rows(Sums const& sums, TileOrigin const& origin) const {
    float* const mine = reinterpret_cast<float*>(shared_.slots + group_ * T::kGroupSlots);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      wait_for_group();
#pragma unroll
      for (int i = 0; i < kOfChunk; ++i) {
        int const token = i / 4 * 8 + 2 * (lane_ % 4) + i % 2, row = 16 * warp_ + i / 2 % 2 * 8 + lane_ / 4;
        mine[token * T::Epilogue::kPitch + row] = sums[chunk * kOfChunk + i];
      }
      wait_for_group();
      T::Epilogue::store(params_.p, mine, origin.first_m + chunk * T::kChunk, origin.first_n + group_ * T::kGroupRows);
    }
  }

  OnlineQuantSm90Params const& params_;
  typename T::Shared const& shared_;
  SharedAddress slots_;  // of the warpgroup
  int group_, warp_, lane_;
};

}  // namespace epiloq::gemm

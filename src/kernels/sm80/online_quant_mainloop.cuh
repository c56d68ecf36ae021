#pragma once

// Main loop of sm80/online_quant_gemm.cuh for SM80 and newer: m16n8k32, with a pipeline that cp.async fills ahead of
// the products.

#include "kernels/common/device_code.cuh"
#include "kernels/common/online_quant_layout.h"
#include "kernels/common/ptx/cp_async.cuh"
#include "problems/online_quant_gemm.h"

namespace epiloq::gemm {

struct OnlineQuantSm80 {
  // d += a b for 16 x 32 by 32 x 8.
  static __device__ __forceinline__ void multiply(int (&d)[4], unsigned const (&a)[4], unsigned const (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }

  // Also prefetches the rest of the chunk's 128 bytes into L2, for the next stages.
  static __device__ __forceinline__ void copy_async(OnlineQuantChunk const& chunk) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(chunk.to), "l"(chunk.source),
                 "r"(chunk.inside ? 16 : 0)
                 : "memory");
  }

  template <class Operand>
  static __device__ __forceinline__ void copy(SharedAddress values, SharedAddress parameters, Operand const& from,
                                              int step, int thread) {
#pragma unroll
    for (int i = 0; i < Operand::kValues; ++i) copy_async(from.value(values, i, thread, step));
    for (int i = thread; i < from.parameter_count(); i += Operand::kThreads) {
      copy_async(from.parameter(parameters, i, step));
    }
  }

  // Stages of a K group.
  template <class K>
  struct Pipeline {
    static constexpr int kStages = K::kStages;
    typename K::Work const work;
    SharedAddress const stages;
    int filled = kStages - 1, read = 0;

    __device__ __forceinline__ void copy_a(SharedAddress stage, int i) {
      copy(stage, stage + K::kParametersA, work.a(), work.step(i), work.thread);
    }
    __device__ __forceinline__ void copy_b(SharedAddress stage, int i) {
      copy(stage + K::kB, stage + K::kParametersB, work.b(), work.step(i), work.thread);
    }

    __device__ __forceinline__ Pipeline(typename K::Work const& work_, unsigned char* stages_)
        : work(work_), stages(shared_address(stages_)) {
      for (int i = 0; i < kStages - 1 && i < work.steps; ++i) copy_b(stages + i * K::kStageBytes, i);
      pdl_wait();
#pragma unroll
      for (int i = 0; i < kStages - 1; ++i) {
        if (i < work.steps) copy_a(stages + i * K::kStageBytes, i);
        cp_async_commit();
      }
    }

    // Waits for the ith stage, and returns its offset; it may be read until `end`.
    __device__ __forceinline__ int begin(int i) {
      cp_async_wait<kStages - 2>();
      K::sync_k_group(work.k_group);
      if (i + kStages - 1 < work.steps) {
        SharedAddress const stage = stages + filled * K::kStageBytes;
        copy_b(stage, i + kStages - 1);
        copy_a(stage, i + kStages - 1);
      }
      cp_async_commit();
      filled = filled + 1 == kStages ? 0 : filled + 1;
      return read * K::kStageBytes;
    }
    __device__ __forceinline__ void end() { read = read + 1 == kStages ? 0 : read + 1; }
  };
};

}  // namespace epiloq::gemm

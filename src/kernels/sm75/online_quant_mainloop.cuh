#pragma once

// Main loop of sm80/online_quant_gemm.cuh for SM75: m8n8k16, no cp.async. A K group has one stage in shared memory and
// the next in its threads' registers, loaded before the products and stored after them: with 64 KiB of shared memory
// per SM, more resident CTAs hide more latency than a second stage.

#include "kernels/common/device_code.cuh"
#include "kernels/common/online_quant_layout.h"
#include "kernels/common/ptx/cp_async.cuh"
#include "problems/online_quant_gemm.h"

namespace epiloq::gemm {

struct OnlineQuantSm75 {
  // d += a b for 16 x 32 by 32 x 8 with the registers of m16n8k32, as four m8n8k16: a's rows g and g + 8 for the first
  // 16 of K, then for the others; b's first 16 and the others; d's pairs g and g + 8.
  static __device__ __forceinline__ void multiply(int (&d)[4], unsigned const (&a)[4], unsigned const (&b)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
            : "+r"(d[2 * row]), "+r"(d[2 * row + 1])
            : "r"(a[2 * half + row]), "r"(b[half]));
      }
    }
  }

  // Bypasses L1. Volatile, so that the load is not moved behind the products to where its value is stored.
  static __device__ __forceinline__ uint4 load(OnlineQuantChunk const& chunk) {
    uint4 x{};
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t@p ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
                 : "l"(chunk.source), "r"(int{chunk.inside})
                 : "memory");
    return x;
  }
  static __device__ __forceinline__ void store(OnlineQuantChunk const& chunk, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(chunk.to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  }

  // A thread's chunks of an operand's next stage, in registers.
  template <class Operand>
  struct NextStage {
    uint4 values[Operand::kValues], parameters[Operand::kParameters];

    __device__ __forceinline__ void load(Operand const& from, int step, int thread) {
#pragma unroll
      for (int i = 0; i < Operand::kValues; ++i) values[i] = OnlineQuantSm75::load(from.value(0, i, thread, step));
#pragma unroll
      for (int i = 0; i < Operand::kParameters; ++i) {
        int const chunk = thread + i * Operand::kThreads;
        if (chunk < from.parameter_count()) parameters[i] = OnlineQuantSm75::load(from.parameter(0, chunk, step));
      }
    }
    __device__ __forceinline__ void store(SharedAddress to_values, SharedAddress to_parameters, Operand const& from,
                                          int thread) {
#pragma unroll
      for (int i = 0; i < Operand::kValues; ++i) OnlineQuantSm75::store(from.value(to_values, i, thread, 0), values[i]);
#pragma unroll
      for (int i = 0; i < Operand::kParameters; ++i) {
        int const chunk = thread + i * Operand::kThreads;
        if (chunk < from.parameter_count()) {
          OnlineQuantSm75::store(from.parameter(to_parameters, chunk, 0), parameters[i]);
        }
      }
    }
  };

  template <class K>
  struct Pipeline {
    static_assert(K::kStages == 1);
    typename K::Work const work;
    SharedAddress const stages;
    NextStage<typename K::A> a;
    NextStage<typename K::B> b;

    __device__ __forceinline__ Pipeline(typename K::Work const& work_, unsigned char* stages_)
        : work(work_), stages(shared_address(stages_)) {
      if (work.steps > 0) b.load(work.b(), work.step(0), work.thread);
      pdl_wait();
      if (work.steps > 0) a.load(work.a(), work.step(0), work.thread);
    }

    // As OnlineQuantSm80's.
    __device__ __forceinline__ int begin(int i) {
      a.store(stages, stages + K::kParametersA, work.a(), work.thread);
      b.store(stages + K::kB, stages + K::kParametersB, work.b(), work.thread);
      K::sync_k_group(work.k_group);
      if (i + 1 < work.steps) {
        b.load(work.b(), work.step(i + 1), work.thread);
        a.load(work.a(), work.step(i + 1), work.thread);
      }
      return 0;
    }
    __device__ __forceinline__ void end() { K::sync_k_group(work.k_group); }
  };
};

}  // namespace epiloq::gemm

#pragma once

// float8 GEMM for SM90 with scales every 128 of K, written on wgmma and TMA rather than CUTLASS's collective, which has
// no epilogue of ours, no tiles narrower than 128 weights and no experts.
//
// Tokens are the rows of wgmma's tile, whatever their number: a box of the tokens there are is all that TMA reads, so a
// tile of few tokens costs their bytes and no more, and its width in weights is free to fill the SMs evenly. Each 128
// of K is multiplied into fresh accumulators and added to the sums in fp32 with its scales. Warpgroups stand side by
// side along M, or take turns along K where there is little to multiply and latency is what counts. A cluster's blocks
// may share tokens (blocks beside each other along N) or weights (along M), each reading its part for all.

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED 1  // tiles of any multiple of 8 columns

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <algorithm>
#include <atomic>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90.hpp>
#include <numeric>
#include <utility>

#include "core/device_code.cuh"
#include "epiloq/device.h"
#include "gemm/config.h"
#include "gemm/groupwise_problem.h"
#include "gemm/params_cache.h"
#include "gemm/tensor_map.h"

namespace epiloq::gemm {

struct GroupwiseParams {
  CUtensorMap tokens, weights;
  GroupwiseProblem p;
  int token_box;  // rows of A that a block reads of its tile
};

// Integers and enums rather than a GroupwiseConfig: nvcc 13.0 cannot spell a structural value in the stub of a
// __global__ template.
template <int kMGroups_, int kKGroups_, int kN_, int kCluster_, Share kShare_, bool kColumnScales_, class Out_>
struct Groupwise {
  using Out = Out_;
  static constexpr int kMGroups = kMGroups_, kKGroups = kKGroups_, kN = kN_, kCluster = kCluster_;
  static constexpr Share kShare = kShare_;
  static constexpr bool kColumnScales = kColumnScales_;  // of B, one a column; else one for 128 columns
  static constexpr int kM = 64 * kMGroups;
  static constexpr int kMathGroups = kMGroups * kKGroups;
  static constexpr int kThreads = 128 * (kMathGroups + 1);
  // Registers that reading warps give to multiplying ones, where those need more than an equal part.
  static constexpr bool kMovesRegisters = kMathGroups == 2;
  static constexpr int kReadRegisters = kN > 160 || kN == 128 ? 40 : 72;
  static constexpr int kMathRegisters = (512 - kReadRegisters) / 2 / 8 * 8;
  static_assert(kMGroups == 1 || kKGroups == 1);

  static constexpr int kTokenBytes = kM * kGroupDepth, kWeightBytes = kN * kGroupDepth;
  static constexpr int kWeightScales = kColumnScales ? kN : 2;
  static constexpr int kStageScales = (kM + kWeightScales + 31) / 32 * 32;
  static constexpr int kStageBytes = kTokenBytes + kWeightBytes + 4 * kStageScales;

  // D leaves through shared memory, 16 rows and up to 64 columns a warp, so that rows are written in whole lines.
  static constexpr int kChunk = kN <= 64 ? kN : (kN % 64 == 0 ? 64 : 32);
  static_assert(kN % kChunk == 0 && kN % 8 == 0);
  // Weights of a tile belong to two blocks of 128 at most, wherever among its multiples the tile begins.
  static_assert(kColumnScales || kN - std::gcd(kN, kGroupDepth) <= kGroupDepth);
  static constexpr int kPitchPad = 16;
  static constexpr int kPitch = kChunk * static_cast<int>(sizeof(Out)) + kPitchPad;
  static constexpr int kStagingBytes = kMGroups * 4 * 16 * kPitch;
  static constexpr int kPartialBytes = (kKGroups - 1) * 128 * (kN / 2) * 4;
  static constexpr int kAlignment = 1024;  // of swizzled tiles
  static constexpr int kBarrierBytes = 512;
  static constexpr int kFixedBytes = kAlignment + kStagingBytes + kPartialBytes + kBarrierBytes;
  static constexpr int kSharedMemory = 232448;  // bytes a block may have on SM90
  static constexpr int kMaxStages = 24;
  static constexpr int kFit = (kSharedMemory - kFixedBytes) / kStageBytes;
  // Always the same warpgroup and the same readers have to do with a stage: a parity tells one use of it from the next,
  // but not from the one after that.
  static constexpr int kReaders = kMGroups == 1 ? 2 : 1;  // where steps are short, their waits must overlap
  static constexpr int kEven = std::lcm(kKGroups, kReaders);
  static constexpr int kStages = std::min(kFit, kMaxStages) / kEven * kEven;
  static_assert(kStages >= 2);
  static constexpr int kSharedBytes = kFixedBytes + kStages * kStageBytes;

  // Parts of shared memory: all tokens, all weights, then what needs no alignment.
  struct Shared {
    unsigned char* base;
    __device__ explicit Shared(unsigned char* raw)
        : base(raw + (kAlignment - cute::cast_smem_ptr_to_uint(raw) % kAlignment) % kAlignment) {}
    __device__ unsigned char* tokens(int stage) const { return base + stage * kTokenBytes; }
    __device__ unsigned char* weights(int stage) const { return base + kStages * kTokenBytes + stage * kWeightBytes; }
    __device__ float* scales(int stage) const {
      return reinterpret_cast<float*>(base + kStages * (kTokenBytes + kWeightBytes)) + stage * kStageScales;
    }
    __device__ unsigned char* staging() const { return base + kStages * kStageBytes; }
    __device__ float* partial() const { return reinterpret_cast<float*>(staging() + kStagingBytes); }
    __device__ cutlass::arch::ClusterTransactionBarrier* full() const {
      return reinterpret_cast<cutlass::arch::ClusterTransactionBarrier*>(staging() + kStagingBytes + kPartialBytes);
    }
    __device__ cutlass::arch::ClusterBarrier* empty() const {
      return reinterpret_cast<cutlass::arch::ClusterBarrier*>(full() + kStages);
    }
  };
  static_assert(kStages * 16 <= kBarrierBytes);

  // A stage is full when TMA's bytes and every lane's scales are there, and empty when all that read it have.
  static constexpr int kFullArrivals = 1 + 32;
  static constexpr int kEmptyArrivals = 4 * kMGroups * kCluster;  // a warp each, of every block that got a share

  // A warpgroup that has the registers multiplies one stage while it adds up the one before.
  static constexpr bool kOverlaps = kMGroups == 2 && kN <= 128 && !kColumnScales;
};

// Where a role stands in the ring of stages.
template <class C>
struct RingPosition {
  int stage, parity;
  __device__ explicit RingPosition(int step) : stage(step % C::kStages), parity(step / C::kStages % 2) {}
  __device__ void advance(int steps) {
    stage += steps;
    if (stage >= C::kStages) {
      stage -= C::kStages;
      parity ^= 1;
    }
  }
};

// One tile of D for a block; the blocks of a cluster take neighbours.
struct GroupwiseTile {
  int first_row, end_row;  // of A and D
  int first_column;
  int expert;
};

// The tiles of a block, one after the other, in bands of rows so that the tiles in flight share tokens and weights in
// L2.
template <class C>
class GroupwiseScheduler {
 public:
  __device__ explicit GroupwiseScheduler(GroupwiseProblem const& p)
      : p_(p),
        columns_(ceil_div(p.n, C::kN * (C::kShare == Share::kTokens ? C::kCluster : 1))),
        index_(blockIdx.x / C::kCluster) {
    enter(0);
  }

  __device__ bool next(GroupwiseTile& tile) {
    while (index_ - before_ >= rows_ * columns_) {
      if (expert_ + 1 >= p_.experts) return false;
      before_ += rows_ * columns_;
      enter(expert_ + 1);
    }
    constexpr int kBand = 8;
    int const local = index_ - before_, band = local / (kBand * columns_);
    int const height = min(kBand, rows_ - band * kBand), within = local - band * kBand * columns_;
    int row = band * kBand + within % height, column = within / height;
    int const rank = C::kCluster > 1 ? static_cast<int>(cute::block_rank_in_cluster()) : 0;
    if constexpr (C::kShare == Share::kTokens) column = column * C::kCluster + rank;
    if constexpr (C::kShare == Share::kWeights) row = row * C::kCluster + rank;
    tile = {begin_ + row * C::kM, end_, column * C::kN, expert_};
    index_ += gridDim.x / C::kCluster;
    return true;
  }

 private:
  static __device__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
  __device__ void enter(int expert) {
    expert_ = expert;
    begin_ = 0, end_ = p_.m;
    if (p_.offs != nullptr) {
      begin_ = expert == 0 ? 0 : p_.offs[expert - 1];
      end_ = p_.offs[expert];
    } else if (p_.masked_m != nullptr) {
      begin_ = expert * p_.m;
      end_ = begin_ + p_.masked_m[expert];
    }
    rows_ = ceil_div(end_ - begin_, C::kM * (C::kShare == Share::kWeights ? C::kCluster : 1));
  }

  GroupwiseProblem const& p_;
  int columns_;  // tiles of a cluster along N
  int index_;
  int expert_ = 0, before_ = 0;
  int begin_ = 0, end_ = 0, rows_ = 0;
};

// A thread that asks TMA for tokens and weights.
template <class C>
struct TileReader {
  GroupwiseParams const& params;
  typename C::Shared const& shared;
  int rank = C::kCluster > 1 ? static_cast<int>(cute::block_rank_in_cluster()) : 0;

  static constexpr bool kSharesTokens = C::kShare == Share::kTokens, kSharesWeights = C::kShare == Share::kWeights;
  static constexpr int kWeightPart = kSharesWeights ? C::kN / C::kCluster : C::kN;
  static constexpr auto kHint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);

  template <bool kToAll>
  static __device__ void copy(CUtensorMap const& map, std::uint64_t* signal, void* target, int k, int row) {
    if constexpr (kToAll) {
      constexpr std::uint16_t kEverybody = (1 << C::kCluster) - 1;
      cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&map, signal, kEverybody, kHint, target, k, row);
    } else {
      cute::SM90_TMA_LOAD_2D::copy(&map, signal, kHint, target, k, row);
    }
  }

  // Asks L2 for the first weights. Harmless before the previous kernel has finished, even if it writes them: L2 is
  // where its writes arrive. (Not where experts' rows are known only then.)
  __device__ void prefetch() const {
    constexpr int kBytes = 64 * 1024;
    if (params.p.offs != nullptr || params.p.masked_m != nullptr) return;
    GroupwiseScheduler<C> scheduler(params.p);
    GroupwiseTile tile;
    if (!scheduler.next(tile)) return;
    int const weight_row = tile.first_column + (kSharesWeights ? rank * kWeightPart : 0);
    for (int k = 0; k < min(params.p.k, kBytes / C::kN); k += kGroupDepth) {
      cute::SM90_TMA_LOAD_2D::PREFETCH::copy(&params.weights, k, weight_row);
    }
  }

  __device__ void run(int reader) const {
    int const token_part = kSharesTokens ? params.token_box / C::kCluster : params.token_box;
    int const token_first = kSharesTokens ? rank * token_part : 0;
    int const weight_first = kSharesWeights ? rank * kWeightPart : 0;
    int const depth = (params.p.k + kGroupDepth - 1) / kGroupDepth;
    int step = 0;
    RingPosition<C> ring(reader);
    GroupwiseScheduler<C> scheduler(params.p);
    for (GroupwiseTile tile; scheduler.next(tile);) {
      int const weight_row = tile.expert * params.p.n + tile.first_column;
      for (int i = 0; i < depth; ++i, ++step) {
        if (step % C::kReaders != reader) continue;
        auto& full = shared.full()[ring.stage];
        auto* const signal = reinterpret_cast<std::uint64_t*>(&full);
        shared.empty()[ring.stage].wait(ring.parity ^ 1);
        full.arrive_and_expect_tx(params.token_box * kGroupDepth + C::kWeightBytes);
        copy<kSharesTokens>(params.tokens, signal, shared.tokens(ring.stage) + token_first * kGroupDepth,
                            i * kGroupDepth, tile.first_row + token_first);
        copy<kSharesWeights>(params.weights, signal, shared.weights(ring.stage) + weight_first * kGroupDepth,
                             i * kGroupDepth, weight_row + weight_first);
        ring.advance(C::kReaders);
      }
    }
  }
};

// A warp that fetches scales, four bytes at a time and so from any layout, into the stage of their tiles.
template <class C>
__device__ void read_scales(GroupwiseParams const& params, typename C::Shared const& shared, int reader, int lane) {
  auto const& p = params.p;
  int const depth = (p.k + kGroupDepth - 1) / kGroupDepth;
  int step = 0;
  RingPosition<C> ring(reader);
  GroupwiseScheduler<C> scheduler(p);
  for (GroupwiseTile tile; scheduler.next(tile);) {
    constexpr int kTokenTurns = C::kM / 32, kWeightTurns = (C::kWeightScales + 31) / 32;
    unsigned token[kTokenTurns], weight[kWeightTurns];  // offsets
    for (int t = 0; t < kTokenTurns; ++t) {
      int const row = max(0, min(tile.first_row + lane + 32 * t, tile.end_row - 1));
      token[t] = (row >> p.scale_a.shift) * p.scale_a.stride_row;
    }
    for (int t = 0; t < kWeightTurns; ++t) {
      int const offset = C::kColumnScales ? lane + 32 * t : (lane == 0 ? 0 : C::kN - 1);
      int const column = min(tile.first_column + offset, p.n - 1);
      weight[t] = tile.expert * p.scale_b_expert + (column >> p.scale_b.shift) * p.scale_b.stride_row;
    }
    for (int i = 0; i < depth; ++i, ++step) {
      if (step % C::kReaders != reader) continue;
      shared.empty()[ring.stage].wait(ring.parity ^ 1);
      std::uint32_t const target = cute::cast_smem_ptr_to_uint(shared.scales(ring.stage));
      auto const copy = [&](int index, float const* source) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target + 4 * index), "l"(source) : "memory");
      };
      for (int t = 0; t < kTokenTurns; ++t) copy(lane + 32 * t, p.scale_a.ptr + (token[t] + i * p.scale_a.stride_k));
      for (int t = 0; t < kWeightTurns; ++t) {
        if (lane + 32 * t < C::kWeightScales)
          copy(C::kM + lane + 32 * t, p.scale_b.ptr + (weight[t] + i * p.scale_b.stride_k));
      }
      cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<std::uint64_t*>(shared.full() + ring.stage));
      ring.advance(C::kReaders);
    }
  }
}

// Where wgmma finds a tile whose rows are lines of the 128-byte swizzle.
__device__ __forceinline__ std::uint64_t smem_descriptor(void const* tile) {
  constexpr std::uint64_t kSwizzle128 = 1, kEightRows = 1024;
  return kSwizzle128 << 62 | (kEightRows >> 4) << 32 | (cute::cast_smem_ptr_to_uint(tile) & 0x3ffff) >> 4;
}

template <class Instruction, std::size_t... kIndices>
__device__ __forceinline__ void multiply_once(std::uint64_t a, std::uint64_t b, float (&sums)[sizeof...(kIndices)],
                                              bool add, std::index_sequence<kIndices...>) {
  Instruction::fma(a, b, sums[kIndices]..., add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

template <class C>
struct GroupwiseMath {
  static constexpr int kSums = C::kN / 2;  // of a thread: rows r and r + 8, two neighbours of each 8 columns
  static constexpr int kInstructionDepth = 32;
  using Element = cutlass::float_e4m3_t;
  using Instruction = decltype(cute::SM90::GMMA::ss_op_selector<Element, Element, float,
                                                                cute::Shape<cute::_64, cute::Int<C::kN>, cute::_32>>());

  struct Position {
    typename C::Shared const& shared;
    RingPosition<C> ring;
    int group_m, boundary, warp, lane;
  };

  // Starts to multiply a stage.
  static __device__ __forceinline__ void begin(float (&product)[kSums], Position const& at) {
    int const stage = at.ring.stage;
    std::uint64_t const a = smem_descriptor(at.shared.tokens(stage) + at.group_m * 64 * kGroupDepth);
    std::uint64_t const b = smem_descriptor(at.shared.weights(stage));
    at.shared.full()[stage].wait(at.ring.parity);
    fence(product);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kGroupDepth / kInstructionDepth; ++k) {
      constexpr int kStep = kInstructionDepth >> 4;
      multiply_once<Instruction>(a + k * kStep, b + k * kStep, product, k != 0, std::make_index_sequence<kSums>{});
    }
    cute::warpgroup_commit_batch();
  }

  // Once all but kUnderWay of what was begun is done: sums += scale_a scale_b product, and the stage is given back.
  template <int kUnderWay>
  static __device__ __forceinline__ void finish(float (&sums)[kSums], float (&product)[kSums], Position const& at) {
    float const* const scales = at.shared.scales(at.ring.stage);
    int const row = at.group_m * 64 + at.warp * 16 + at.lane / 4;
    float const low = scales[row], high = scales[row + 8];
    if constexpr (C::kColumnScales) {
      float2 columns[kSums / 4];
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j) {
        columns[j] = *reinterpret_cast<float2 const*>(scales + C::kM + 8 * j + 2 * (at.lane % 4));
      }
      await<kUnderWay>(product, at);
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j) {
        add(sums + 4 * j, product + 4 * j, low * columns[j].x, low * columns[j].y, high * columns[j].x,
            high * columns[j].y);
      }
    } else {
      float const first = scales[C::kM], last = scales[C::kM + 1];
      await<kUnderWay>(product, at);
      // Columns up to the boundary belong to one block of 128 weights, the others to the next.
      constexpr int kTogether = std::gcd(C::kN, kGroupDepth);
#pragma unroll
      for (int column = 0; column < C::kN; column += kTogether) {
        float const scale = kTogether == C::kN || column < at.boundary ? first : last;
        float const s_low = low * scale, s_high = high * scale;
#pragma unroll
        for (int i = column / 2; i < (column + kTogether) / 2; i += 4) {
          add(sums + i, product + i, s_low, s_low, s_high, s_high);
        }
      }
    }
  }

  // The next `steps` stages, every kKGroups-th of them.
  static __device__ __forceinline__ void sum(float (&sums)[kSums], Position at, int steps) {
    if (steps <= 0) return;
    float product[kSums];
    if constexpr (!C::kOverlaps) {
      for (int i = 0; i < steps; ++i) {
        begin(product, at);
        finish<0>(sums, product, at);
        at.ring.advance(C::kKGroups);
      }
    } else {
      float other[kSums];
      Position ahead = at;
      auto const begin_next = [&](float (&target)[kSums]) {
        begin(target, ahead);
        ahead.ring.advance(1);
      };
      auto const finish_next = [&]<int kUnderWay>(float (&source)[kSums], std::integral_constant<int, kUnderWay>) {
        finish<kUnderWay>(sums, source, at);
        at.ring.advance(1);
      };
      constexpr std::integral_constant<int, 1> kOne{};
      constexpr std::integral_constant<int, 0> kNone{};
      begin_next(product);
      int left = steps - 1;
      for (; left >= 2; left -= 2) {
        begin_next(other);
        finish_next(product, kOne);
        begin_next(product);
        finish_next(other, kOne);
      }
      if (left == 1) {
        begin_next(other);
        finish_next(product, kOne);
        finish_next(other, kNone);
      } else {
        finish_next(product, kNone);
      }
    }
  }

  static __device__ __forceinline__ void fence(float (&product)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) cute::warpgroup_fence_operand(product[i]);
  }

  static __device__ __forceinline__ void add(float* sums, float const* product, float s0, float s1, float s2,
                                             float s3) {
    sums[0] = fmaf(s0, product[0], sums[0]);
    sums[1] = fmaf(s1, product[1], sums[1]);
    sums[2] = fmaf(s2, product[2], sums[2]);
    sums[3] = fmaf(s3, product[3], sums[3]);
  }

  template <int kUnderWay>
  static __device__ __forceinline__ void await(float (&product)[kSums], Position const& at) {
    cute::warpgroup_wait<kUnderWay>();
    fence(product);
    __syncwarp();
    auto& empty = at.shared.empty()[at.ring.stage];
    if constexpr (C::kCluster == 1) {
      if (at.lane == 0) empty.arrive();
    } else {
      empty.arrive(at.lane, at.lane < C::kCluster);
    }
  }

  // Warpgroups that took turns along K meet in the first one, in a fixed order.
  static __device__ void meet(float (&sums)[kSums], float* partial, int group) {
    constexpr int kBarrier = 1, kEverybody = 128 * C::kKGroups;
    auto const wait = [] { asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kEverybody) : "memory"); };
    int const thread = threadIdx.x % 128;
    if (group > 0) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) partial[((group - 1) * kSums + i) * 128 + thread] = sums[i];
    }
    wait();
    if (group == 0) {
#pragma unroll
      for (int g = 1; g < C::kKGroups; ++g) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] += partial[((g - 1) * kSums + i) * 128 + thread];
      }
    }
    wait();
  }
};

template <class C>
struct GroupwiseStore {
  using Out = typename C::Out;
  static constexpr int kUnit = 16 / sizeof(Out);  // elements that are written at once
  static constexpr int kUnits = C::kChunk / kUnit;

  // 16 rows of a warp's tile: sums and bias to Out, in shared memory, then to D in lines.
  static __device__ void tile(float (&sums)[C::kN / 2], GroupwiseProblem const& p, GroupwiseTile const& tile,
                              unsigned char* staging, int row_in_tile, int lane) {
    if (p.bias != nullptr) add_bias(sums, p, tile.first_column, lane);
    int const first_row = tile.first_row + row_in_tile;
    bool const on_lines = p.stride_d % kUnit == 0 && reinterpret_cast<std::uintptr_t>(p.d) % 16 == 0;
    bool const whole = on_lines && first_row + 16 <= tile.end_row && tile.first_column + C::kN <= p.n;
#pragma unroll
    for (int chunk = 0; chunk < C::kN / C::kChunk; ++chunk) {
      __syncwarp();
#pragma unroll
      for (int j = 0; j < C::kChunk / 8; ++j) {
        float const* const s = sums + chunk * (C::kChunk / 2) + 4 * j;
        put(staging, lane / 4, 8 * j + 2 * (lane % 4), s[0], s[1]);
        put(staging, lane / 4 + 8, 8 * j + 2 * (lane % 4), s[2], s[3]);
      }
      __syncwarp();
      int const first_column = tile.first_column + chunk * C::kChunk;
      auto* const target = static_cast<Out*>(p.d) + first_row * p.stride_d + first_column;
      if (whole) {
#pragma unroll
        for (int i = lane; i < 16 * kUnits; i += 32) {
          auto const* const source = staging + i / kUnits * C::kPitch + i % kUnits * 16;
          *reinterpret_cast<int4*>(target + i / kUnits * p.stride_d + i % kUnits * kUnit) =
              *reinterpret_cast<int4 const*>(source);
        }
      } else {
        int const rows = min(16, tile.end_row - first_row), columns = min(C::kChunk, p.n - first_column);
#pragma unroll 1
        for (int i = lane; i < rows * C::kChunk; i += 32) {
          int const row = i / C::kChunk, column = i % C::kChunk;
          auto const* const source = reinterpret_cast<Out const*>(staging + row * C::kPitch);
          if (column < columns) target[row * p.stride_d + column] = source[column];
        }
      }
    }
  }

 private:
  static __device__ void add_bias(float (&sums)[C::kN / 2], GroupwiseProblem const& p, int first_column, int lane) {
    auto const* const bias = static_cast<Out const*>(p.bias);
#pragma unroll
    for (int j = 0; j < C::kN / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const column = first_column + 8 * j + 2 * (lane % 4) + i;
        float const value = column < p.n ? static_cast<float>(bias[column]) : 0.f;
        sums[4 * j + i] += value;
        sums[4 * j + 2 + i] += value;
      }
    }
  }

  static __device__ __forceinline__ void put(unsigned char* staging, int row, int column, float a, float b) {
    auto* const target = reinterpret_cast<Out*>(staging + row * C::kPitch) + column;
    if constexpr (std::is_same_v<Out, __nv_bfloat16>) {
      *reinterpret_cast<__nv_bfloat162*>(target) = __floats2bfloat162_rn(a, b);
    } else if constexpr (std::is_same_v<Out, __half>) {
      *reinterpret_cast<__half2*>(target) = __floats2half2_rn(a, b);
    } else {
      *reinterpret_cast<float2*>(target) = {a, b};
    }
  }
};

template <class C>
__device__ void multiply_tiles(GroupwiseParams const& params, typename C::Shared const& shared, int group, int warp,
                               int lane) {
  using Math = GroupwiseMath<C>;
  int const group_m = C::kKGroups > 1 ? 0 : group, group_k = C::kKGroups > 1 ? group : 0;
  int const depth = (params.p.k + kGroupDepth - 1) / kGroupDepth;
  int before = 0;  // steps of the tiles that are done
  GroupwiseScheduler<C> scheduler(params.p);
  for (GroupwiseTile tile; scheduler.next(tile); before += depth) {
    float sums[Math::kSums] = {};
    int const boundary = kGroupDepth - tile.first_column % kGroupDepth;
    int const steps = (depth - group_k + C::kKGroups - 1) / C::kKGroups;
    Math::sum(sums, {shared, RingPosition<C>(before + group_k), group_m, boundary, warp, lane}, steps);
    if constexpr (C::kKGroups > 1) Math::meet(sums, shared.partial(), group_k);
    if (group_k == 0) {
      unsigned char* const staging = shared.staging() + (group_m * 4 + warp) * 16 * C::kPitch;
      GroupwiseStore<C>::tile(sums, params.p, tile, staging, group_m * 64 + warp * 16, lane);
    }
  }
}

template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void groupwise_kernel(__grid_constant__ GroupwiseParams const params) {
  extern __shared__ unsigned char raw[];
  typename C::Shared const shared(raw);
  int const group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  int const lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      shared.full()[i].init(C::kFullArrivals);
      shared.empty()[i].init(C::kEmptyArrivals);
    }
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (C::kCluster > 1) {
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  } else {
    __syncthreads();
  }
  TileReader<C> const reader{params, shared};
  bool const reads_tiles = group == C::kMathGroups && warp < C::kReaders && lane == 0;
  if (reads_tiles && warp == 0) reader.prefetch();
  wait_for_previous_kernel();
  if (group == C::kMathGroups) {
    if constexpr (C::kMovesRegisters) cutlass::arch::warpgroup_reg_dealloc<C::kReadRegisters>();
    if (reads_tiles) reader.run(warp);
    if (warp >= 2 && warp < 2 + C::kReaders) read_scales<C>(params, shared, warp - 2, lane);
    let_next_kernel_start();
  } else {
    if constexpr (C::kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<C::kMathRegisters>();
    multiply_tiles<C>(params, shared, group, warp, lane);
  }
  if constexpr (C::kCluster > 1) {  // others' TMA may still write here, and their releases arrive here
    __syncwarp();
    cute::cluster_arrive();
    cute::cluster_wait();
  }
}

template <class C>
struct GroupwiseGemm {
  static GroupwiseParams params_of(GroupwiseProblem const& p) {
    constexpr int kEight = 8;  // rows of the swizzle's pattern
    int const token_box = C::kShare == Share::kTokens || p.m >= C::kM ? C::kM : (p.m + kEight - 1) / kEight * kEight;
    int const token_part = C::kShare == Share::kTokens ? token_box / C::kCluster : token_box;
    int const weight_part = C::kShare == Share::kWeights ? C::kN / C::kCluster : C::kN;
    std::int64_t const token_rows = p.masked_m != nullptr ? std::int64_t{p.experts} * p.m : p.m;
    return {tensor_map_of(p.a, token_rows, p.k, p.stride_a, token_part),
            tensor_map_of(p.b, std::int64_t{p.experts} * p.n, p.k, p.stride_b, weight_part), p, token_box};
  }

  static cudaLaunchConfig_t launch_config(cudaLaunchAttribute (&attributes)[2], int blocks, Stream stream) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {C::kCluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = C::kThreads;
    config.dynamicSmemBytes = C::kSharedBytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = C::kCluster > 1 ? 2 : 1;
    return config;
  }

  // Blocks that run at once on a device; found out, with the kernel's attributes set, when it is first used there.
  static int resident_blocks(int device) {
    static std::atomic<int> known[64];
    int blocks = known[device].load(std::memory_order_acquire);
    if (blocks != 0) return blocks;
    auto* const kernel = groupwise_kernel<C>;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes),
               "asking for shared memory");
    blocks = device_properties(device).sm_count;
    if constexpr (C::kCluster > 1) {
      cudaLaunchAttribute attributes[2];
      cudaLaunchConfig_t config = launch_config(attributes, C::kCluster, nullptr);
      config.attrs = attributes + 1;
      config.numAttrs = 1;
      int clusters = 0;
      cuda_check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "asking for clusters");
      blocks = clusters * C::kCluster;
    }
    known[device].store(blocks, std::memory_order_release);
    return blocks;
  }

  static void launch(GroupwiseProblem const& p, int device, Stream stream) {
    thread_local ParamsCache<GroupwiseProblem, GroupwiseParams> cache;
    auto const& params = cache.get(cache_key(p.a, p.b, p.d), p, device, [&] { return params_of(p); });
    auto const tiles = [](std::int64_t size, int tile) { return (size + tile - 1) / tile; };
    std::int64_t blocks = resident_blocks(device);
    if (p.offs == nullptr && p.masked_m == nullptr) {
      int const rows = C::kM * (C::kShare == Share::kWeights ? C::kCluster : 1);
      int const columns = C::kN * (C::kShare == Share::kTokens ? C::kCluster : 1);
      blocks = std::min(blocks, tiles(p.m, rows) * tiles(p.n, columns) * C::kCluster);
    }
    cudaLaunchAttribute attributes[2];
    auto const config = launch_config(attributes, static_cast<int>(blocks), stream);
    cuda_check(cudaLaunchKernelEx(&config, groupwise_kernel<C>, params), "launching epiloq.groupwise_mm");
  }
};

}  // namespace epiloq::gemm

#pragma once

// Compile-time shape of a groupwise GEMM kernel, its shared-memory layout and pipeline.

#include <cutlass/arch/barrier.h>

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "epilogue/library.h"
#include "kernels/common/device_code.cuh"
#include "kernels/common/groupwise_split_k.h"
#include "kernels/common/groupwise_tile_scheduler.cuh"
#include "kernels/common/pipeline.cuh"
#include "kernels/common/tensor_map.h"
#include "kernels/common/tile_config.h"
#include "problems/groupwise_gemm.h"

namespace epiloq::gemm {

// Boxes of 8, 16 and 32 tokens: experts with few rows would otherwise read those of the next ones, up to a whole tile.
inline constexpr int kFewRowsBoxes = 3, kFewestRows = 8, kFewRows = kFewestRows << (kFewRowsBoxes - 1);

struct GroupwiseParams {
  RowTiles tokens, weights;
  CUtensorMap scales;         // of tokens, if TMA loads them
  CUtensorMap weight_scales;  // if TMA loads all scales
  CUtensorMap output;         // if TMA can store
  CUtensorMap half;           // half a tile's tokens, if paired CTAs load one half each
  GroupwiseProblem p;
  GroupwiseTiles tiles;
  bool copies_scales, copies_all_scales, stores_boxes;
  int steps_of_first;  // K steps of the first of two CTAs that split K; otherwise all
  bool has_experts;
  CUtensorMap few_tokens[kFewRowsBoxes];  // for small M, with experts
};

// Integers and enums rather than a GroupwiseConfig: nvcc 13.0 cannot name a structural value in the stub of a
// __global__ template.
template <int kMGroups_, int kKGroups_, int kN_, int kRounds_, Scales kScales_, class Element_, class Out_,
          class Epilogue_ = epilogue::Scaled>
struct Groupwise {
  using Element = Element_;  // of A and B: int8 or float8, in CUTLASS's types
  using Out = Out_;
  using Epilogue = Epilogue_;  // for per-row scales; groups are scaled in the sums and have a bias
  static constexpr int kMGroups = kMGroups_, kKGroups = kKGroups_, kN = kN_;
  // Rounds of 64 tokens per warpgroup: each multiplies the same stage of weights. The rows of all warpgroups of one
  // round precede those of the next, as in DeepGEMM.
  static constexpr int kRounds = kRounds_, kRoundRows = 64 * kMGroups;
  // Computes D^T: the launch exchanges A and B, so that the rows of the tile are those of the problem's B. Theirs are
  // the scales per 128 of K, two per thread; columns have one scale for all of K, applied in the epilogue.
  static constexpr bool kTransposesD = kScales_ == Scales::kColumnsOfWholeRows;
  // Of B: one per column rather than per 128 columns.
  static constexpr bool kColumnScales = kScales_ == Scales::kColumns;
  static constexpr bool kPerRowScales =
      kScales_ == Scales::kPerRowScales;  // scales cover all of K and are applied in the epilogue
  static constexpr bool kExact = std::is_same_v<Element, std::int8_t>;
  static constexpr bool kHasZeroPoint = Epilogue::kHasZeroPoint;
  static_assert((!kExact || kPerRowScales) && (!kHasZeroPoint || kExact));
  using Sum = std::conditional_t<kExact, std::uint32_t, float>;  // unsigned, as in wgmma's wrappers for int32
  // wgmma's N; for int8 a multiple of 16 from 32 on: the last 8 columns may read past the weights, and are ignored.
  static constexpr int kColumns = kExact && kN > 32 ? (kN + 15) / 16 * 16 : kN;
  static constexpr int kSums = kColumns / 2;  // per thread: rows r and r + 8, two neighbours of each 8 columns
  static constexpr int kM = kRoundRows * kRounds;
  // Warpgroups along K share a warp's 16 rows in the epilogue: rows and sums per warp.
  static constexpr int kWarpRows = 16 / kKGroups, kRowSums = (kSums / kKGroups + 3) / 4 * 4;
  static constexpr bool kSmallM = kMGroups == 1;  // bound by reading weights
  // Every other tile of a CTA runs K backwards, as do the tiles of other CTAs: L2 then still contains the tokens with
  // which the previous tiles ended.
  static constexpr bool kAlternatesK = !kSmallM;
  static constexpr bool kProducerMayLoadScales =
      !kSmallM && !kColumnScales && !kPerRowScales;  // by the operand producer
  static constexpr int kConsumerGroups = kMGroups * kKGroups;
  static constexpr int kConsumerWarps = 4 * kConsumerGroups;
  static constexpr int kThreads = 128 * (kConsumerGroups + 1);
  // Register reallocation from producer to consumer warpgroups, if those need more than an equal share. A CTA only has
  // what it was launched with: asking for more deadlocks.
  static constexpr bool kReallocatesRegisters = kConsumerGroups > 1;
  static constexpr bool kNeedsRegisters = kConsumerGroups == 3 || kN > 160 || kN == 128 || kRounds > 1;
  static constexpr int kAllRegisters =
      65536 / kThreads / 8 * 8 * (kConsumerGroups + 1);  // per thread of each warpgroup
  static constexpr int kProducerRegisters = kNeedsRegisters ? 40 : 72;
  static constexpr int kConsumerRegisters = (kAllRegisters - kProducerRegisters) / kConsumerGroups / 8 * 8;
  static_assert(kMGroups == 1 || kKGroups == 1);
  static_assert(kRounds == 1 || (kRounds == 2 && kKGroups == 1 && !kExact));
  static_assert(!kTransposesD || (kMGroups > 1 && sizeof(Out) == 2));
  // The two CTAs of a cluster compute adjacent tiles and load their tokens by multicast: each loads half of them for
  // both. Saves L2 traffic and power.
  static constexpr bool kMulticast = kRounds > 1;
  static constexpr GroupwiseConfig kConfig{kMGroups, kKGroups, kN, kRounds};
  static constexpr bool kMaySplitK = may_split_k(kConfig), kSplitsLastWave = splits_last_wave(kConfig);

  static constexpr int kTokenBytes = kM * kGroupDepth, kWeightBytes = kN * kGroupDepth;
  // With the shortest K steps TMA may load all scales: weight scales for four steps at a time (16 bytes), of both
  // 128-column groups.
  static constexpr bool kMayCopyAllScales = kSmallM && kN <= 32 && !kColumnScales && !kPerRowScales;
  static constexpr int kQuad = 4;
  static constexpr int kWeightScales = kTransposesD ? 0 : kColumnScales ? kN : 2;     // loaded by warps
  static constexpr bool kOneWeightScale = !kColumnScales && kBlockColumns % kN == 0;  // per tile
  static constexpr int kWeightScaleSlots = kMayCopyAllScales ? 2 * kQuad : kWeightScales;
  static constexpr int kStageScales = kPerRowScales ? 0 : (kM + kWeightScaleSlots + 31) / 32 * 32;
  static constexpr int kStageBytes = kTokenBytes + kWeightBytes + 4 * kStageScales;

  // D leaves through shared memory: a warp's rows by kChunk columns per slot, in lines of 128 bytes of a row or, of
  // D^T, of 32 bytes of a column; kSlots may be in flight.
  static constexpr int kLine = kTransposesD ? kWarpRows * static_cast<int>(sizeof(Out)) : 128;
  static constexpr int kChunk = 128 / static_cast<int>(sizeof(Out));  // columns
  static constexpr int kChunks = (kN + kChunk - 1) / kChunk;          // per round
  static constexpr bool kStoresBoxes = kMGroups > 1 && kN % kChunk == 0;
  static constexpr int kParts = kRounds * kChunks;  // per tile
  static constexpr int kSlots = kStoresBoxes ? std::min(kParts, 4) : 1;
  static constexpr int kSlotBytes = kWarpRows * kChunk * static_cast<int>(sizeof(Out));
  static_assert(kN % 8 == 0);
  // A tile spans at most two 128-column scale groups, wherever it begins.
  static_assert(kColumnScales || kPerRowScales || kN - std::gcd(kN, kBlockColumns) <= kBlockColumns);
  // Copies of the epilogue's row and column operands and zero points. Each warp has its own row operands, and its own
  // column operands unless all warps synchronise in every tile: then there are two copies, as one warp may be a tile
  // ahead.
  static constexpr int kOperands = !kPerRowScales ? 0 : kHasZeroPoint ? 2 : 1;
  static constexpr int kRowOperands = kOperands * kWarpRows * kRounds;
  static constexpr int kColumnOperands = kTransposesD ? kN : kOperands * kN;
  static constexpr bool kSharesColumnOperands = kKGroups > 1;
  static constexpr int kOperandBytes =
      4 * (kConsumerWarps * kRowOperands + (kSharesColumnOperands ? 2 : kConsumerWarps) * kColumnOperands);
  static constexpr int kPartialBytes = kKGroups > 1 ? kKGroups * 128 * kRowSums * 4 : 0;
  static constexpr int kBarrierBytes = 512;
  static constexpr int kSharedMemory = 232448;  // bytes per CTA on SM90
  static constexpr int kMaxStages = 24;
  // Pipeline ownership: within a tile the same warpgroup always consumes a given stage, and over all tiles the same
  // producer fills it, so that one parity bit suffices. Between tiles of odd depth warpgroups along K exchange stages,
  // which is safe because they synchronise there. A token producer may wait for a weight stage released kTokenStages
  // steps ago: its next use needs tokens that the same producer has not issued yet.
  static constexpr int kProducerWarps = kSmallM ? 2 : 1;  // if K steps are short, their waits must overlap
  static_assert(!kMulticast || kProducerWarps == 1);
  static constexpr int kScaleWarps = kProducerWarps == 1 ? 3 : 1;  // per producer; spread over all schedulers
  static constexpr int kEven = std::lcm(kKGroups, kProducerWarps);
  // For small M, shared memory left over by whole stages is used for more weight stages. Groups with scales do not
  // gain from it.
  struct StageCounts {
    int tokens, weights;
    friend constexpr bool operator==(StageCounts const&, StageCounts const&) = default;
  };
  static constexpr int fixed_bytes(int warp_staging) {
    return kConsumerWarps * warp_staging + kOperandBytes + kPartialBytes + kBarrierBytes;
  }
  static constexpr StageCounts stages_beside(int warp_staging) {
    int const room = kSharedMemory - fixed_bytes(warp_staging);
    int const stages = std::min(room / kStageBytes, kMaxStages) / kEven * kEven;
    return {stages,
            stages + (kSmallM && kPerRowScales ? (room - stages * kStageBytes) / kWeightBytes / kEven * kEven : 0)};
  }
  // One-sided split-K: the second CTA sends the first all its sums, into this buffer, so that no stage is needed for
  // them. Otherwise each sends half: for 56-column tiles, and for scale groups, whose steps take longer.
  static constexpr int kSlotsBytes = kSlots * kSlotBytes, kAllSumsBytes = std::max(kSlotsBytes, kRowSums * 32 * 4);
  static constexpr bool kOneSidedSplitK =
      kMaySplitK && kSmallM && kPerRowScales && stages_beside(kAllSumsBytes) == stages_beside(kSlotsBytes);
  static constexpr int kWarpStaging = kOneSidedSplitK ? kAllSumsBytes : kSlotsBytes;
  static constexpr int kTokenStages = stages_beside(kWarpStaging).tokens, kStages = stages_beside(kWarpStaging).weights;
  static constexpr int kMoreStages = kStages - kTokenStages;
  // Tokens and weights have different stage counts, and kProducerWarps producer warps each.
  static constexpr bool kSeparateProducers = kMoreStages > 0;
  static_assert(!kSeparateProducers || kProducerWarps == 2);
  static_assert(kTokenStages >= (kMGroups > 1 ? 3 : 2));
  static constexpr int kSharedBytes =
      fixed_bytes(kWarpStaging) + kTokenStages * kStageBytes + kMoreStages * kWeightBytes;

  // Shared-memory layout: all tokens, all weights, the output staging, then what needs no alignment.
  struct Shared {
    unsigned char* base;
    __device__ explicit Shared(unsigned char* aligned) : base(aligned) {}
    __device__ unsigned char* tokens(int stage) const { return base + stage * kTokenBytes; }
    __device__ unsigned char* weights(int stage) const { return tokens(kTokenStages) + stage * kWeightBytes; }
    __device__ unsigned char* staging(int warp) const { return weights(kStages) + warp * kWarpStaging; }
    __device__ float* scales(int stage) const {
      return reinterpret_cast<float*>(staging(kConsumerWarps)) + stage * kStageScales;
    }
    __device__ float* row_operands(int warp) const { return scales(kStages) + warp * kRowOperands; }
    __device__ float* column_operands(int copy) const { return row_operands(kConsumerWarps) + copy * kColumnOperands; }
    __device__ float* partial() const { return scales(kStages) + kOperandBytes / 4; }
    __device__ cutlass::arch::ClusterTransactionBarrier* full() const {
      return reinterpret_cast<cutlass::arch::ClusterTransactionBarrier*>(partial() + kPartialBytes / 4);
    }
    __device__ cutlass::arch::ClusterBarrier* empty() const {
      return reinterpret_cast<cutlass::arch::ClusterBarrier*>(full() + kStages);
    }
    __device__ cutlass::arch::ClusterBarrier* received() const { return empty() + kStages; }  // one per warp
  };
  static_assert(kStages * 16 + kConsumerWarps * 8 <= kBarrierBytes);

  // Arrivals per full barrier: TMA's transaction and every lane that copies scales. Per empty barrier: every warp of
  // the K group that consumes the stage.
  static __device__ bool producer_loads_scales(GroupwiseParams const& params) {
    return kProducerMayLoadScales && params.copies_scales;
  }
  static __device__ int full_arrivals(GroupwiseParams const& params) {
    if (kPerRowScales) return kSeparateProducers ? 2 : 1;
    return 1 + (params.copies_all_scales ? 1 : producer_loads_scales(params) ? 0 : 32 * kScaleWarps);
  }
  static constexpr int kEmptyArrivals = 4 * kMGroups * (kMulticast ? 2 : 1);  // one per warp, of both CTAs

  // A warpgroup with enough registers multiplies one stage while it promotes the previous one. (With three warpgroups
  // others multiply meanwhile.)
  static constexpr bool kOverlaps = kMGroups == 2 && kRounds == 1 && kN <= 128 && !kColumnScales && !kExact;
  // Deferred stores: if each part has a slot, a tile is stored between the next one's products; not with two products
  // in flight.
  static constexpr bool kDefersStores = kStoresBoxes && kParts <= kSlots && !kOverlaps;
  // The parts of the first round then fill their slots during the last product of the second round. Not with per-row
  // scales: ptxas spills.
  static constexpr bool kFillsSlotsEarly = kDefersStores && kRounds > 1 && !kPerRowScales;
};

// A role's position in the pipeline of tokens and, if that differs, of weights.
template <class C>
using Position = PairedPipelineState<C::kStages, C::kTokenStages>;

}  // namespace epiloq::gemm

#pragma once

// Shapes of the group-wise kernel: what a tile keeps in shared memory, and the ring of its stages.

#include <cutlass/arch/barrier.h>

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "epilogue/library.h"
#include "kernels/common/device_code.cuh"
#include "kernels/common/groupwise_split_k.h"
#include "kernels/common/groupwise_tile_scheduler.cuh"
#include "kernels/common/tensor_map.h"
#include "kernels/common/tile_config.h"
#include "problems/groupwise_gemm.h"

namespace epiloq::gemm {

struct GroupwiseParams {
  RowTiles tokens, weights;
  CUtensorMap scales;         // of tokens, where TMA copies them; else not used
  CUtensorMap weight_scales;  // where it copies all
  CUtensorMap output;         // where TMA can store it; else not used
  CUtensorMap half;           // of a tile's tokens, where blocks read half of them each for both; else not used
  GroupwiseProblem p;
  GroupwiseTiles tiles;
  bool copies_scales, copies_all_scales, stores_boxes;
  int steps_of_first;  // of K, to the first of two blocks that share it; else all
};

// Integers and enums rather than a GroupwiseConfig: nvcc 13.0 cannot spell a structural value in the stub of a
// __global__ template.
template <int kMGroups_, int kKGroups_, int kN_, int kRounds_, Scales kScales_, class Element_, class Out_,
          class Epilogue_ = epilogue::Scaled>
struct Groupwise {
  using Element = Element_;  // of A and B: int8 or float8, as CUTLASS names them
  using Out = Out_;
  using Epilogue = Epilogue_;  // of whole rows; groups have their scales in the sums, and a bias
  static constexpr int kMGroups = kMGroups_, kKGroups = kKGroups_, kN = kN_;
  // Of 64 tokens a warpgroup: the weights of a stage serve each in turn. All warpgroups' rows of one round lie in front
  // of those of the next, as DeepGEMM has them (0 to 0.3 % fewer cycles than rounds side by side).
  static constexpr int kRounds = kRounds_, kRoundRows = 64 * kMGroups;
  static constexpr bool kColumnScales = kScales_ == Scales::kColumns;  // of B, one a column; else one for 128 columns
  static constexpr bool kWholeRows = kScales_ == Scales::kWholeRows;   // scales of all of K, for the end
  static constexpr bool kExact = std::is_same_v<Element, std::int8_t>;
  static constexpr bool kHasZeroPoint = std::is_same_v<Epilogue, epilogue::ScaledAzp>;
  static_assert((!kExact || kWholeRows) && (!kHasZeroPoint || kExact));
  using Sum = std::conditional_t<kExact, std::uint32_t, float>;  // unsigned, as wgmma's wrappers name int32
  // wgmma's columns, of int8 a multiple of 16 from 32 on: the last 8 may multiply what lies behind the weights, for
  // nobody.
  static constexpr int kColumns = kExact && kN > 32 ? (kN + 15) / 16 * 16 : kN;
  static constexpr int kSums = kColumns / 2;  // of a thread: rows r and r + 8, two neighbours of each 8 columns
  static constexpr int kM = kRoundRows * kRounds;
  // Warps that took turns along K share their 16 rows where a tile ends: each has so many, with so many sums a thread.
  static constexpr int kWarpRows = 16 / kKGroups, kRowSums = (kSums / kKGroups + 3) / 4 * 4;
  static constexpr bool kFew = kMGroups == 1;  // tokens, so that reading the weights is what takes time
  // Every other tile of a block goes from its last step of K to its first, as do those beside it: where many blocks
  // share tokens, L2 still has those that the tiles before ended with.
  static constexpr bool kTurns = !kFew;
  static constexpr bool kMayBringScales = !kFew && !kColumnScales && !kWholeRows;  // whoever asks for tiles
  static constexpr int kConsumerGroups = kMGroups * kKGroups;
  static constexpr int kConsumerWarps = 4 * kConsumerGroups;
  static constexpr int kThreads = 128 * (kConsumerGroups + 1);
  // Registers that reading warps give to multiplying ones, where those need more than an equal part. A block has what
  // it was launched with: warps that want more than is left of it wait for ever.
  static constexpr bool kMovesRegisters = kConsumerGroups > 1;
  static constexpr bool kWantsRegisters = kConsumerGroups == 3 || kN > 160 || kN == 128 || kRounds > 1;
  static constexpr int kAllRegisters =
      65536 / kThreads / 8 * 8 * (kConsumerGroups + 1);  // of a thread of each warpgroup
  static constexpr int kProducerRegisters = kWantsRegisters ? 40 : 72;
  static constexpr int kConsumerRegisters = (kAllRegisters - kProducerRegisters) / kConsumerGroups / 8 * 8;
  static_assert(kMGroups == 1 || kKGroups == 1);
  static_assert(kRounds == 1 || (kRounds == 2 && kKGroups == 1 && !kExact));
  // Two blocks of a cluster take tiles side by side and read their tokens once: each asks for half of them, and TMA
  // writes it to both. Less leaves L2, which saves power.
  static constexpr bool kPairs = kRounds > 1;
  static constexpr GroupwiseConfig kConfig{kMGroups, kKGroups, kN, kRounds};
  static constexpr bool kMaySplitK = may_split_k(kConfig), kSplitsLastWave = splits_last_wave(kConfig);

  static constexpr int kTokenBytes = kM * kGroupDepth, kWeightBytes = kN * kGroupDepth;
  // Where steps are shortest TMA may copy all scales: of weights four steps' at a time, 16 bytes, of both blocks of
  // 128.
  static constexpr bool kMayCopyAllScales = kFew && kN <= 32 && !kColumnScales && !kWholeRows;
  static constexpr int kQuad = 4;
  static constexpr int kWeightScales = kColumnScales ? kN : 2;                      // that warps copy
  static constexpr bool kOneWeightScale = !kColumnScales && kGroupDepth % kN == 0;  // that a tile's weights have
  static constexpr int kWeightScaleSlots = kMayCopyAllScales ? 2 * kQuad : kWeightScales;
  static constexpr int kStageScales = kWholeRows ? 0 : (kM + kWeightScaleSlots + 31) / 32 * 32;
  static constexpr int kStageBytes = kTokenBytes + kWeightBytes + 4 * kStageScales;

  // D leaves through shared memory, a warp's rows by a line of 128 bytes at a time, of which so many may be under way.
  static constexpr int kLine = 128;
  static constexpr int kChunk = kLine / static_cast<int>(sizeof(Out));  // columns
  static constexpr int kChunks = (kN + kChunk - 1) / kChunk;            // of a round
  static constexpr bool kStoresBoxes = kMGroups > 1 && kN % kChunk == 0;
  static constexpr int kParts = kRounds * kChunks;  // of a tile
  static constexpr int kSlots = kStoresBoxes ? std::min(kParts, 4) : 1;
  static constexpr int kSlotBytes = kWarpRows * kLine;
  static_assert(kN % 8 == 0);
  // Weights of a tile belong to two blocks of 128 at most, wherever among its multiples the tile begins.
  static_assert(kColumnScales || kWholeRows || kN - std::gcd(kN, kGroupDepth) <= kGroupDepth);
  // Copies of what rows and columns are multiplied by, and of their zero points. Rows are a warp's own; columns too,
  // or all warps' where those meet in every tile: twice then, as one may be a tile ahead of another.
  static constexpr int kOperands = !kWholeRows ? 0 : kHasZeroPoint ? 2 : 1;
  static constexpr int kRowOperands = kOperands * kWarpRows * kRounds, kColumnOperands = kOperands * kN;
  static constexpr bool kSharesColumns = kKGroups > 1;
  static constexpr int kOperandBytes =
      4 * (kConsumerWarps * kRowOperands + (kSharesColumns ? 2 : kConsumerWarps) * kColumnOperands);
  static constexpr int kPartialBytes = kKGroups > 1 ? kKGroups * 128 * kRowSums * 4 : 0;
  static constexpr int kBarrierBytes = 512;
  static constexpr int kSharedMemory = 232448;  // bytes a block may have on SM90
  static constexpr int kMaxStages = 24;
  // Within a tile always the same warpgroup has to do with a stage, and over all tiles the same readers: a parity tells
  // one use of it from the next, but not from the one after that. Between tiles of odd depth warpgroups along K
  // exchange stages; that is safe because they meet there. A reader of tokens may wait for a stage of weights to be
  // given back, kTokenStages steps ago: its next use needs tokens that the same reader has yet to ask for.
  static constexpr int kProducerWarps = kFew ? 2 : 1;  // where steps are short, their waits must overlap
  static_assert(!kPairs || kProducerWarps == 1);
  static constexpr int kScaleWarps = kProducerWarps == 1 ? 3 : 1;  // for each: all schedulers have the same to do
  static constexpr int kEven = std::lcm(kKGroups, kProducerWarps);
  // What whole stages leave of shared memory is room for more of few tokens' weights on their way (rings.json). Tokens,
  // though from L2, are as long on theirs: fewer stages of them made everything slower. In groups more stages bring
  // nothing.
  struct Ring {
    int tokens, weights;
    friend constexpr bool operator==(Ring const&, Ring const&) = default;
  };
  static constexpr int fixed_bytes(int warp_staging) {
    return kConsumerWarps * warp_staging + kOperandBytes + kPartialBytes + kBarrierBytes;
  }
  static constexpr Ring ring_beside(int warp_staging) {
    int const room = kSharedMemory - fixed_bytes(warp_staging);
    int const stages = std::min(room / kStageBytes, kMaxStages) / kEven * kEven;
    return {stages, stages + (kFew && kWholeRows ? (room - stages * kStageBytes) / kWeightBytes / kEven * kEven : 0)};
  }
  // Of two blocks that share K the second gives the first all of its sums, which wait there until that one is done,
  // where no stage has to go for them (two cost 0.1 to 0.3 us of 17); else each gives half: by tiles of 56 weights and,
  // as their steps take longer to multiply and halves are level or 0.1 us faster, in groups of 128.
  static constexpr int kSlotsBytes = kSlots * kSlotBytes, kAllSumsBytes = std::max(kSlotsBytes, kRowSums * 32 * 4);
  static constexpr bool kGivesAll =
      kMaySplitK && kFew && kWholeRows && ring_beside(kAllSumsBytes) == ring_beside(kSlotsBytes);
  static constexpr int kWarpStaging = kGivesAll ? kAllSumsBytes : kSlotsBytes;
  static constexpr int kTokenStages = ring_beside(kWarpStaging).tokens, kStages = ring_beside(kWarpStaging).weights;
  static constexpr int kMoreStages = kStages - kTokenStages;
  // Tokens and weights, whose steps then differ, have kProducerWarps each. One reader with both, weights ahead, took up
  // to 15 % longer, one each up to 11.
  static constexpr bool kApart = kMoreStages > 0;
  static_assert(!kApart || kProducerWarps == 2);
  static_assert(kTokenStages >= (kMGroups > 1 ? 3 : 2));
  static constexpr int kSharedBytes =
      fixed_bytes(kWarpStaging) + kTokenStages * kStageBytes + kMoreStages * kWeightBytes;

  // Parts of shared memory: all tokens, all weights, what leaves, then what needs no alignment.
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
    __device__ cutlass::arch::ClusterBarrier* received() const { return empty() + kStages; }  // a warp each
  };
  static_assert(kStages * 16 + kConsumerWarps * 8 <= kBarrierBytes);

  // A stage is full when TMA's bytes and the scales of every lane that copies some are there, and empty when all that
  // read it have.
  static __device__ bool brings_scales(GroupwiseParams const& params) {
    return kMayBringScales && params.copies_scales;
  }
  static __device__ int full_arrivals(GroupwiseParams const& params) {
    if (kWholeRows) return kApart ? 2 : 1;
    return 1 + (params.copies_all_scales ? 1 : brings_scales(params) ? 0 : 32 * kScaleWarps);
  }
  static constexpr int kEmptyArrivals = 4 * kMGroups * (kPairs ? 2 : 1);  // a warp each, of both blocks

  // A warpgroup that has the registers multiplies one stage while it adds up the one before. (Of three warpgroups
  // others multiply meanwhile.)
  static constexpr bool kOverlaps = kMGroups == 2 && kRounds == 1 && kN <= 128 && !kColumnScales && !kExact;
  // A tile may leave between the next one's products if each of its parts has a slot; not where two products are under
  // way at a time, which took 1 to 11 % longer.
  static constexpr bool kSendsLater = kStoresBoxes && kParts <= kSlots && !kOverlaps;
  // And then the parts of a first round fill theirs while the last one is multiplied for the last time. With scales of
  // whole rows there are not the registers: ptxas spilled.
  static constexpr bool kFillsEarly = kSendsLater && kRounds > 1 && !kWholeRows;
};

// Where a role stands in the ring of stages, and in that of tokens, if it is another one.
template <class C>
class PipelineState {
 public:
  int stage, parity;
  __device__ explicit PipelineState(int step)
      : stage(step % C::kStages), parity(step / C::kStages % 2), tokens_(step % C::kTokenStages) {}
  __device__ int token_stage() const { return kIsOne ? stage : tokens_; }
  __device__ void advance(int steps) {
    stage += steps;
    if (stage >= C::kStages) {
      stage -= C::kStages;
      parity ^= 1;
    }
    if constexpr (kIsOne) return;
    tokens_ += steps;
    if (tokens_ >= C::kTokenStages) tokens_ -= C::kTokenStages;
  }

 private:
  static constexpr bool kIsOne = C::kStages == C::kTokenStages;
  int tokens_;
};

}  // namespace epiloq::gemm

#pragma once

// Position of a role (producer or consumer) in a circular pipeline of shared-memory stages: the stage, and the parity
// of the phase of its full and empty barriers. The parity flips each time the position wraps.

#include <cstdint>

namespace epiloq::gemm {

// The number of stages is known at compile time.
template <int kStages>
struct PipelineState {
  int stage = 0;
  std::uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    phase ^= stage == 0;
  }
};

// The number of stages is known at run time.
struct DynamicPipelineState {
  int stage;
  std::uint32_t phase;

  // `by` is at most the number of stages.
  __device__ __forceinline__ void advance(int stages, int by = 1) {
    bool const wraps = stage + by >= stages;
    stage += wraps ? by - stages : by;
    phase ^= wraps;
  }
};

// Two operands with a stage count each: weights have kStages, tokens kTokenStages. The parity is that of the weights'.
template <int kStages, int kTokenStages>
class PairedPipelineState {
 public:
  int stage, parity;

  __device__ explicit PairedPipelineState(int step)
      : stage(step % kStages), parity(step / kStages % 2), tokens_(step % kTokenStages) {}
  __device__ int token_stage() const { return kIsOne ? stage : tokens_; }
  __device__ void advance(int steps) {
    stage += steps;
    if (stage >= kStages) {
      stage -= kStages;
      parity ^= 1;
    }
    if constexpr (kIsOne) return;
    tokens_ += steps;
    if (tokens_ >= kTokenStages) tokens_ -= kTokenStages;
  }

 private:
  static constexpr bool kIsOne = kStages == kTokenStages;
  int tokens_;
};

}  // namespace epiloq::gemm

// As main.cu, for tiles of the group-wise kernel with FP8 or int8 operands: scales per 1x128 of A and per 128x128 of B,
// or per row of both.

#include "harness.h"
#include "problems/groupwise_gemm.h"

using epiloq::gemm::GroupScales;
using epiloq::gemm::GroupwiseProblem;
using Element = ELEMENT;

struct Tile {
  char const* name;
  epiloq::gemm::GroupwiseLaunch launch;
};
#include "tiles.inc"

__global__ void count_wrong(GroupwiseProblem p, int* wrong) {
  int const n = blockIdx.x * blockDim.x + threadIdx.x;
  std::int64_t const m = blockIdx.y * 2654435761u % p.m;  // rows spread over all tiles
  if (n >= p.n) return;
  auto const* const a = static_cast<Element const*>(p.a) + m * p.stride_a;
  auto const* const b = static_cast<Element const*>(p.b) + n * p.stride_b;
  float expected = 0, squares = 0;
  for (int k = 0; k < p.k; ++k) {
    float const scale_a = p.scale_a.ptr[m * p.scale_a.stride_row + k / 128 * p.scale_a.stride_k];
    float const scale_b = p.scale_b.ptr[(n >> p.scale_b.shift) * p.scale_b.stride_row + k / 128 * p.scale_b.stride_k];
    float const term = scale_a * scale_b * static_cast<float>(a[k]) * static_cast<float>(b[k]);
    expected += term;
    squares += term * term;
  }
  float const got = __bfloat162float(static_cast<__nv_bfloat16 const*>(p.d)[m * p.stride_d + n]);
  constexpr float kUlp = 1.f / 128;
  if (!(fabsf(got - expected) <= kUlp * (fabsf(expected) + sqrtf(squares)))) atomicAdd(wrong, 1);
}

void sweep(int n, int k, int m, cudaStream_t stream) {
  std::size_t const weight_bytes = std::size_t(n) * k;
  constexpr std::size_t kColdBytes = 400'000'000;
  std::size_t const copies = std::max<std::size_t>(3, kColdBytes / weight_bytes);
  int const blocks_k = (k + 127) / 128, blocks_n = PER_ROW_SCALES ? n : (n + 127) / 128, padded_m = (m + 3) / 4 * 4;
  auto* const weights = allocate<Element>(weight_bytes * copies);
  auto* const a = allocate<Element>(std::size_t(m) * k);
  auto* const d = allocate<__nv_bfloat16>(std::size_t(m) * n * copies);
  auto* const scale_a = allocate<float>(padded_m * blocks_k);
  auto* const scale_b = allocate<float>(blocks_n * blocks_k);
  auto* const wrong = allocate<int>(1);
  fill<<<1024, 256>>>(weights, weight_bytes * copies, 1);
  fill<<<64, 256>>>(a, std::size_t(m) * k, 7);
  fill_scales<<<(padded_m * blocks_k + 255) / 256, 256>>>(scale_a, padded_m * blocks_k);
  fill_scales<<<(blocks_n * blocks_k + 255) / 256, 256>>>(scale_b, blocks_n * blocks_k);
  cuda_check(cudaDeviceSynchronize(), "filling");
  std::vector<GroupwiseProblem> problems;
  for (std::size_t i = 0; i < copies; ++i) {
    GroupwiseProblem p;
    p.m = m, p.n = n, p.k = k;
    p.stride_a = k, p.stride_b = k, p.stride_d = n;
    p.a = a, p.b = weights + i * weight_bytes, p.d = d + i * std::size_t(m) * n;
    p.scale_a = {scale_a, 1, PER_ROW_SCALES ? 0 : padded_m, 0};
    p.scale_b = PER_ROW_SCALES ? GroupScales{scale_b, 1, 0} : GroupScales{scale_b, blocks_k, 1, GroupScales::kPerBlock};
    if (PER_ROW_SCALES) p.depth = k;
    problems.push_back(p);
  }
  auto const costs = steady_costs(problems, kTiles, stream);
  std::vector<Result> results;
  for (Tile const& tile : kTiles) {
    int host_wrong = 0;
    cuda_check(cudaMemset(d, 0xff, std::size_t(m) * n * 2), "poisoning");
    cuda_check(cudaMemset(wrong, 0, 4), "poisoning");
    tile.launch(problems[0], 0, stream);
    cuda_check(cudaStreamSynchronize(stream), tile.name);
    count_wrong<<<dim3((n + 127) / 128, std::min(m, 64)), 128>>>(problems[0], wrong);
    cuda_check(cudaMemcpy(&host_wrong, wrong, 4, cudaMemcpyDeviceToHost), "checking");
    std::string const verdict = host_wrong ? " WRONG:" + std::to_string(host_wrong) : "";
    results.push_back({costs[results.size()], tile.name + verdict});
  }
  print_best(n, k, m, results);
  for (void* pointer : {static_cast<void*>(weights), static_cast<void*>(a), static_cast<void*>(d),
                        static_cast<void*>(scale_a), static_cast<void*>(scale_b), static_cast<void*>(wrong)}) {
    cudaFree(pointer);
  }
}

int main(int argc, char** argv) { return for_each_problem(argc, argv, sweep); }

// Checks and times every tile on every shape: kernels in a CUDA graph, weights cold in L2. Each tile's output is first
// compared with a reference kernel's. Usage: sweep NxK[,NxK...] M[,M...]; prints the best tiles of each problem,
// in us and thousands of cycles.

#include "harness.h"
#include "problems/gemm.h"

using epiloq::gemm::Problem;

struct Tile {
  char const* name;
  epiloq::gemm::Launch launch;
};
#include "tiles.inc"  // written by sweep.py: the tiles' declarations, and kTiles

#if FLOAT8
using Element = __nv_fp8_e4m3;
#else
using Element = std::int8_t;
#endif

// Checks rows spread over M.
__global__ void count_wrong(Problem p, int* wrong) {
  int const n = blockIdx.x * blockDim.x + threadIdx.x;
  std::int64_t const m = std::int64_t{blockIdx.y} * p.m / gridDim.y;
  if (n >= p.n) return;
  auto const* const a = static_cast<Element const*>(p.a) + m * p.stride_a;
  auto const* const b = static_cast<Element const*>(p.b) + n * p.stride_b;
  float acc = 0, magnitude = 0;  // exact for integers of this size, or nearly
  for (int k = 0; k < p.k; ++k) {
    float const product = static_cast<float>(a[k]) * static_cast<float>(b[k]);
    acc += product;
    magnitude += fabsf(product);
  }
  float const expected = p.operands.scale_a[m] * (p.operands.scale_b[n] * acc);
  float const noise = FLOAT8 ? 1e-4f * magnitude * p.operands.scale_a[m] * p.operands.scale_b[n] : 0.f;
  float const got = __bfloat162float(static_cast<__nv_bfloat16 const*>(p.d)[m * p.stride_d + n]);
  constexpr float kUlp = 1.f / 128;
  if (!(fabsf(got - expected) <= kUlp * fabsf(expected) + noise)) atomicAdd(wrong, 1);
}

void sweep(int n, int k, int m, cudaStream_t stream) {
  std::size_t const weight_bytes = std::size_t(n) * k;
  constexpr std::size_t kColdBytes = 400'000'000;  // several times the L2
  std::size_t const copies = std::max<std::size_t>(3, kColdBytes / weight_bytes);
  auto* const weights = allocate<Element>(weight_bytes * copies);
  auto* const a = allocate<Element>(std::size_t(m) * k);
  auto* const d = allocate<__nv_bfloat16>(std::size_t(m) * n * copies);
  auto* const scales = allocate<float>(std::max(m, n));
  auto* const wrong = allocate<int>(1);
  fill<<<1024, 256>>>(weights, weight_bytes * copies, 1);
  fill<<<64, 256>>>(a, std::size_t(m) * k, 7);
  fill_scales<<<(std::max(m, n) + 255) / 256, 256>>>(scales, std::max(m, n));
  cuda_check(cudaDeviceSynchronize(), "filling");
  std::vector<Problem> problems;
  epiloq::epilogue::Operands const operands{
      .scale_a = scales, .scale_b = scales, .scale_a_is_vector = true, .scale_b_is_vector = true, .is_bfloat16 = true};
  for (std::size_t i = 0; i < copies; ++i) {
    problems.push_back({m, n, k, k, k, n, a, weights + i * weight_bytes, d + i * std::size_t(m) * n, operands});
  }

  auto const costs = steady_costs(problems, kTiles, stream);
  std::vector<Result> results;
  for (Tile const& tile : kTiles) {
    int host_wrong = 0;
    cuda_check(cudaMemset(d, 0xff, std::size_t(m) * n * 2), "poisoning");
    cuda_check(cudaMemset(wrong, 0, 4), "poisoning");
    tile.launch(problems[0], 0, stream);
    cuda_check(cudaStreamSynchronize(stream), "running a tile");
    count_wrong<<<dim3((n + 127) / 128, std::min(m, 64)), 128>>>(problems[0], wrong);
    cuda_check(cudaMemcpy(&host_wrong, wrong, 4, cudaMemcpyDeviceToHost), "checking");
    results.push_back({costs[results.size()], tile.name + std::string(host_wrong ? " WRONG" : "")});
  }
  print_best(n, k, m, results);
  for (void* pointer : {static_cast<void*>(weights), static_cast<void*>(a), static_cast<void*>(d),
                        static_cast<void*>(scales), static_cast<void*>(wrong)}) {
    cudaFree(pointer);
  }
}

int main(int argc, char** argv) { return for_each_problem(argc, argv, sweep); }

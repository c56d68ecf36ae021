// Checks and times every tile on every shape: kernels in a CUDA graph, weights cold in L2, each tile's output compared
// with a plain kernel's first. Usage: sweep NxK[,NxK...] M[,M...]; prints the best tiles of each problem.

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "gemm/problem.h"

using epiloq::cuda_check;
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

// Bytes like quantised normal values, as layers have.
__global__ void fill(Element* p, std::size_t n, unsigned seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
       i += gridDim.x * std::size_t{blockDim.x}) {
    unsigned h = static_cast<unsigned>(i) * 2654435761u + seed;
    h = (h ^ (h >> 15)) * 2246822519u;
    h = (h ^ (h >> 13)) * 2654435769u;
    int const sum = (h & 255) + ((h >> 8) & 255) + ((h >> 16) & 255) + (h >> 24);
    p[i] = static_cast<Element>(FLOAT8 ? (sum - 510) * 0.75f : (sum - 510) * 7 / 32);
  }
}

__global__ void fill_scales(float* p, int n) {
  int const i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) p[i] = 1e-3f * (1 + i % 7);
}

// Of rows spread over M.
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

template <class T>
T* allocate(std::size_t count) {
  void* pointer = nullptr;
  cuda_check(cudaMalloc(&pointer, count * sizeof(T)), "allocating");
  return static_cast<T*>(pointer);
}

float median_replay_us(std::vector<Problem> const& problems, Tile const& tile, cudaStream_t stream) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capturing");
  for (Problem const& problem : problems) tile.launch(problem, 0, stream);
  cuda_check(cudaStreamEndCapture(stream, &graph), "capturing");
  cuda_check(cudaGraphInstantiate(&executable, graph, 0), "capturing");
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> times;
  constexpr int kReplays = 9;
  for (int i = 0; i <= kReplays; ++i) {
    cudaEventRecord(begin, stream);
    cuda_check(cudaGraphLaunch(executable, stream), "replaying");
    cudaEventRecord(end, stream);
    cuda_check(cudaStreamSynchronize(stream), "replaying");
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i > 0) times.push_back(1e3f * ms / problems.size());
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
  return times[kReplays / 2];
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
  epiloq::epilogue::Operands const operands{scales, scales, nullptr, nullptr, nullptr, true, true, false};
  for (std::size_t i = 0; i < copies; ++i) {
    problems.push_back({m, n, k, k, k, n, a, weights + i * weight_bytes, d + i * std::size_t(m) * n, operands});
  }

  struct Result {
    float us;
    std::string text;
  };
  std::vector<Result> results;
  for (Tile const& tile : kTiles) {
    int host_wrong = 0;
    cuda_check(cudaMemset(d, 0xff, std::size_t(m) * n * 2), "poisoning");
    cuda_check(cudaMemset(wrong, 0, 4), "poisoning");
    tile.launch(problems[0], 0, stream);
    cuda_check(cudaStreamSynchronize(stream), "running a tile");
    count_wrong<<<dim3((n + 127) / 128, std::min(m, 64)), 128>>>(problems[0], wrong);
    cuda_check(cudaMemcpy(&host_wrong, wrong, 4, cudaMemcpyDeviceToHost), "checking");
    results.push_back({median_replay_us(problems, tile, stream), tile.name + std::string(host_wrong ? " WRONG" : "")});
  }
  std::sort(results.begin(), results.end(), [](Result const& x, Result const& y) { return x.us < y.us; });
  std::printf("%dx%d M=%d:", n, k, m);
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (i < 8 || results[i].text.find("WRONG") != std::string::npos) {
      std::printf("  %s %.2f", results[i].text.c_str(), results[i].us);
    }
  }
  std::printf("\n");
  std::fflush(stdout);
  for (void* pointer : {static_cast<void*>(weights), static_cast<void*>(a), static_cast<void*>(d),
                        static_cast<void*>(scales), static_cast<void*>(wrong)}) {
    cudaFree(pointer);
  }
}

int main(int argc, char** argv) try {
  if (argc != 3) throw std::invalid_argument("usage: sweep NxK[,NxK...] M[,M...]");
  cudaStream_t stream;
  cuda_check(cudaStreamCreate(&stream), "starting");
  std::string shape, tokens;
  for (std::istringstream shapes(argv[1]); std::getline(shapes, shape, ',');) {
    int n = 0, k = 0;
    if (std::sscanf(shape.c_str(), "%dx%d", &n, &k) != 2) throw std::invalid_argument("expected NxK, got " + shape);
    for (std::istringstream counts(argv[2]); std::getline(counts, tokens, ',');) {
      sweep(n, k, std::stoi(tokens), stream);
    }
  }
} catch (std::exception const& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

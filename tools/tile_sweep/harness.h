#pragma once

// Shared by all sweeps: filling of device memory, and timing of CUDA graphs.

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/cuda_check.h"
#include "epiloq/device.h"

using epiloq::cuda_check;

// Values distributed like quantised weights.
template <class Element>
__global__ void fill(Element* p, std::size_t n, unsigned seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
       i += gridDim.x * std::size_t{blockDim.x}) {
    unsigned h = static_cast<unsigned>(i) * 2654435761u + seed;
    h = (h ^ (h >> 15)) * 2246822519u;
    h = (h ^ (h >> 13)) * 2654435769u;
    int const sum = (h & 255) + ((h >> 8) & 255) + ((h >> 16) & 255) + (h >> 24);
    p[i] = static_cast<Element>(std::is_integral_v<Element> ? (sum - 510) * 7 / 32 : (sum - 510) * 0.75f);
  }
}

__global__ void fill_scales(float* p, int n) {
  int const i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) p[i] = 1e-3f * (1 + i % 7);
}

template <class T>
T* allocate(std::size_t count) {
  void* pointer = nullptr;
  cuda_check(cudaMalloc(&pointer, count * sizeof(T)), "allocating");
  return static_cast<T*>(pointer);
}

// Cost of a call: time, which at the power limit depends on the clock, and thousands of SM cycles, which do not.
struct Cost {
  float us = 0, kilocycles = 0;
};

// Clocks of all SMs that run one of its CTAs.
__global__ void read_clocks(long long* clocks) {
  if (threadIdx.x != 0) return;
  unsigned sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(clocks[sm]));
}

// A graph with one call per problem, so many problems that each one's inputs are cold in L2 on the next replay.
class Replay {
 public:
  template <class Problem, class Tile>
  Replay(std::vector<Problem> const& problems, Tile const& tile, cudaStream_t stream)
      : stream_(stream), name_(tile.name), calls_(problems.size()) {
    cudaGraph_t graph;
    cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capturing");
    for (Problem const& problem : problems) tile.launch(problem, 0, stream);
    cuda_check(cudaStreamEndCapture(stream, &graph), "capturing");
    cuda_check(cudaGraphInstantiate(&executable_, graph, 0), "capturing");
    cudaGraphDestroy(graph);
    cudaEventCreate(&begin_);
    cudaEventCreate(&end_);
    clocks_ = allocate<long long>(2 * kMaxSms);
    run(1);
    once_us_ = run(1).us;
  }
  Replay(Replay const&) = delete;
  ~Replay() {
    cudaGraphExecDestroy(executable_);
    cudaFree(clocks_);
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  float once_us() const { return once_us_; }  // a call, in a short burst

  // A call, at the clock that the power limit leaves: mean of so long a run, after one that is not counted.
  Cost steady(float warm_ms, float measured_ms) {
    auto const replays = [&](float ms) { return std::max(1, static_cast<int>(1e3f * ms / (once_us_ * calls_))); };
    run(replays(warm_ms));
    return run(std::max(2, replays(measured_ms)));
  }

 private:
  static constexpr int kMaxSms = 512;

  // The clocks are read by several blocks for each SM, so that the first has one.
  Cost run(int replays) {
    auto const read = [&](long long* clocks) { read_clocks<<<4 * kMaxSms, 32, 0, stream_>>>(clocks); };
    read(clocks_);
    cudaEventRecord(begin_, stream_);
    for (int i = 0; i < replays; ++i) cuda_check(cudaGraphLaunch(executable_, stream_), "replaying");
    cudaEventRecord(end_, stream_);
    read(clocks_ + kMaxSms);
    cuda_check(cudaStreamSynchronize(stream_), name_);
    float ms = 0;
    cudaEventElapsedTime(&ms, begin_, end_);
    long long before = 0, after = 0;
    cuda_check(cudaMemcpy(&before, clocks_, sizeof before, cudaMemcpyDeviceToHost), "reading clocks");
    cuda_check(cudaMemcpy(&after, clocks_ + kMaxSms, sizeof after, cudaMemcpyDeviceToHost), "reading clocks");
    float const calls = static_cast<float>(replays) * calls_;
    return {1e3f * ms / calls, static_cast<float>(after - before) / (1e3f * calls)};
  }

  cudaStream_t stream_;
  char const* name_;
  std::size_t calls_;
  cudaGraphExec_t executable_{};
  cudaEvent_t begin_{}, end_{};
  long long* clocks_ = nullptr;  // before a run, and after
  float once_us_ = 0;
};

// Milliseconds for which a tile runs before it is timed. With short periods all tiles run at the clock of their average
// power, with periods of about 300 ms each at its own clock, so that lower power gives lower times.
inline float settle_ms = 6;

// Costs of all tiles, timed alternately in random order: clocks fall while the first tiles run, and each tile starts at
// the previous one's clock. (A tile that was always first seemed up to 20 % slower.) Slow tiles are timed only briefly.
template <class Problem, class Tiles>
std::vector<Cost> steady_costs(std::vector<Problem> const& problems, Tiles const& tiles, cudaStream_t stream) {
  constexpr float kFarBehind = 1.3f, kHeatMs = 60, kMeasuredMs = 14;
  constexpr int kRuns = 4;
  std::vector<std::unique_ptr<Replay>> replays;
  float best = 1e30f;
  for (auto const& tile : tiles) {
    replays.push_back(std::make_unique<Replay>(problems, tile, stream));
    best = std::min(best, replays.back()->once_us());
  }
  replays.front()->steady(kHeatMs, kMeasuredMs);
  std::vector<Cost> costs(replays.size());
  std::vector<std::size_t> order(replays.size());
  std::iota(order.begin(), order.end(), 0);
  static std::mt19937 random(42);  // other orders for every problem
  for (int turn = 0; turn < kRuns; ++turn) {
    std::shuffle(order.begin(), order.end(), random);
    for (std::size_t const i : order) {
      bool const is_far = replays[i]->once_us() > kFarBehind * best;
      Cost const cost = replays[i]->steady(is_far ? 0 : settle_ms, is_far ? 0 : kMeasuredMs);
      costs[i].us += cost.us / kRuns, costs[i].kilocycles += cost.kilocycles / kRuns;
    }
  }
  return costs;
}

struct Result {
  Cost cost;
  std::string text;
};

inline void print_best(int n, int k, int m, std::vector<Result>& results) {
  std::sort(results.begin(), results.end(), [](Result const& x, Result const& y) { return x.cost.us < y.cost.us; });
  std::printf("%dx%d M=%d:", n, k, m);
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (i < 16 || results[i].text.find("WRONG") != std::string::npos) {
      std::printf("  %s %.2f (%.1fk)", results[i].text.c_str(), results[i].cost.us, results[i].cost.kilocycles);
    }
  }
  std::printf("\n");
  std::fflush(stdout);
}

// Usage: sweep NxK[,NxK...] M[,M...] [MS to settle]
inline int for_each_problem(int argc, char** argv, void (*sweep)(int n, int k, int m, cudaStream_t)) try {
  if (argc != 3 && argc != 4) throw std::invalid_argument("usage: sweep NxK[,NxK...] M[,M...] [MS to settle]");
  if (argc == 4) settle_ms = std::stof(argv[3]);
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
  return 0;
} catch (std::exception const& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

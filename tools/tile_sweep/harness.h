#pragma once

// What every sweep needs: filled memory, and the median time of a graph of calls.

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

using epiloq::cuda_check;

// Bytes like quantised normal values, as layers have.
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

template <class Problem, class Tile>
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
    cuda_check(cudaStreamSynchronize(stream), tile.name);
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i > 0) times.push_back(1e3f * ms / problems.size());
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
  return times[kReplays / 2];
}

struct Result {
  float us;
  std::string text;
};

inline void print_best(int n, int k, int m, std::vector<Result>& results) {
  std::sort(results.begin(), results.end(), [](Result const& x, Result const& y) { return x.us < y.us; });
  std::printf("%dx%d M=%d:", n, k, m);
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (i < 8 || results[i].text.find("WRONG") != std::string::npos) {
      std::printf("  %s %.2f", results[i].text.c_str(), results[i].us);
    }
  }
  std::printf("\n");
  std::fflush(stdout);
}

// Usage: sweep NxK[,NxK...] M[,M...]
inline int for_each_problem(int argc, char** argv, void (*sweep)(int n, int k, int m, cudaStream_t)) try {
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
  return 0;
} catch (std::exception const& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

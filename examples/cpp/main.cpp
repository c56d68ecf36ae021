// D = 0.5 * 0.25 * (A W^T) on a GPU or, without one, on the CPU, printed. If there is a GPU, but no kernels for it, the
// reason is printed instead.

#include <epiloq/error.h>
#include <epiloq/scaled_mm.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#ifdef HAS_CUDA_TOOLKIT
#include <cuda_runtime_api.h>
#endif

namespace {

constexpr std::int64_t kM = 4, kN = 8, kK = 16;

// The higher 16 bits of a float32. A GPU writes outputs of 16 bits, a CPU float32 as well.
using BFloat16 = std::uint16_t;

bool has_gpu() {
#ifdef HAS_CUDA_TOOLKIT
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
#else
  return false;
#endif
}

// Values on the GPU where there is one, else where they are. Freed with the process.
template <class T>
T* placed(std::vector<T>& values) {
#ifdef HAS_CUDA_TOOLKIT
  if (has_gpu()) {
    void* copy = nullptr;
    std::size_t const bytes = values.size() * sizeof(T);
    if (cudaMalloc(&copy, bytes) != cudaSuccess ||
        cudaMemcpy(copy, values.data(), bytes, cudaMemcpyHostToDevice) != cudaSuccess) {
      throw epiloq::CudaError("consumer: no memory on the GPU");
    }
    return static_cast<T*>(copy);
  }
#endif
  return values.data();
}

void print(BFloat16 const* out) {
  std::vector<BFloat16> values(kM * kN);
  if (!has_gpu()) std::copy_n(out, values.size(), values.begin());
#ifdef HAS_CUDA_TOOLKIT
  if (has_gpu()) cudaMemcpy(values.data(), out, values.size() * sizeof(BFloat16), cudaMemcpyDeviceToHost);
#endif
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::printf("%6g", std::bit_cast<float>(std::uint32_t{values[i]} << 16));
    if ((i + 1) % kN == 0) std::printf("\n");
  }
}

}  // namespace

int main() {
  using epiloq::DType;
  std::vector<std::int8_t> a(kM * kK), weight(kN * kK);
  for (std::int64_t m = 0; m < kM; ++m) std::fill_n(a.begin() + m * kK, kK, m + 1);
  for (std::int64_t n = 0; n < kN; ++n) std::fill_n(weight.begin() + n * kK, kK, n + 1);
  std::vector<float> scale_a{0.5F}, scale_b{0.25F};
  std::vector<BFloat16> out(kM * kN);

  epiloq::Device const device{has_gpu() ? epiloq::Device::Type::kCuda : epiloq::Device::Type::kCpu, 0};
  try {
    epiloq::ScaledMm const call{.out = {placed(out), DType::kBFloat16, device, {kM, kN}},
                                .a = {placed(a), DType::kInt8, device, {kM, kK}},
                                .b = epiloq::transposed({placed(weight), DType::kInt8, device, {kN, kK}}),
                                .scale_a = {placed(scale_a), DType::kFloat32, device, {1}},
                                .scale_b = {placed(scale_b), DType::kFloat32, device, {1}}};
    if (has_gpu()) {
      epiloq::scaled_mm(call, nullptr);  // on the default stream
    } else {
      epiloq::scaled_mm(call);
    }
    std::printf("D[m, n] = 2 (m + 1) (n + 1), by %s:\n", has_gpu() ? epiloq::explain(call).c_str() : "the CPU");
    print(call.out.as<BFloat16>());
  } catch (epiloq::Unsupported const& error) {
    std::printf("Unsupported: %s\n", error.what());
  }
}

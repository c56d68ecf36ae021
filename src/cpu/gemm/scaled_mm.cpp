// scaled_mm on the CPU: the epilogues of the kernels, after exact sums.

#include "cpu/gemm/scaled_mm.h"

#include <algorithm>

#include "core/threads.h"
#include "cpu/common/outputs.h"
#include "cpu/common/rows.h"
#include "cpu/gemm/float8.h"
#include "cpu/gemm/int8.h"
#include "cpu/isa/versions.h"
#include "epilogue/eval.h"

namespace epiloq::ops::scaled_mm {
namespace {

// A panel's sums and the epilogue operands of its columns.
template <class Sum>
struct Panel {
  static constexpr int kMost = PanelSums<Sum>::kMostColumns;

  gemm::Problem const& p;
  PanelSums<Sum> const& sums;
  float scale_b[kMost] = {}, bias[kMost] = {};
  std::int32_t azp_adj[kMost] = {};

  Panel(gemm::Problem const& problem, DType dtype, PanelSums<Sum> const& panel) : p(problem), sums(panel) {
    epilogue::Operands const& o = p.operands;
    for (int i = 0; i < sums.columns; ++i) scale_b[i] = o.scale_b[o.scale_b_is_vector ? sums.column + i : 0];
    if (o.bias != nullptr) read_row(o.bias, dtype, sums.column, sums.columns, bias);
    if (o.azp_adj != nullptr) std::copy_n(o.azp_adj + sums.column, sums.columns, azp_adj);
  }

  // Epilogue operands of a row of D: per column, or of the row.
  [[gnu::always_inline]] epilogue::Operands of_row(std::int64_t m) const {
    epilogue::Operands of_row = p.operands;
    if (of_row.scale_a_is_vector) of_row.scale_a += m;
    if (of_row.azp != nullptr && of_row.azp_is_vector) of_row.azp += m;
    of_row.scale_a_is_vector = of_row.azp_is_vector = false;
    of_row.scale_b = scale_b, of_row.scale_b_is_vector = true;
    if (of_row.bias != nullptr) of_row.bias = bias;
    if (of_row.azp_adj != nullptr) of_row.azp_adj = azp_adj;
    return of_row;
  }
};

// Applies the epilogue to a panel and stores it to D.
template <class Epilogue, class Sum, DType kOut>
struct Finish {
  using Value = std::conditional_t<kOut == DType::kInt8, std::int8_t, float>;

  template <int kLanes>
  struct Kernel {
    [[gnu::always_inline]] static void run(Panel<Sum> const& panel) {
      PanelSums<Sum> const sums = panel.sums;  // D is not part of it
      std::int64_t const stride_d = panel.p.stride_d;
      auto* d = static_cast<OutputElement<kOut>*>(panel.p.d) + sums.row * stride_d + sums.column;
      Sum const* row = sums.values;
      for (int i = 0; i < sums.count; ++i, row += sums.stride, d += stride_d) {
        auto const expr = Epilogue::template make<Value>(panel.of_row(sums.row + i));
        if (i + kRowsAhead < sums.count) expect_row(d + kRowsAhead * stride_d, sums.columns);
        for (int first = 0; first < sums.columns; first += kOutputBlock) {
          Value values[kOutputBlock];
          for (int j = 0; j < kOutputBlock; ++j) values[j] = epilogue::eval(expr, row[first + j], 0, first + j);
          put<kOut, kLanes>(values, sums.columns - first, d + first);
        }
      }
    }
  };
};

template <class Epilogue, class Sum, DType kOut>
void finish_as(Panel<Sum> const& panel) {
  static auto const run = Versions<Finish<Epilogue, Sum, kOut>::template Kernel, Panel<Sum> const&>::here();
  run(panel);
}

template <class Epilogue, class Sum>
void finish(gemm::Problem const& p, DType out, PanelSums<Sum> const& sums) {
  Panel<Sum> const panel(p, out, sums);
  if constexpr (std::is_same_v<typename Epilogue::Out, std::int8_t>) {
    finish_as<Epilogue, Sum, DType::kInt8>(panel);
  } else if (out == DType::kFloat16) {
    finish_as<Epilogue, Sum, DType::kFloat16>(panel);
  } else if (out == DType::kBFloat16) {
    finish_as<Epilogue, Sum, DType::kBFloat16>(panel);
  } else {
    finish_as<Epilogue, Sum, DType::kFloat32>(panel);
  }
}

// An operand [rows, k].
ScaledFloat8 matrix(void const* values, DType dtype, std::int64_t rows, std::int64_t k, std::int64_t stride) {
  return {static_cast<std::uint8_t const*>(values), rows, k, stride, dtype == DType::kFloat8E5M2};
}

// The epilogue of a call, of those for its types.
template <class Epilogues, class Sum>
void finish_with(Epilogues list, gemm::Problem const& p, DType out, PanelSums<Sum> const& sums) {
  epilogue::with_epilogue(list, p.operands, [&]<class Epilogue>() { finish<Epilogue>(p, out, sums); });
}

void multiply(gemm::Problem const& p, gemm::Types types, int threads) {
  if (types.inputs().is_float8()) {
    multiply_float8(matrix(p.a, types.a, p.m, p.k, p.stride_a), matrix(p.b, types.b, p.n, p.k, p.stride_b), threads,
                    [&](Float8Sums const& sums) { finish_with(epilogue::Float8Epilogues{}, p, types.out, sums); });
    return;
  }
  Int8Product const product{
      p.m,        p.n,       p.k, static_cast<std::int8_t const*>(p.a), static_cast<std::int8_t const*>(p.b),
      p.stride_a, p.stride_b};
  multiply_int8(product, threads, [&](Int8Sums const& sums) {
    if (types.out == DType::kInt8) {
      finish_with(epilogue::Int8OutEpilogues{}, p, types.out, sums);
    } else {
      finish_with(epilogue::Int8Epilogues{}, p, types.out, sums);
    }
  });
}

gemm::Problem of_batch(gemm::Problem const& p, DType out, std::int64_t batch) {
  gemm::Problem one = p;
  one.a = static_cast<char const*>(p.a) + batch * p.batch_a;
  one.b = static_cast<char const*>(p.b) + batch * p.batch_b;
  one.d = static_cast<char*>(p.d) + batch * p.batch_d * size_of(out);
  one.operands = p.operands.of_batch(batch);
  return one;
}

}  // namespace

void run_on_host(gemm::Problem const& p, gemm::Types types, int threads) {
  threads = threads_for_products(std::int64_t{p.batches} * p.m * p.n * p.k, threads);
  bool const by_batches = p.batches >= threads;  // each by one thread
  share(p.batches, by_batches ? threads : 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      multiply(of_batch(p, types.out, i), types, by_batches ? 1 : threads);
    }
  });
}

}  // namespace epiloq::ops::scaled_mm

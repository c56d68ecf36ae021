#pragma once

// The vocabulary of epilogues. An expression is a small tree over the accumulator (int32 or float); it carries its
// run-time pointers, and everything that computes an output element is made from it: the visitor trees of CUTLASS 2.x
// and 3.x (lower_sm80.h, lower_sm90.h) and plain evaluation on the host or in a hand-written kernel (eval.h).

#include <cstdint>
#include <tuple>

#ifdef __CUDACC__
#define EPILOQ_HD __host__ __device__
#else
#define EPILOQ_HD
#endif

namespace epiloq::epilogue {

struct Acc {};

// A 16-bit float whose format is known at run time: a kernel whose epilogue computes in float32 writes either.
struct Half {
  std::uint16_t bits;
};

// One value per column of D, and in a batch `batch_stride` values from one D's to the next's. A null pointer stands for
// `null_default` everywhere.
template <class T>
struct Row {
  T const* ptr = nullptr;
  bool is_vector = true;
  T null_default{};
  std::int64_t batch_stride = 0;
};

// One value per row of D.
template <class T>
struct Col {
  T const* ptr = nullptr;
  bool is_vector = true;
  T null_default{};
  std::int64_t batch_stride = 0;
};

// One value for all of D.
template <class T>
struct Scalar {
  T value;
};

struct Multiply {};
struct Divide {};
struct Subtract {};
struct MultiplyAdd {};
struct Clamp {};
struct Widen {  // a Half to float
  bool is_bfloat16;
};
struct Narrow {  // a float to the nearest Half, ties to even
  bool is_bfloat16;
};

// Children are converted to In, combined by Tag, and rounded to Out.
template <class Tag, class Out, class In, class... Kids>
struct Op {
  std::tuple<Kids...> kids;
  [[no_unique_address]] Tag tag{};
};

template <class Out, class In = Out, class A, class B>
EPILOQ_HD auto mul(A a, B b) {
  return Op<Multiply, Out, In, A, B>{{a, b}};
}
template <class Out, class In = Out, class A, class B>
EPILOQ_HD auto sub(A a, B b) {
  return Op<Subtract, Out, In, A, B>{{a, b}};
}
template <class Out, class In = Out, class A, class B>
EPILOQ_HD auto div(A a, B b) {
  return Op<Divide, Out, In, A, B>{{a, b}};
}
// a * b + c with one rounding
template <class Out, class In = Out, class A, class B, class C>
EPILOQ_HD auto fma(A a, B b, C c) {
  return Op<MultiplyAdd, Out, In, A, B, C>{{a, b, c}};
}
// min(max(a, lo), hi); NaN stays
template <class Out, class In = Out, class A, class Lo, class Hi>
EPILOQ_HD auto clamp(A a, Lo lo, Hi hi) {
  return Op<Clamp, Out, In, A, Lo, Hi>{{a, lo, hi}};
}
template <class A>
EPILOQ_HD auto widen(A a, bool is_bfloat16) {
  return Op<Widen, float, Half, A>{{a}, {is_bfloat16}};
}
template <class A>
EPILOQ_HD auto narrow(A a, bool is_bfloat16) {
  return Op<Narrow, Half, float, A>{{a}, {is_bfloat16}};
}

}  // namespace epiloq::epilogue

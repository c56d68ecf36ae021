#pragma once

namespace cutlass {

struct FastDivmod {
  int divisor = 1;
  FastDivmod() = default;
  explicit FastDivmod(int divisor_) : divisor(divisor_) {}
  void operator()(int& quotient, int& remainder, int dividend) const {
    quotient = dividend / divisor, remainder = dividend % divisor;
  }
};

}  // namespace cutlass

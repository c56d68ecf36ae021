#include "dispatch/weight_only_mm/cost/parameters.h"

#include "epiloq/error.h"

namespace epiloq::ops::weight_only_mm {
namespace {

// Calls act(name, number) for each number of `costs`.
template <class Costs_, class Act>
void for_each(Costs_& costs, Act const& act) {
  auto& [memory_efficiency, sm_load, start, latency, tensor, tensor_sustained, convert, store, cluster, dsmem,
         overlap] = costs.hardware;
  act("memory_efficiency", memory_efficiency);
  act("sm_load", sm_load);
  act("start", start);
  act("latency", latency);
  act("tensor", tensor);
  act("tensor_sustained", tensor_sustained);
  act("convert", convert);
  act("store", store);
  act("cluster", cluster);
  act("dsmem", dsmem);
  act("overlap", overlap);
  auto& [gemv, gemv_panel, integer_panel, copy, gemv_issue, gemv_sum, decode, decode_panel, decode_tokens] = costs.warp;
  act("gemv", gemv);
  act("gemv_panel", gemv_panel);
  act("integer_panel", integer_panel);
  act("copy", copy);
  act("gemv_issue", gemv_issue);
  act("gemv_sum", gemv_sum);
  act("decode", decode);
  act("decode_panel", decode_panel);
  act("decode_tokens", decode_tokens);
  auto const rows = [&act](char const* name, auto& factors) {
    int row = 0;
    for (auto& factor : factors) act(std::string(name) + "[" + std::to_string(row++) + "]", factor);
  };
  rows("factors.gemv", costs.factors.gemv);
  rows("factors.decode", costs.factors.decode);
  rows("factors.wgmma", costs.factors.wgmma);
}

}  // namespace

std::vector<std::pair<std::string, double>> parameters_of(Costs const& costs) {
  std::vector<std::pair<std::string, double>> all;
  for_each(costs, [&all](std::string const& name, double number) { all.emplace_back(name, number); });
  return all;
}

Costs with_parameters(std::vector<double> const& values) {
  Costs costs = kSm90Costs;
  std::size_t const count = parameters_of(costs).size();
  if (values.size() != count) {
    throw InvalidArgument("epiloq.weight_only_mm: parameters: expected " + std::to_string(count) + " numbers, got " +
                          std::to_string(values.size()));
  }
  std::size_t next = 0;
  for_each(costs, [&](std::string const&, double& number) { number = values[next++]; });
  return costs;
}

}  // namespace epiloq::ops::weight_only_mm

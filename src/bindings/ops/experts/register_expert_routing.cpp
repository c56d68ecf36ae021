#include "bindings/granularity.h"
#include "bindings/register.h"
#include "epiloq/expert_routing.h"

namespace epiloq::bindings {
namespace {

// Defines `name`, which launches a call that its arguments make, and `check_name`, which only checks it.
template <class Make, class Launch, class... Extra>
void define(py::module_& module, std::string const& name, Make make, Launch launch, Extra const&... extra) {
  module.def(name.c_str(), make(launch), extra...);
  module.def(("check_" + name).c_str(), make([](auto const& call, Stream) { check(call); }), extra...);
}

Stream stream_of(TensorArg const& tensor) {
  return tensor.view.device.type == Device::Type::kCuda ? current_stream(tensor) : nullptr;
}

ExpertScore parse_score(std::string const& text) {
  constexpr std::pair<char const*, ExpertScore> kScores[] = {{"softmax", ExpertScore::kSoftmax},
                                                             {"sigmoid", ExpertScore::kSigmoid},
                                                             {"softmax_of_chosen", ExpertScore::kSoftmaxOfChosen}};
  for (auto const& [name, score] : kScores) {
    if (text == name) return score;
  }
  throw InvalidArgument("epiloq.select_experts: score: expected softmax, sigmoid or softmax_of_chosen, got " + text);
}

}  // namespace

void register_expert_routing(py::module_& module) {
  define(
      module, "select_experts",
      [](auto act) {
        return [act](TensorArg const& weights, TensorArg const& experts, TensorArg const& logits,
                     std::optional<TensorArg> const& bias, std::string const& score, bool normalize, float epsilon,
                     float factor, int groups, int top_groups, int group_scores) {
          SelectExperts const call{weights.view, experts.view, logits.view, view_of(bias), parse_score(score),
                                   normalize,    epsilon,      factor,      groups,        top_groups,
                                   group_scores};
          act(call, stream_of(logits));
        };
      },
      &select_experts, py::arg("weights"), py::arg("experts"), py::arg("logits"), py::arg("bias"), py::arg("score"),
      py::arg("normalize"), py::arg("epsilon"), py::arg("factor"), py::arg("groups"), py::arg("top_groups"),
      py::arg("group_scores"));
  define(
      module, "sort_expert_rows",
      [](auto act) {
        return [act](TensorArg const& order, TensorArg const& tokens, TensorArg const& places, TensorArg const& ends,
                     TensorArg const& experts) {
          act(SortExpertRows{order.view, tokens.view, places.view, ends.view, experts.view}, stream_of(experts));
        };
      },
      &sort_expert_rows, py::arg("order"), py::arg("tokens"), py::arg("places"), py::arg("ends"), py::arg("experts"));
  define(
      module, "gather_expert_rows",
      [](auto act) {
        return [act](TensorArg const& rows, TensorArg const& scale, TensorArg const& tokens, TensorArg const& places,
                     TensorArg const& ends, TensorArg const& x, TensorArg const& experts,
                     std::string const& granularity, int group_size) {
          act(GatherExpertRows{rows.view, scale.view, tokens.view, places.view, ends.view, x.view, experts.view,
                               parse_granularity("gather_expert_rows", granularity), group_size},
              stream_of(x));
        };
      },
      &gather_expert_rows, py::arg("rows"), py::arg("scale"), py::arg("tokens"), py::arg("places"), py::arg("ends"),
      py::arg("x"), py::arg("experts"), py::arg("granularity"), py::arg("group_size"));
  define(
      module, "combine_expert_rows",
      [](auto act) {
        return [act](TensorArg const& out, TensorArg const& rows, TensorArg const& places, TensorArg const& weights,
                     std::optional<TensorArg> const& count) {
          act(CombineExpertRows{out.view, rows.view, places.view, weights.view, view_of(count)}, stream_of(rows));
        };
      },
      &combine_expert_rows, py::arg("out"), py::arg("rows"), py::arg("places"), py::arg("weights"), py::arg("count"));
}

}  // namespace epiloq::bindings

#pragma once

// The state of torch around a call: modes, transforms, gradients, autocast. _core links no torch library, so this
// calls torch's Python functions, which epiloq._torch.calls passes once. Everything requires the GIL.

#include "bindings/dlpack.h"

namespace epiloq::bindings {

// Whether a tensor's values are those of its memory: of no other subclass than parameters, strided, not lazily negated.
bool is_plain(py::handle tensor);

// Whether a tensor is nested, which one with a strided layout may be, too.
bool is_nested(py::handle tensor);

// Whether a mode, a transform, a tracer or a forward derivative of torch is active, so that torch must be called.
bool is_watched();

bool grad_enabled();
bool requires_grad(py::handle tensor);
bool autocast_enabled();

// Whether this process was forked and has not called torch's threads yet (epiloq._torch.threads).
bool is_forked();

// Number of torch's threads for a product on the CPU.
int threads();

// Calls run(call, stream) for x's device; on the CPU with torch's number of threads and without the GIL.
template <class Call, class Run>
void run_with_threads(Call call, TensorArg const& x, Run const& run) {
  Stream const stream = current_stream(x);
  std::optional<py::gil_scoped_release> released;
  if (x.view.device.type == Device::Type::kCpu) {
    call.threads = threads();
    released.emplace();
  }
  run(call, stream);
}

std::int64_t version_of(py::handle tensor);

// Whether a tensor has a last dimension, and no more of them than a view holds.
inline bool has_rows(TensorView const& view) { return view.rank > 0 && view.rank <= TensorView::kMaxRank; }

// A new tensor of x's type, on its device, with its shape but `columns` in the last dimension.
py::object new_rows(py::handle x, TensorView const& view, std::int64_t columns);

}  // namespace epiloq::bindings

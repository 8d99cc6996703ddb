// The launch as a torch op. The host checks are in kernels/predictions.py.
#include "common/bindings.h"
#include "predictions/predictions.h"

namespace {

using namespace twell;

void loss_and_entropy(const Tensor& logits, const Tensor& ids, const Tensor& out) {
  const DeviceGuard guard(logits.get_device_index());
  by_type(logits, [&]<typename T>() {
    predictions::launch<T>(address(logits), as<int64_t>(ids), as<float>(out), logits.size(0),
                           static_cast<int>(logits.size(1)), stream_of(logits));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(twell, m) { m.def("loss_and_entropy(Tensor logits, Tensor ids, Tensor(a!) out) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(twell, CUDA, m) { m.impl("loss_and_entropy", TORCH_BOX(&loss_and_entropy)); }

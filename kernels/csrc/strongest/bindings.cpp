// The launch as a torch op. The host checks are in kernels/strongest.py.
#include "common/bindings.h"
#include "strongest/strongest.h"

namespace {

using namespace twell;

void keep(const Tensor& hidden, const Tensor& left, double share, int64_t least) {
  const DeviceGuard guard(hidden.get_device_index());
  strongest::launch(address(hidden), address(left), hidden.size(0), static_cast<int>(hidden.size(1)),
                    static_cast<float>(share), static_cast<int>(least), stream_of(hidden));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(twell, m) {
  m.def("strongest(Tensor hidden, Tensor(a!) left, float share, int least) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(twell, CUDA, m) { m.impl("strongest", TORCH_BOX(&keep)); }

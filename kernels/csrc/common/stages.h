// The stages of a GPU call, as bits that add up. `Stage` in kernels/backends/gpu.py has the same names and values.
#pragma once

#include <stdint.h>

namespace twell {

enum class Stage : int64_t {
  kGate = 1,     // the gate product and its TwELL; without a plan on Hopper, the up product as well
  kPlan = 2,     // each block's union; without a plan on Hopper, TwELL's words where somebody wants them
  kUp = 4,       // the up product over the unions
  kDown = 8,     // the down product over the unions
  kCounts = 16,  // the probes: nnz (`cuda`), histograms and the neurons' sums
  kPack = 32,    // TwELL of the layout that was requested (`cuda`)
  // no stages: each turns a choice of hopper/dispatch.h around, so that one process can time both ways
  kLeaveDense = 64,
  kNextWave = 128,
  kWideGroups = 256,
};

// The stages to launch: any sum of the above.
struct StageSet {
  int64_t bits;
  bool has(Stage stage) const { return bits & static_cast<int64_t>(stage); }
};

}  // namespace twell

#include "hopper/backward/compact/at_once.cuh"

#include "hopper/backward/bias_sums.cuh"

namespace twell::hopper {

namespace {

using T = TWELL_T;

template <Whole kWhole, typename Out>
void launch_whole(const WholeMaps& maps, const CompactBackward& b, cudaStream_t stream) {
  launch_overlapping(whole_product<T, Out, kWhole>, multiprocessors() / 2 * 2, kThreads, kWholeSharedBytes, 2, stream,
                     maps, b);
}

}  // namespace

template <>
void launch_at_once<T>(const CompactBackward& b, cudaStream_t stream) {
  char* const arena = static_cast<char*>(b.chunks);
  const int64_t matrix = static_cast<int64_t>(b.rows) * b.d_ff * sizeof(T);
  char* const kept = reinterpret_cast<char*>(b.kept.whole);
  // the first matrix is g, and du in its place; in a plain FFN h
  char *const first = arena, *const dg = arena + (b.plain || kept != nullptr ? 1 : 2) * matrix;
  char* const h = b.plain ? first : (kept != nullptr ? kept : arena) + matrix;
  // boxes of 64 columns: of the rows of a tile, of half of its columns, or of 64 rows
  const auto tall = [&](const void* of, int height, int width) { return tensor_map<T>(of, height, width, kTileM); };
  const auto box = [&](const void* of, int height, int width) { return tensor_map<T>(of, height, width, kBox); };
  static_assert(kTileM == kTileN / 2);
  launch_overlapping(choose_dense, 1, kChooseThreads, 0, 1, stream, b);
  const CUtensorMap x = tall(b.x, b.rows, b.d_model), dy = tall(b.dy, b.rows, b.d_model);
  const CUtensorMap first_box = box(first, b.rows, b.d_ff), h_box = box(h, b.rows, b.d_ff),
                    dg_box = box(dg, b.rows, b.d_ff);
  WholeMaps maps{};
  maps.kept = kept != nullptr ? box(kept, b.rows, b.d_ff) : first_box;
  maps.a[0] = x, maps.b[0] = tall(b.w_gate, b.d_ff, b.d_model), maps.out[0] = first_box;
  launch_whole<Whole::kGate, T>(maps, b, stream);
  maps.b[0] = tall(b.w_up, b.d_ff, b.d_model), maps.in[0] = first_box, maps.out[0] = h_box;
  if (!b.plain) launch_whole<Whole::kUp, T>(maps, b, stream);
  maps.a[0] = dy, maps.b[0] = tall(b.w_down, b.d_ff, b.d_model), maps.in[0] = first_box, maps.in[1] = h_box;
  maps.out[0] = first_box, maps.out[1] = dg_box;
  launch_whole<Whole::kDh, T>(maps, b, stream);
  maps.a[0] = tall(first, b.rows, b.d_ff), maps.a[1] = tall(dg, b.rows, b.d_ff);
  maps.b[0] = box(b.w_up, b.d_ff, b.d_model), maps.b[1] = box(b.w_gate, b.d_ff, b.d_model);
  launch_whole<Whole::kDx, T>(maps, b, stream);
  maps.a[0] = first_box, maps.a[1] = dg_box, maps.a[2] = h_box;
  maps.b[0] = maps.b[1] = box(b.x, b.rows, b.d_model), maps.b[2] = box(b.dy, b.rows, b.d_model);
  b.float_weights ? launch_whole<Whole::kWeights, float>(maps, b, stream)
                  : launch_whole<Whole::kWeights, T>(maps, b, stream);
  if (b.d_b_up != nullptr)
    launch_column_sums<T>({first, b.d_b_up, b.rows, b.d_ff, b.float_weights, nullptr, b.fits, kAtOnce}, stream);
  if (b.d_b_gate != nullptr)
    launch_column_sums<T>({dg, b.d_b_gate, b.rows, b.d_ff, b.float_weights, nullptr, b.fits, kAtOnce}, stream);
}

}  // namespace twell::hopper

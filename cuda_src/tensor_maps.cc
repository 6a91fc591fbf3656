#include "cuda_src/tensor_maps.h"

#include "cuda_src/driver.h"
#include "cuda_src/element.h"

namespace jax_flash {
namespace {

// A [batch, time, heads, dim] array.
struct Array {
  const void* data;
  int64_t batch, time, heads, dim;
};
Array OfQueries(const Problem& p, const void* data, int64_t dim) { return {data, p.batch, p.q_len, p.q_heads, dim}; }
// The rows of all heads of a group, if there is one group.
Array OfPackedQueries(const Problem& p, const void* data, int64_t dim) {
  return {data, p.batch, p.q_len * p.q_heads, 1, dim};
}
Array OfKeys(const Problem& p, const void* data, int64_t dim) {
  if (p.page > 0) return {data, 1, p.pages * p.page, p.kv_heads, dim};
  return {data, p.batch, p.kv_len, p.kv_heads, dim};
}

// Elements outside the array are loaded as zeros.
TensorMap Encoded(const void* data, int type, const uint64_t (&sizes)[4], const uint64_t (&strides)[3],
                  uint32_t box_columns, int box_rows) {
  constexpr int kNoInterleave = 0, kSwizzle128 = 3, kPromoteL2To128 = 2, kZeros = 0;
  const uint32_t box[] = {box_columns, uint32_t(box_rows), 1, 1}, steps[] = {1, 1, 1, 1};
  TensorMap map = {};
  Check(CudaDriver().cuTensorMapEncodeTiled(&map, type, 4, const_cast<void*>(data), sizes, strides, box, steps,
                                            kNoInterleave, kSwizzle128, kPromoteL2To128, kZeros),
        "cuTensorMapEncodeTiled");
  return map;
}

// A map with swizzled boxes of `rows` x kBoxBytes. `type` is one of Element's. Gradients that are not requested have no
// map.
TensorMap MapOf(const Problem& p, const Array& array, int type, int rows) {
  if (!array.data) return {};
  const uint64_t bytes = ElementOf(p.dtype).bytes, time = array.time, heads = array.heads, dim = array.dim;
  const uint64_t sizes[] = {dim, time, heads, uint64_t(array.batch)};
  const uint64_t strides[] = {heads * dim * bytes, dim * bytes, time * heads * dim * bytes};
  return Encoded(array.data, type, sizes, strides, uint32_t(kBoxBytes / bytes), rows);
}

// The map of a bias with all rows and columns, or of its gradient, with boxes of `rows` x kBoxBytes.
TensorMap BiasMapOf(const Problem& p, const void* data, int rows) {
  const Element element = ElementOf(p.score.bias_dtype);
  const uint64_t bytes = element.bytes, q_len = p.q_len, kv_len = p.kv_len, heads = p.score.bias.heads ? p.q_heads : 1;
  const uint64_t sizes[] = {kv_len, q_len, heads, p.score.bias.batch ? uint64_t(p.batch) : 1};
  const uint64_t strides[] = {kv_len * bytes, q_len * kv_len * bytes, heads * q_len * kv_len * bytes};
  return Encoded(data, element.map_type, sizes, strides, uint32_t(kBoxBytes / bytes), rows);
}

// The maps that all these kernels have for tiles of S, with `query_rows` rows of Q at a time.
template <typename AnyMaps>
AnyMaps TileMapsOf(const Problem& p, const Params& x, const KernelTiling& tiling, int query_rows) {
  const int type = ElementOf(p.dtype).loaded_type;
  AnyMaps maps = {};
  maps.query = MapOf(p, OfQueries(p, x.query, p.qk_dim), type, query_rows);
  maps.key = MapOf(p, OfKeys(p, x.key, p.qk_dim), type, tiling.cols);
  maps.value = MapOf(p, OfKeys(p, x.value, p.v_dim), type, tiling.cols);
  return maps;
}

}  // namespace

ForwardMaps ForwardMapsOf(const Problem& p, const Params& x, const KernelTiling& tiling) {
  ForwardMaps maps = TileMapsOf<ForwardMaps>(p, x, tiling, kBoxRows);
  if (tiling.packed > 0)
    maps.query = MapOf(p, OfPackedQueries(p, x.query, p.qk_dim), ElementOf(p.dtype).loaded_type, kBoxRows);
  if (tiling.bias_tiles) maps.bias = BiasMapOf(p, x.bias.data, tiling.rows);
  if (p.output_dtype() == p.dtype) maps.o = MapOf(p, OfQueries(p, x.o, p.v_dim), ElementOf(p.dtype).map_type, kBoxRows);
  return maps;
}

BackwardMaps BackwardMapsOf(const Problem& p, const Params& x, const KernelTiling& tiling) {
  const Element element = ElementOf(p.dtype);
  BackwardMaps maps = TileMapsOf<BackwardMaps>(p, x, tiling, tiling.rows);
  if (tiling.bias_tiles) maps.bias = BiasMapOf(p, x.bias.data, tiling.rows);
  maps.d_o = MapOf(p, OfQueries(p, x.d_o, p.v_dim), element.loaded_type, tiling.rows);
  maps.dk = MapOf(p, OfKeys(p, x.dk, p.qk_dim), element.map_type, kBoxRows);
  maps.dv = MapOf(p, OfKeys(p, x.dv, p.v_dim), element.map_type, kBoxRows);
  if (tiling.fused_rows) {
    maps.o_rows = MapOf(p, OfQueries(p, x.o, p.v_dim), element.map_type, kFusedBoxRows);
    maps.d_o_rows = MapOf(p, OfQueries(p, x.d_o, p.v_dim), element.loaded_type, kFusedBoxRows);
  }
  if (tiling.fused_rows || IsWide(p.qk_dim) || IsWide(p.v_dim))
    maps.dq_rows = MapOf(p, OfQueries(p, x.dq, p.qk_dim), element.map_type, kFusedBoxRows);
  return maps;
}

BackwardBiasMaps BackwardBiasMapsOf(const Problem& p, const Params& x, const KernelTiling& tiling) {
  BackwardBiasMaps maps = TileMapsOf<BackwardBiasMaps>(p, x, tiling, tiling.rows);
  maps.d_o = MapOf(p, OfQueries(p, x.d_o, p.v_dim), ElementOf(p.dtype).loaded_type, tiling.rows);
  if (tiling.bias_tiles) {
    maps.bias = BiasMapOf(p, x.bias.data, tiling.rows);
    maps.dbias = BiasMapOf(p, x.dbias, tiling.rows);
  }
  return maps;
}

TangentMaps TangentMapsOf(const Problem& p, const TangentParams& x, const KernelTiling& tiling) {
  const int type = ElementOf(p.dtype).loaded_type;
  TangentMaps maps = TileMapsOf<TangentMaps>(p, x, tiling, kBoxRows);
  maps.query_tangent = MapOf(p, OfQueries(p, x.query_tangent, p.qk_dim), type, kBoxRows);
  maps.key_tangent = MapOf(p, OfKeys(p, x.key_tangent, p.qk_dim), type, tiling.cols);
  maps.value_tangent = MapOf(p, OfKeys(p, x.value_tangent, p.v_dim), type, tiling.cols);
  return maps;
}

}  // namespace jax_flash

#include "cuda_src/tensor_maps.h"

#include "cuda_src/driver.h"
#include "cuda_src/element.h"

namespace jax_flash {
namespace {

// A [batch, time, heads, dim] array.
struct Array {
  const void* data;
  int64_t time, heads, dim;
};
Array OfQueries(const Problem& p, const void* data, int64_t dim) { return {data, p.q_len, p.q_heads, dim}; }
Array OfKeys(const Problem& p, const void* data, int64_t dim) { return {data, p.kv_len, p.kv_heads, dim}; }

// A map with boxes of `rows` x kBoxBytes, swizzled; `type`: one of Element's. Zeros for a gradient that nobody asked
// for.
TensorMap MapOf(const Problem& p, const Array& array, int type, int rows) {
  TensorMap map = {};
  if (!array.data) return map;
  constexpr int kNoInterleave = 0, kSwizzle128 = 3, kPromoteL2To128 = 2, kZeros = 0;
  const uint64_t bytes = ElementOf(p.dtype).bytes, time = array.time, heads = array.heads, dim = array.dim;
  const uint64_t sizes[] = {dim, time, heads, uint64_t(p.batch)};
  const uint64_t strides[] = {heads * dim * bytes, dim * bytes, time * heads * dim * bytes};
  const uint32_t box[] = {uint32_t(kBoxBytes / bytes), uint32_t(rows), 1, 1}, steps[] = {1, 1, 1, 1};
  Check(CudaDriver().cuTensorMapEncodeTiled(&map, type, 4, const_cast<void*>(array.data), sizes, strides, box, steps,
                                            kNoInterleave, kSwizzle128, kPromoteL2To128, kZeros),
        "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace

ForwardMaps ForwardMapsOf(const Problem& p, const Params& x, const KernelTiling& tiling) {
  const Element element = ElementOf(p.dtype);
  ForwardMaps maps;
  maps.query = MapOf(p, OfQueries(p, x.query, p.qk_dim), element.loaded_type, kBoxRows);
  maps.key = MapOf(p, OfKeys(p, x.key, p.qk_dim), element.loaded_type, tiling.cols);
  maps.value = MapOf(p, OfKeys(p, x.value, p.v_dim), element.loaded_type, tiling.cols);
  maps.o = MapOf(p, OfQueries(p, x.o, p.v_dim), element.map_type, kBoxRows);
  return maps;
}

BackwardMaps BackwardMapsOf(const Problem& p, const Params& x, const KernelTiling& tiling) {
  const Element element = ElementOf(p.dtype);
  BackwardMaps maps = {};
  maps.query = MapOf(p, OfQueries(p, x.query, p.qk_dim), element.loaded_type, tiling.rows);
  maps.key = MapOf(p, OfKeys(p, x.key, p.qk_dim), element.loaded_type, tiling.cols);
  maps.value = MapOf(p, OfKeys(p, x.value, p.v_dim), element.loaded_type, tiling.cols);
  maps.d_o = MapOf(p, OfQueries(p, x.d_o, p.v_dim), element.loaded_type, tiling.rows);
  maps.dk = MapOf(p, OfKeys(p, x.dk, p.qk_dim), element.map_type, kBoxRows);
  maps.dv = MapOf(p, OfKeys(p, x.dv, p.v_dim), element.map_type, kBoxRows);
  if (tiling.alongside) {
    maps.o_rows = MapOf(p, OfQueries(p, x.o, p.v_dim), element.map_type, kAlongsideRows);
    maps.d_o_rows = MapOf(p, OfQueries(p, x.d_o, p.v_dim), element.loaded_type, kAlongsideRows);
    maps.dq_rows = MapOf(p, OfQueries(p, x.dq, p.qk_dim), element.map_type, kAlongsideRows);
  }
  return maps;
}

}  // namespace jax_flash

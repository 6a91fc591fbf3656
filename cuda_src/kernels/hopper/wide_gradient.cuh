// The Hopper backward for head dims above 256: one kernel for each gradient, so nothing is added in memory. A CTA keeps
// 64 lines: rows of Q and dO for dQ, or keys (rows of K and V) for dK and dV. It loops over tiles of the other side:
//   dQ:  S = Q K_j^T;      dP = dO V_j^T;      dS = P (dP - D);        dQ += dS K_j
//   dK:  S^T = K Q_i^T;    dP^T = V dO_i^T;    dS^T = P^T (dP^T - D_i);    dK += dS^T Q_i
//   dV:  S^T = K Q_i^T;    P^T = exp(S^T - L_i);                       dV += P^T dO_i
// These are 8 products instead of 5, but registers have room for only one gradient of 64 lines. Below, X and Y are the
// resident operands of S and dP, A is dS or P, and dX is the gradient.
//
// Roles. Each of two consumer warpgroups has half of the columns of dX. They compute A of alternate tiles, and both
// need every A. The owner of a tile multiplies A from registers, and hands it over to the other warpgroup. So one
// warpgroup computes exponentials while the other multiplies.
//
// Shared memory. X and Y stay. All other operands pass through one ring of boxes, in the order in which they are
// multiplied: S and dP of tile t, then dX of tile t - 1. A box that is used twice is loaded twice.
//
// Clusters. Two CTAs of a cluster have neighbouring lines and visit the same tiles. Each loads every other box for both
// (multicast).
#pragma once

#include "hopper/wide_gradient_producer.cuh"
#include "ptx/wgmma.cuh"
#include "semantics/tile_mask.cuh"

namespace jax_flash::hopper::wide_gradient {

constexpr int kQKSteps = (kQKDim + kStep - 1) / kStep, kVSteps = (kVDim + kStep - 1) / kStep;

// Registers per thread.
template <Gradient kOf>
constexpr int kProducerRegisters = Arrays<kOf>::kDS ? 40 : 56;
template <Gradient kOf>
constexpr int kConsumerRegisters = (504 - kProducerRegisters<kOf>) / kConsumers;

// Named barriers. The last two names are the first of two: one for each warpgroup. __syncthreads uses 0.
enum NamedBarrier { kConsumersBarrier = 1, kWarpgroupBarrier = 2, kHandover = kWarpgroupBarrier + kConsumers };

// A consumer warpgroup. A lane has two of its lines: Line and Line + 8.
template <Gradient kOf>
struct Consumer {
  using Of = Arrays<kOf>;
  const Params& p;
  Shared<kOf>& shared;
  const int rank = Uniform(ClusterRank());
  const int warpgroup = Uniform(threadIdx.x / kWarpgroup - 1);
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
  const float to_log2;
  uint32_t resident_parity = 0;
  RingInTurns<Of::kSlots> ring;
  int held = 0;  // the slot of the last product, until it is released

  float S[kLines / 2], dP[kLines / 2], dX[Of::kHalfBoxes][kBoxColumns / 2];
  uint32_t A[kLines / 4];

  __device__ __forceinline__ Consumer(const Params& p, Shared<kOf>& shared)
      : p(p), shared(shared), to_log2(ToLog2(p)) {}

  __device__ __forceinline__ int FirstLine(const Item& item) const { return item.line + kLines * rank; }
  __device__ __forceinline__ int Line(const Item& item) const { return FirstLine(item) + 16 * warp + lane / 4; }
  __device__ __forceinline__ void SyncWarpgroup() { BarrierSync(kWarpgroupBarrier + warpgroup, kWarpgroup); }

  // Releases a slot in both CTAs, which load it.
  __device__ __forceinline__ void Release(int slot) {
    const bool arrives = ArrivesForWarp(lane);
    MbarrierArrive(&shared.empty[slot], arrives);
    if constexpr (kCluster > 1) PeerArrive(&shared.empty[slot], arrives);
  }

  // Starts `product` with the next slot. Releases the slot before, if there is one.
  template <typename Product>
  __device__ __forceinline__ void MultiplySlot(bool is_first, Product product) {
    const Slot slot{shared.slots[Uniform(ring.index)]};  // uniform, so its descriptors need few instructions
    ring.Wait(shared.full[warpgroup]);
    WgmmaFence();
    product(slot);
    WgmmaCommit();
    if (!is_first) {
      WgmmaWait<1>();
      Release(held);
    }
    held = ring.index;
    ring.Next();
  }
  __device__ __forceinline__ void FinishProducts() {
    WgmmaWait<0>();
    Release(held);
  }

  // Starts C = B R^T. R is streamed.
  template <int kBoxes, int kSteps>
  __device__ __forceinline__ void Multiply(float (&C)[kLines / 2], SharedTile<kLines, kBoxes> resident, bool is_first) {
    const auto a = resident.KMajor();
#pragma unroll
    for (int b = 0; b < kBoxes; b += kSlotBoxes) {
      MultiplySlot(is_first && b == 0, [&](Slot slot) {
        const auto rows = slot.KMajor();
#pragma unroll
        for (int i = 0; i < 4 * kSlotBoxes && 4 * b + i < kSteps; ++i)
          Wgmma<kLines>::template SS<Major::kK, Major::kK>(C, a.KStep(i, b), rows.KStep(i), b > 0 || i > 0);
      });
    }
  }

  // Starts S = X R^T and dP = Y R^T.
  __device__ __forceinline__ void IssueScores() {
    const SharedTile<kLines, Of::kSBoxes> x{shared.resident};
    Multiply<Of::kSBoxes, kQKSteps>(S, x, true);
    if constexpr (Of::kDS)
      Multiply<Of::kDPBoxes, kVSteps>(dP, SharedTile<kLines, Of::kDPBoxes>{x.Box(Of::kSBoxes)}, false);
  }

  // Starts dX += A R, with A from registers, or from shared memory after the owner has handed it over. The slots of the
  // owner and of the other warpgroup alternate.
  template <bool kOwner>
  __device__ __forceinline__ void IssueGradient(bool is_first) {
    const auto a = Box{shared.operand}.KMajor();
    if (!kOwner) BarrierSync(kHandover + 1 - warpgroup, kConsumers * kWarpgroup);
#pragma unroll
    for (int first = 0; first < Of::kHalfBoxes; first += kSlotBoxes) {
      if (!kOwner) ring.Next();
      MultiplySlot(is_first && first == 0, [&](Slot slot) {
        const auto rows = slot.MNMajorBox(0);
#pragma unroll
        for (int b = 0; b < kSlotBoxes && first + b < Of::kHalfBoxes; ++b) {
#pragma unroll
          for (int i = 0; i < kLines / kStep; ++i)
            if constexpr (kOwner) {
              Wgmma<kBoxColumns>::template RS<Major::kMN>(dX[first + b], A + 4 * i, rows.KStep(i, b), true);
            } else {
              Wgmma<kBoxColumns>::template SS<Major::kK, Major::kMN>(dX[first + b], a.KStep(i), rows.KStep(i, b), true);
            }
        }
      });
      if (kOwner) ring.Next();
    }
  }

  __device__ __forceinline__ void PinGradient() {
#pragma unroll
    for (int b = 0; b < Of::kHalfBoxes; ++b) Pin(dX[b]);
  }

  // Gives A to the other warpgroup. A single buffer suffices, because this warpgroup has multiplied the other one's A
  // before.
  __device__ __forceinline__ void HandOver() {
#pragma unroll
    for (int i = 0; i < kLines / 16; ++i)
      Stmatrix(MatricesOf(shared.operand + 16 * warp * kBoxBytes, lane, i), A[4 * i], A[4 * i + 1], A[4 * i + 2],
               A[4 * i + 3]);
    FenceProxyAsync();
    BarrierArrive(kHandover + warpgroup, kConsumers * kWarpgroup);
  }

  // Sets masked entries of S to -inf.
  __device__ __forceinline__ void Mask(const Item& item, int q_head, const View<Of::kTransposed>& view) {
    const Positions positions = PositionsOf(p, item.batch);
    if constexpr (kMasksInMemory) {
      TileMask<Of::kTransposed, kLines> mask;
      mask.Intersect(positions, Entries(p, item.batch, q_head), view);
      mask.Apply(S);
    } else {
      MaskOutside(positions, view, S);
    }
  }

  // The address of an entry of L or D.
  __device__ __forceinline__ const float* Statistic(const float* of, const Item& item, int q_head, int row) const {
    return of + (int64_t(item.batch) * p.q_heads + q_head) * PaddedRows(p) + row;
  }

  // Computes A from S and dP.
  __device__ __forceinline__ void ComputeOperand(const Item& item, const Place& place) {
    constexpr bool kMayBeNaN = kSoftCap || kEmptyRows || kProblem.kv_lengths;  // where P is 0
    const int line = Line(item), other = place.tile * kLines + lane % 4 * 2;
    const int q_head = Of::kTransposed ? place.head : item.head;
    SoftCapTanh(p, S);
    if (IsMasked(item, place.tile))
      Mask(item, q_head, Of::kTransposed ? View<Of::kTransposed>{other, line} : View<Of::kTransposed>{line, other});
    const float* const minus_l = Statistic(p.logsumexp, item, q_head, Of::kTransposed ? other : line);
    const float* const d = Statistic(p.d, item, q_head, Of::kTransposed ? other : line);
    float2 L = {}, D = {};  // of two rows
    if constexpr (!Of::kTransposed) L = {minus_l[0], minus_l[8]}, D = {d[0], d[8]};
#pragma unroll
    for (int c = 0; c < kLines / 8; ++c) {
      if constexpr (Of::kTransposed) {
        L = *reinterpret_cast<const float2*>(minus_l + 8 * c);
        if (Of::kDS) D = *reinterpret_cast<const float2*>(d + 8 * c);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 4 * c + 2 * h + e;
          const bool first = (Of::kTransposed ? e : h) == 0;
          float P = Exp2(fmaf(S[i], to_log2, first ? L.x : L.y));
          if (kEmptyRows && (first ? L.x : L.y) == -Infinity()) P = 0.0f;
          x[e] = P;
          if constexpr (Of::kDS) {
            x[e] *= dP[i] - (first ? D.x : D.y);
            if (kSoftCap) x[e] *= SlopeOf(S[i]);
            if (kMayBeNaN && P == 0.0f) x[e] = 0.0f;
          }
        }
        A[2 * c + h] = Pack(x[0], x[1]);
      }
    }
  }

  // Adds tile t, after the other warpgroup's tile before it.
  __device__ __forceinline__ void AddTile(const Item& item, const Place& place, int t, bool last) {
    IssueScores();
    if (t > 0) IssueGradient<false>(false);
    FinishProducts();
    Pin(S);
    if constexpr (Of::kDS) Pin(dP);
    PinGradient();
    ComputeOperand(item, place);
    HandOver();
    if (!last) SkipScores();
    IssueGradient<true>(true);
    FinishProducts();
    PinGradient();
  }
  // Skips the slots of the other warpgroup's S and dP.
  __device__ __forceinline__ void SkipScores() { ring.template Next<SlotsOf(Of::kSBoxes) + SlotsOf(Of::kDPBoxes)>(); }

  // Computes an item. Returns false at the end.
  __device__ __forceinline__ bool ComputeItem(const TensorMap* map) {
    MbarrierWait(&shared.resident_full, resident_parity);
    resident_parity ^= 1;
    const Item& item = shared.item;  // it stays in shared memory to save registers
    if (Uniform(item.line) < 0) return false;
#pragma unroll
    for (int b = 0; b < Of::kHalfBoxes; ++b) {
#pragma unroll
      for (int i = 0; i < kBoxColumns / 2; ++i) dX[b][i] = 0.0f;
    }
    const int tiles = Uniform(TilesOf<Of::kTransposed>(p, item));
    if (warpgroup == 1 && tiles > 0) SkipScores();
    Place place = FirstPlace<Of::kTransposed>(p, item);
    if (warpgroup == 1) place.Next(item);
    for (int t = warpgroup; t < tiles; t += 2) {
      AddTile(item, place, t, t + 1 == tiles);
      place.Next(item), place.Next(item);
    }
    if (tiles > 0 && (tiles - 1) % 2 != warpgroup) {  // the last tile is the other warpgroup's
      IssueGradient<false>(true);
      FinishProducts();
      PinGradient();
    }
    Write(item, map);
    return true;
  }

  // Writes dX, through the memory of X and Y.
  __device__ __forceinline__ void Write(const Item& item, const TensorMap* map) {
    constexpr int kStoredRows = Of::kTransposed ? kBoxRows : kFusedBoxRows;  // of a box of the map
    const SharedTile<kLines, 2 * Of::kHalfBoxes> to{shared.resident};
    const float scale = Of::kDS ? ScaleOf(p) : 1.0f;
    BarrierSync(kConsumersBarrier, kConsumers * kWarpgroup);  // both have multiplied by X and Y
#pragma unroll
    for (int i = 0; i < 4 * Of::kHalfBoxes; ++i) {
      const float* const x = dX[i / 4] + i % 4 * 8;
      Stmatrix(MatricesOf(to.Box(warpgroup * Of::kHalfBoxes + i / 4) + 16 * warp * kBoxBytes, lane, i % 4),
               Pack(x[0] * scale, x[1] * scale), Pack(x[2] * scale, x[3] * scale), Pack(x[4] * scale, x[5] * scale),
               Pack(x[6] * scale, x[7] * scale));
    }
    FenceProxyAsync();
    SyncWarpgroup();
    if (threadIdx.x % kWarpgroup > 0) return;
#pragma unroll 1
    for (int b = warpgroup * Of::kHalfBoxes; b < (warpgroup + 1) * Of::kHalfBoxes; ++b) {
      for (int r = 0; b * kBoxColumns < Of::kDim && r < kLines; r += kStoredRows)
        TmaStore(map, to.Box(b) + r * kBoxBytes, b * kBoxColumns, FirstLine(item) + r, item.head, item.batch);
    }
    TmaCommit();
    TmaWaitRead<0>();
    MbarrierArrive(&shared.resident_empty);
  }
};

// Runs a CTA of the kernel for one gradient. X, Y: its resident arrays; the streamed ones are the same for the other
// side.
template <Gradient kOf>
__device__ __forceinline__ void Run(const Params& p, uint8_t* memory, const TensorMap* x, const TensorMap* y,
                                    const TensorMap* with_x, const TensorMap* with_y, const TensorMap* factor,
                                    const TensorMap* gradient) {
  Shared<kOf>& shared = *reinterpret_cast<Shared<kOf>*>(memory);
  if (threadIdx.x == 0) {
    MbarrierInit(&shared.resident_full, 1);
    MbarrierInit(&shared.resident_empty, kConsumers);
    for (int s = 0; s < Arrays<kOf>::kSlots; ++s) {
      MbarrierInit(&shared.full[0][s], 1), MbarrierInit(&shared.full[1][s], 1);
      MbarrierInit(&shared.empty[s], ArrivalsOf(4 * kCluster));  // one warpgroup of each CTA
    }
    MbarrierInit(&shared.uncleared, 1);
    FenceMbarrierInit();
  }
  ClusterSync();
  if (threadIdx.x < kWarpgroup) {
    SetMaxRegistersDown<kProducerRegisters<kOf>>();
    if (threadIdx.x < 32) Producer<kOf>{p, shared, x, y, with_x, with_y, factor}.Run();
  } else {
    SetMaxRegistersUp<kConsumerRegisters<kOf>>();
    Consumer<kOf> consumer(p, shared);
    while (consumer.ComputeItem(gradient)) continue;
  }
  ClusterSync();  // the other CTA may still write to this one's shared memory
}

}  // namespace jax_flash::hopper::wide_gradient

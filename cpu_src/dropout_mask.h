// The dropout mask.
#pragma once

#include "common/arrays.h"
#include "common/problem.h"
#include "cpu_src/scores.h"
#include "cpu_src/tile.h"

namespace jax_flash::JAX_FLASH_ISA {

// Z: the entries of a tile that dropout keeps. Without dropout it is empty, and the functions do nothing.
template <typename A>
class DropoutMask {
 public:
  DropoutMask() = default;
  DropoutMask(const Problem& p, Carver* carver)
      : scale(A(p.keep_scale())), threshold_(int32_t(p.drop_threshold)), key_tiles_((p.kv_len + 15) / 16) {
    if (threshold_) bits_ = carver->NewTile<uint16_t>(kTileRows, kTileColumns);
  }

  // The tile for Z P: without dropout it is P itself.
  Tile<A> NewProduct(Tile<A> p, Carver* carver) const {
    return threshold_ ? carver->NewTile<A>(kTileRows, kTileColumns) : p;
  }

  // Generates Z for a block of head n of batch entry b. The random bits of entry (i, j) are in row i - i0, column j -
  // j0 of `bits_`.
  void Generate(const Operands& in, const Block& block, int64_t b, int64_t n) const {
    if (!threshold_) return;
    // Each lane computes one Philox call: two columns in each half of the rows and columns of a 16 x 16 tile.
    constexpr int kCalls = kVectorBytes / 4, kCallColumns = 4 * kCalls;
    const int64_t row0 = in.origin ? in.origin[0] : 0, column0 = in.origin ? in.origin[1] : 0;
    U32Vec lane, columns;
    for (int i = 0; i < kCalls; ++i) lane[i] = uint32_t(i);
    for (int64_t r = 0; r < block.rows; r = r % 16 == 7 ? r + 9 : r + 1) {
      for (int64_t c = block.c0 / kCallColumns * kCallColumns; c < block.c1; c += kCallColumns) {
        int64_t row_tile = (row0 + block.i0 + r) / 16;
        columns = lane + uint32_t((column0 + block.j0 + c) / 4);
        if (in.row_tiles) {
          row_tile = in.row_tiles[(block.i0 + r) / 16];
          for (int i = 0; i < kCalls; ++i) {
            const int64_t tile = Min((block.j0 + c) / 16 + i / 4, key_tiles_ - 1);  // a vector may end beyond the keys
            columns[i] = uint32_t(in.key_tiles[tile] * 4 + i % 4);
          }
        }
        const uint32_t row_counter = uint32_t(row_tile * 8 + r % 8);
        U32Vec x[4] = {columns, Fill(row_counter), Fill(in.head_id[n]), Fill(in.batch_id[b])};
        Philox(x, in.seed[2 * b], in.seed[2 * b + 1]);
        for (int k = 0; k < 4; ++k) {
          uint16_t* to = bits_.row(r + k / 2 * 8) + c + k % 2 * 8;
          const char* from = reinterpret_cast<const char*>(&x[k]);
          for (int tile = 0; tile < kCalls / 4; ++tile) std::memcpy(to + 16 * tile, from + 16 * tile, 16);
        }
      }
    }
  }

  // to = factor * from for kept entries, 0 for dropped ones. Without dropout both are the same tile, and nothing
  // changes.
  void Apply(const Block& block, A factor, Tile<A> from, Tile<A> to) const {
    const int32_t threshold = threshold_;
    if (!threshold) return;
    for (int64_t r = 0; r < block.rows; ++r) {
      const A* x = from.row(r);
      A* y = to.row(r);
      const uint16_t* row_bits = bits_.row(r);
      for (int64_t c = block.c0; c < block.c1; ++c) y[c] = (row_bits[c] & 0x7FFF) >= threshold ? x[c] * factor : 0;
    }
  }

  A scale = 1;  // the factor of the kept entries

 private:
  static U32Vec Fill(uint32_t x) { return x - U32Vec{}; }

  // Philox4x32-7 (jax_flash/dropout.py).
  static void Philox(U32Vec (&x)[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 7; ++round) {
      U32Vec high0, low0, high2, low2;
      MultiplyWide(x[0], 0xD2511F53u, &high0, &low0);
      MultiplyWide(x[2], 0xCD9E8D57u, &high2, &low2);
      x[0] = high2 ^ x[1] ^ key0;
      x[1] = low2;
      x[2] = high0 ^ x[3] ^ key1;
      x[3] = low0;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
  }

  int32_t threshold_ = 0;
  int64_t key_tiles_ = 0;  // the number of tiles of 16 keys
  Tile<uint16_t> bits_;
};

}  // namespace jax_flash::JAX_FLASH_ISA

// ldmatrix, mma and wgmma. The last lane to arrive computes for its warp.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "ptx.h"

namespace emulator {

// --- 8 x 8 matrices of 16-bit elements (9.7.14.5.15-17): a lane holds (l / 4, 2 (l % 4) + e) ---

namespace {

struct Matrix {
  uint16_t x[8][8];

  void Put(int lane, uint32_t pair) { std::memcpy(&x[lane / 4][lane % 4 * 2], &pair, 4); }
  uint32_t Get(int lane, bool transposed) const {
    const int i = lane / 4, j = lane % 4 * 2;
    return transposed ? x[j][i] | uint32_t(x[j + 1][i]) << 16 : x[i][j] | uint32_t(x[i][j + 1]) << 16;
  }
};

// Returns which row of a matrix this lane holds the address of.
uint8_t* RowAt(void* const* lanes, size_t address, int lane) {
  return Shared(uint32_t(StepOf(lanes[lane])[address]), 16, 16);
}

}  // namespace

void Ldmatrix(Step& s) {
  s.WarpCollective([](void* const* lanes) {
    const size_t count = StepOf(lanes[0]).size() - 1;
    for (size_t n = 0; n < count; ++n) {
      Matrix matrix;
      for (int r = 0; r < 8; ++r) std::memcpy(matrix.x[r], RowAt(lanes, count, 8 * n + r), 16);
      for (int l = 0; l < 32; ++l) {
        const Step& s = StepOf(lanes[l]);
        s.Set(n, matrix.Get(l, s.statement.transposed));
      }
    }
  });
}

void Stmatrix(Step& s) {
  s.WarpCollective([](void* const* lanes) {
    const size_t count = StepOf(lanes[0]).size() - 1;
    for (size_t n = 0; n < count; ++n) {
      Matrix matrix;
      for (int l = 0; l < 32; ++l) matrix.Put(l, uint32_t(StepOf(lanes[l])[1 + n]));
      for (int r = 0; r < 8; ++r) std::memcpy(RowAt(lanes, 0, 8 * n + r), matrix.x[r], 16);
    }
  });
}

void Movmatrix(Step& s) {
  s.WarpCollective([](void* const* lanes) {
    Matrix matrix;
    for (int l = 0; l < 32; ++l) matrix.Put(l, uint32_t(StepOf(lanes[l])[1]));
    for (int l = 0; l < 32; ++l) StepOf(lanes[l]).Set(0, matrix.Get(l, true));
  });
}

// --- mma.sync (9.7.14.5.8, 9.7.14.5.14) ---

namespace {

constexpr int kK = 16;       // of an mma; 8 for TF32
constexpr int kKBytes = 32;  // of a row along k
int KOf(Type type) { return type == Type::kTF32 ? 8 : 16; }

// The elements of a lane in 16 rows of an accumulator: register 4 c + 2 h + e is (l / 4 + 8 h, 8 c + 2 (l % 4) + e).
template <typename Function>
void ForEachElement(int columns, Function function) {
  for (int l = 0; l < 32; ++l) {
    for (int r = 0; r < columns / 2; ++r) {
      function(l, r, l / 4 + r / 2 % 2 * 8, r / 4 * 8 + l % 4 * 2 + r % 2);
    }
  }
}

float CutToTF32(uint32_t x) { return emulated_bits<float>(x & ~0x1FFFu); }

// Unpacks a register of an operand: elements (index, k) and (index, k + 1), or one element of TF32.
void Spread(Type type, uint32_t x, float (*to)[kK], int index, int k) {
  if (type == Type::kTF32) {
    to[index][k] = CutToTF32(x);
  } else {
    to[index][k] = Widen(type, uint16_t(x)), to[index][k + 1] = Widen(type, uint16_t(x >> 16));
  }
}

// Unpacks the left operand: registers hold rows l / 4 and l / 4 + 8, then the same rows of the upper half of k.
void SpreadA(Type type, uint32_t x, float (*to)[kK], int lane, int i) {
  const int pair = type == Type::kTF32 ? 1 : 2;
  Spread(type, x, to, lane / 4 + i % 2 * 8, lane % 4 * pair + i / 2 * 4 * pair);
}

}  // namespace

void MmaSync(Step& s) {  // D 0-3, A 4-7, B 8-9, C 10-13
  s.WarpCollective([](void* const* lanes) {
    const Type type = StepOf(lanes[0]).statement.type;
    const int k_end = KOf(type), pair = k_end / 8;
    float a[16][kK], b[8][kK], c[16][8];
    for (int l = 0; l < 32; ++l) {
      const Step& s = StepOf(lanes[l]);
      for (int i = 0; i < 4; ++i) SpreadA(type, uint32_t(s[4 + i]), a, l, i);
      for (int i = 0; i < 2; ++i) Spread(type, uint32_t(s[8 + i]), b, l / 4, l % 4 * pair + i * 4 * pair);
    }
    ForEachElement(8, [&](int l, int r, int i, int j) { c[i][j] = StepOf(lanes[l]).Float(10 + r); });
    double b_transposed[kK][8];
    for (int k = 0; k < k_end; ++k) {
      for (int j = 0; j < 8; ++j) b_transposed[k][j] = b[j][k];
    }
    for (int i = 0; i < 16; ++i) {
      double sums[8];  // rounded once
      std::copy_n(c[i], 8, sums);
      for (int k = 0; k < k_end; ++k) {
        for (int j = 0; j < 8; ++j) sums[j] += double(a[i][k]) * b_transposed[k][j];
      }
      for (int j = 0; j < 8; ++j) c[i][j] = float(sums[j]);
    }
    ForEachElement(8, [&](int l, int r, int i, int j) { StepOf(lanes[l]).SetFloat(r, c[i][j]); });
  });
}

// --- wgmma (9.7.15): the 16 rows of one warp. Operands must be ready at the issue and must not change until the
// program waits for the result. Until then the result is NaN. ---

// Registers of a warp in which wgmmas accumulate.
struct Accumulator {
  float* registers[32];  // of each lane, contiguous
  int columns;
  std::vector<float> values;  // [16][columns]
};

struct Wgmma {
  Type type;
  int columns;
  std::shared_ptr<Accumulator> accumulator;
  const uint32_t* a_registers[32][4];
  bool in_registers, accumulate, a_transposed, b_transposed;
  uint64_t a, b;                  // descriptors
  int first_row;                  // of the warp
  std::vector<uint8_t> operands;  // A and B at the issue
};

struct WgmmaQueue {
  bool fenced = false;
  std::vector<Wgmma> open;
  std::deque<std::vector<Wgmma>> groups;
};

namespace {

WgmmaQueue& Queue() {
  Warp& warp = Self().warp();
  if (!warp.wgmma) warp.wgmma = std::make_shared<WgmmaQueue>();
  return *warp.wgmma;
}

constexpr int kChunk = 16;  // bytes: shared memory is swizzled in chunks

// Copies 16 bytes of a matrix with 128-byte swizzle: elements along k, or along M or N if it is transposed. `index` is
// the row of M or N. 9.7.15.5.1
void CopyChunk(uint64_t descriptor, bool transposed, int index, int k, int k_bytes, bool check, uint8_t* to) {
  const uint32_t start = (descriptor & 0x3FFF) << 4;
  const uint32_t leading = (descriptor >> 16 & 0x3FFF) << 4, stride = (descriptor >> 32 & 0x3FFF) << 4;
  const uint32_t at = start + (transposed ? index / 64 * leading + k / 8 * stride + k % 8 * 128 + index % 64 * 2
                                          : index / 8 * stride + index % 8 * 128 + k * k_bytes);
  const uint32_t rank = uint32_t(Self().block->rank) << 24;
  const uint8_t* const chunk = Shared(rank | (at ^ (at >> 7 & 7) << 4), kChunk, kChunk);
  if (check && std::memcmp(chunk, chunk + kAsyncProxyOffset, kChunk) != 0) {
    Fail("wgmma: its operand at %u was written without fence.proxy.async", at);
  }
  std::memcpy(to, chunk, kChunk);
}

// Appends a matrix of `rows` of M or N: [rows][k], or [k][rows] if it is transposed.
void AppendMatrix(const Wgmma& x, uint64_t descriptor, bool transposed, int first, int rows, bool check,
                  std::vector<uint8_t>& to) {
  if (descriptor >> 62 != 1) Fail("wgmma: swizzle mode %d", int(descriptor >> 62));
  const int k_end = KOf(x.type), bytes = kKBytes / k_end, elements = kChunk / bytes;
  size_t end = to.size();
  to.resize(end + rows * kKBytes);
  for (int i = 0; i < (transposed ? k_end : rows); ++i) {
    for (int j = 0; j < (transposed ? rows : k_end); j += elements, end += kChunk) {
      const int row = transposed ? j : i, k = transposed ? i : j;
      CopyChunk(descriptor, transposed, first + row, k, bytes, check, to.data() + end);
    }
  }
}

std::vector<uint8_t> Operands(const Wgmma& x, bool check) {
  std::vector<uint8_t> bytes;
  bytes.reserve((16 + x.columns) * kKBytes);
  if (x.in_registers) {
    bytes.resize(16 * kKBytes);
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 4; ++i) {
        uint8_t* const row = bytes.data() + (l / 4 + i % 2 * 8) * kKBytes;
        std::memcpy(row + i / 2 * kChunk + l % 4 * 4, x.a_registers[l][i], 4);
      }
    }
  } else {
    AppendMatrix(x, x.a, x.a_transposed, x.first_row, 16, check, bytes);
  }
  AppendMatrix(x, x.b, x.b_transposed, 0, x.columns, check, bytes);
  return bytes;
}

// Converts a matrix [rows][columns] of an operand.
std::vector<float> Floats(Type type, const uint8_t* bytes, int rows, int columns, bool transposed) {
  std::vector<float> values(rows * columns);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) {
      float& to = values[transposed ? j * rows + i : i * columns + j];
      if (type == Type::kTF32) {
        uint32_t x;
        std::memcpy(&x, bytes + (i * columns + j) * 4, 4);
        to = CutToTF32(x);
      } else {
        uint16_t x;
        std::memcpy(&x, bytes + (i * columns + j) * 2, 2);
        to = Widen(type, x);
      }
    }
  }
  return values;
}

void Finish(const Wgmma& x) {
  if (Operands(x, false) != x.operands) {
    Fail("wgmma of m64n%d: an operand has changed since it was issued (A at %u, B at %u)", x.columns,
         unsigned(x.a & 0x3FFF) << 4, unsigned(x.b & 0x3FFF) << 4);
  }
  const int k_end = KOf(x.type), columns = x.columns;
  const uint8_t* const second = x.operands.data() + 16 * kKBytes;
  const std::vector<float> a = x.a_transposed ? Floats(x.type, x.operands.data(), k_end, 16, true)
                                              : Floats(x.type, x.operands.data(), 16, k_end, false);
  const std::vector<float> b =
      x.b_transposed ? Floats(x.type, second, k_end, columns, false) : Floats(x.type, second, columns, k_end, true);
  float* const c = x.accumulator->values.data();
  if (!x.accumulate) std::fill_n(c, 16 * columns, 0.0f);
  for (int m = 0; m < 16; ++m) {
    for (int k = 0; k < k_end; ++k) {
      for (int n = 0; n < columns; ++n) c[m * columns + n] += a[m * k_end + k] * b[k * columns + n];
    }
  }
}

}  // namespace

void WgmmaFence(Step& s) {
  s.WarpCollective([](void* const*) { Queue().fenced = true; });
}

void WgmmaIssue(Step& s) {
  s.WarpCollective([](void* const* lanes) {
    WgmmaQueue& queue = Queue();
    if (!queue.fenced) Fail("wgmma without wgmma.fence since the last group");
    const Step& first = StepOf(lanes[0]);
    Wgmma x = {};
    x.type = first.statement.type;
    x.columns = std::atoi(first.statement.opcode.c_str() + first.statement.opcode.find("m64n") + 4);
    const size_t after = x.columns / 2;         // D; then a, b, p, 1, 1, transposed a and b; or a0-a3, b, p, 1, 1, b
    const bool majors = x.type != Type::kTF32;  // TF32 has no transposed operands
    x.in_registers = first.size() == after + 8 + majors;
    if (!x.in_registers && first.size() != after + 5 + 2 * majors) Fail("wgmma with %zu arguments", first.size());
    const size_t b = after + (x.in_registers ? 4 : 1);
    x.a = x.in_registers ? 0 : first[after], x.b = first[b], x.accumulate = first[b + 1];
    x.a_transposed = majors && !x.in_registers && first[b + 4], x.b_transposed = majors && first[first.size() - 1];
    x.first_row = Self().index / 32 % 4 * 16;
    float* registers[32];
    for (int l = 0; l < 32; ++l) {
      const Step& s = StepOf(lanes[l]);
      registers[l] = static_cast<float*>(s.Address(0));
      if (s.Address(after - 1) != registers[l] + after - 1) Fail("wgmma: the accumulator is no array");
      for (size_t i = after; i < s.size(); ++i) {
        if (i >= b && s[i] != first[i]) Fail("wgmma: the lanes of a warp have different descriptors");
      }
      for (int i = 0; x.in_registers && i < 4; ++i) {
        x.a_registers[l][i] = static_cast<const uint32_t*>(s.Address(after + i));
      }
    }
    const auto find = [&](const std::vector<Wgmma>& group) {
      for (const Wgmma& y : group) {
        if (y.accumulator->registers[0] == registers[0]) x.accumulator = y.accumulator;
      }
    };
    for (const auto& group : queue.groups) find(group);
    find(queue.open);
    if (!x.accumulator) {
      x.accumulator = std::make_shared<Accumulator>();
      std::copy(registers, registers + 32, x.accumulator->registers);
      x.accumulator->columns = x.columns;
      x.accumulator->values.resize(16 * x.columns);
      ForEachElement(x.columns, [&](int l, int r, int i, int j) {
        x.accumulator->values[i * x.columns + j] = registers[l][r];
        registers[l][r] = NAN;
      });
    }
    if (x.accumulator->columns != x.columns) Fail("wgmma: accumulators of different shapes in the same registers");
    CompleteFences(Self().block->rank);
    x.operands = Operands(x, true);
    queue.open.push_back(std::move(x));
  });
}

void WgmmaCommit(Step& s) {
  s.WarpCollective([](void* const*) {
    WgmmaQueue& queue = Queue();
    queue.groups.push_back(std::move(queue.open));
    queue.open.clear();
    queue.fenced = false;
  });
}

void WgmmaWait(Step& s) {
  s.WarpCollective([](void* const* lanes) {
    WgmmaQueue& queue = Queue();
    for (; queue.groups.size() > StepOf(lanes[0])[0]; queue.groups.pop_front()) {
      for (Wgmma& x : queue.groups.front()) {
        Finish(x);
        const std::shared_ptr<Accumulator> accumulator = std::move(x.accumulator);
        if (accumulator.use_count() > 1) continue;  // later wgmmas use it
        ForEachElement(accumulator->columns, [&](int l, int r, int i, int j) {
          accumulator->registers[l][r] = accumulator->values[i * accumulator->columns + j];
        });
      }
    }
  });
}

}  // namespace emulator

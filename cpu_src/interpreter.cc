#include "cpu_src/interpreter.h"

namespace jax_flash::JAX_FLASH_ISA {
namespace {

// The number of rows that are computed at a time: few, so their values stay in the L1 cache.
constexpr int64_t kProgramRows = 4;

// Values of every type occupy a whole vector of A, so they have the same stride.
template <typename A, Type type>
typename Typed<A, type>::Vector Get(const char* from) {
  typename Typed<A, type>::Vector v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

template <typename A, Type type, typename V>
void Put(char* to, V value) {
  static_assert(sizeof(V) == sizeof(typename Typed<A, type>::Vector));
  std::memcpy(to, &value, sizeof(value));
}

template <typename A, Type type>
typename Typed<A, type>::Vector Fill(typename Typed<A, type>::Element x) {
  return x - typename Typed<A, type>::Vector{};
}

// An element of an array as `load` returns it.
template <typename A, Type type, typename S>
typename Typed<A, type>::Element Element(S x) {
  if constexpr (type == Type::f) {
    return To<A>(x);
  } else {
    return type == Type::b ? -int32_t(x != 0) : x;
  }
}

template <typename A, Type type, typename Of>
typename Typed<A, type>::Vector Collect(Of of) {
  typename Typed<A, type>::Element elements[kLanes<A>];
  for (int lane = 0; lane < kLanes<A>; ++lane) elements[lane] = Element<A, type>(of(lane));
  return Get<A, type>(reinterpret_cast<const char*>(elements));
}

// Converts between the order of entries and the order of columns. With a step of -1, the last entry belongs to the
// first column.
template <typename V>
V InOrder(V run, int8_t step) {
  return step > 0 ? run : Reversed(run);
}

int64_t Clamp(int64_t index, int64_t last) { return index < 0 ? 0 : index < last ? index : last; }

}  // namespace

template <typename A>
Interpreter<A>::Interpreter(const Problem& p, const Program& program, Carver* carver)
    : arrays_(p.captured_arrays()), instructions_(program.data()), count_(program.size()), kind_(program.kind) {
  if (!present()) return;
  values_ = carver->Array<char*>(count_);
  slots_ = carver->Array<Location>(program.slots);
  for (int64_t i = 0; i < count_; ++i) {
    const Instruction& x = instructions_[i];
    if (x.slot >= 0 || x.type == Type::n) continue;
    const int64_t vectors = (x.rows ? kTileRows : 1) * (x.columns ? kTileColumns / kLanes<A> : 1);
    char* const value = carver->Array<char>(vectors * kVectorBytes);
    if (value) values_[i] = value;
  }
  constexpr int64_t kRowBytes = kTileColumns * int64_t(sizeof(A));
  for (int slot = kFirstFreeSlot; slot < program.slots; ++slot) {
    char* const value = carver->Array<char>(kProgramRows * kRowBytes);
    if (value) slots_[slot] = {value, kRowBytes, kVectorBytes};
  }
  if (kind_ != ProgramKind::kMaskMod) return;
  ranges_ = carver->Array<Range>(count_);
  bytes_ = carver->Array<uint8_t>(kTileRows * kTileColumns);
}

template <typename A>
void Interpreter<A>::Begin(const Operands& in, int64_t b, int64_t n, int64_t offset, const Block& block) {
  // Values that are equal to the previous block's are reused.
  const bool same_head = in_ == &in && b_ == b && n_ == n;
  const bool same_rows = same_head && block_.i0 == block.i0 && block_.rows == block.rows;
  const bool same_columns = same_head && block_.j0 == block.j0 && block_.c0 == block.c0 && block_.c1 == block.c1;
  in_ = &in;
  b_ = b;
  n_ = n;
  offset_ = offset;
  first_key_ = in.origin ? in.origin[1] : 0;
  block_ = block;
  first_ = 0;
  rows_ = block.rows;
  if (!same_head) Run(false, false);
  if (!same_rows) Run(true, false);
  if (!same_columns) Run(false, true);
}

template <typename A>
void Interpreter<A>::Score(const Block& some, Tile<A> s) {
  RunEntries(some.i0 - block_.i0, some.rows, s, {});
}

template <typename A>
void Interpreter<A>::Gradient(Tile<A> s, Tile<A> ds, const CapturedSums<A>* sums) {
  sums_ = sums;
  RunEntries(0, block_.rows, s, ds);
}

template <typename A>
void Interpreter<A>::Tangent(Tile<A> s, Tile<A> ds) {
  RunEntries(0, block_.rows, s, ds);
}

template <typename A>
Range Interpreter<A>::ResultRange() {
  for (int64_t i = 0; i < count_; ++i) {
    const Instruction& x = instructions_[i];
    if (x.slot < 0) continue;
    Range operands[3] = {};
    // Indices are not analysed here, so an array load may return any value.
    for (int k = 0; k < x.count && x.array < 0; ++k) operands[k] = KnownRange(x.operands[k]);
    ranges_[i] = RangeOf<A>(x, operands);
  }
  return KnownRange(instructions_[count_ - 1].operands[0]);
}

template <typename A>
void Interpreter<A>::Evaluate() {
  RunEntries(0, block_.rows, {}, {});
}

template <typename A>
MaskBytes Interpreter<A>::Mask(int64_t i0) const {
  const Instruction& result = instructions_[count_ - 1];
  return {bytes_ + (result.rows ? (i0 - block_.i0) * kTileColumns : 0), result.rows ? kTileColumns : 0, result.columns};
}

template <typename A>
void Interpreter<A>::RunEntries(int64_t first, int64_t rows, Tile<A> s, Tile<A> ds) {
  for (int64_t r = 0; r < rows; r += kProgramRows) {
    first_ = first + r;
    rows_ = Min(kProgramRows, rows - r);
    const auto location = [&](Tile<A> tile) {
      return Location{reinterpret_cast<char*>(tile.row(r) + block_.c0), tile.stride * int64_t(sizeof(A)), kVectorBytes};
    };
    if (s.data) slots_[kScoreSlot] = location(s);
    if (ds.data) slots_[kDerivativeSlot] = location(ds);
    Run(true, true);
  }
}

template <typename A>
void Interpreter<A>::Run(bool rows, bool columns) {
  for (int64_t i = 0; i < count_; ++i) {
    if (instructions_[i].rows == rows && instructions_[i].columns == columns) Execute(i);
  }
}

template <typename A>
typename Interpreter<A>::Location Interpreter<A>::LocationOf(int64_t number) const {
  const Instruction& x = instructions_[number];
  if (x.slot >= 0) return slots_[x.slot];
  const int64_t row_bytes = x.rows ? kVectorBytes : 0;
  return {values_[number] + first_ * row_bytes, row_bytes, x.columns ? kVectorBytes : 0};
}

// Computes a value of type R: f(row, vector).
template <typename A>
template <Type R, typename F>
inline void Interpreter<A>::Make(int64_t number, F f) {
  const Instruction& x = instructions_[number];
  const Location to = LocationOf(number);
  const int64_t rows = RowsOf(x), vectors = VectorsOf(x);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t v = 0; v < vectors; ++v) Put<A, R>(to.At(r, v), f(r, v));
  }
}

// Computes a value of type R: f of operands of types X, Y and Z.
template <typename A>
template <Type R, Type X, Type Y, Type Z, typename F>
inline void Interpreter<A>::Map(int64_t number, F f) {
  const int16_t* const operands = instructions_[number].operands;
  const Location x = LocationOf(operands[0]), y = Y == Type::n ? x : LocationOf(operands[1]),
                 z = Z == Type::n ? x : LocationOf(operands[2]);
  Make<R>(number,
          [&](int64_t r, int64_t v) { return f(Get<A, X>(x.At(r, v)), Get<A, Y>(y.At(r, v)), Get<A, Z>(z.At(r, v))); });
}

template <typename A>
void Interpreter<A>::Execute(int64_t number) {
  const Instruction& x = instructions_[number];
  const auto fill = [](auto value) { return [=](int64_t, int64_t) { return value; }; };
  switch (x.op) {
    case Op::score:
    case Op::cotangent:
    case Op::tangent:
      break;  // they are in slots
    case Op::batch:
      return Make<Type::i>(number, fill(Fill<A, Type::i>(in_->program_batch[b_])));
    case Op::head:
      return Make<Type::i>(number, fill(Fill<A, Type::i>(in_->program_head[n_])));
    case Op::query:
      return Make<Type::i>(number, [&](int64_t r, int64_t) {
        return Fill<A, Type::i>(int32_t(first_key_ + block_.i0 + first_ + r + offset_));
      });
    case Op::key:
      return Make<Type::i>(number, [&](int64_t, int64_t v) {
        const int32_t first = int32_t(first_key_ + block_.j0 + block_.c0 + v * kLanes<A>);
        return Collect<A, Type::i>([&](int lane) { return first + lane; });
      });
    case Op::const_f:
      return Make<Type::f>(number, fill(Fill<A, Type::f>(A(x.constant))));
    case Op::const_i:
      return Make<Type::i>(number, fill(Fill<A, Type::i>(int32_t(x.constant))));
    case Op::const_u:
      return Make<Type::u>(number, fill(Fill<A, Type::u>(uint32_t(x.constant))));
    case Op::const_b:
      return Make<Type::b>(number, fill(Fill<A, Type::b>(-int32_t(x.constant))));
    case Op::load_f:
      return LoadArray<Type::f>(number);
    case Op::load_i:
      return LoadArray<Type::i>(number);
    case Op::load_u:
      return LoadArray<Type::u>(number);
    case Op::load_b:
      return LoadArray<Type::b>(number);
    case Op::accumulate:
      return Accumulate(x);
    case Op::result:
      return Result(x);
#define JAX_FLASH_OP(name, text, R, X, Y, Z, value) \
  case Op::name:                                    \
    return Map<Type::R, Type::X, Type::Y, Type::Z>( \
        number, []([[maybe_unused]] auto x, [[maybe_unused]] auto y, [[maybe_unused]] auto z) { return value; });
      JAX_FLASH_OPS(JAX_FLASH_OP)
#undef JAX_FLASH_OP
  }
}

// --- Ranges ---

template <typename A>
Range Interpreter<A>::KnownRange(int64_t number) const {
  const Instruction& x = instructions_[number];
  if (x.slot >= 0) return ranges_[number];
  switch (x.type) {
    case Type::f:
      return Extremes<Type::f>(number);
    case Type::i:
      return Extremes<Type::i>(number);
    case Type::u:
      return Extremes<Type::u>(number);
    default:
      return Extremes<Type::b>(number);
  }
}

// The minimum and maximum of a value that has been computed for the whole block.
template <typename A>
template <Type R>
Range Interpreter<A>::Extremes(int64_t number) const {
  const Instruction& x = instructions_[number];
  const Location from = LocationOf(number);
  auto lows = Get<A, R>(from.data), highs = lows, zeros = lows - lows;  // NaN if a value is not finite
  const int64_t rows = RowsOf(x), vectors = VectorsOf(x);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t v = 0; v < vectors; ++v) {
      const auto value = Get<A, R>(from.At(r, v));
      lows = value < lows ? value : lows;
      highs = value > highs ? value : highs;
      zeros += value - value;
    }
  }
  auto low = lows[0], high = highs[0], zero = zeros[0];
#pragma GCC unroll 16
  for (int lane = 1; lane < kLanes<A>; ++lane) {
    low = lows[lane] < low ? lows[lane] : low;
    high = highs[lane] > high ? highs[lane] : high;
    zero += zeros[lane];
  }
  // Truth values are stored as 0 or -1.
  if (R == Type::b) return {-double(high), -double(low)};
  return RangeBetween(R, double(low + zero), double(high + zero));
}

// --- Captured arrays ---

template <typename A>
typename Interpreter<A>::Indices Interpreter<A>::IndicesOf(const Instruction& x) const {
  const Captured& array = arrays_[x.array];
  Indices indices = {};
  indices.rank = array.rank;
  int64_t stride = 1;
  int differing = 0;
  for (int dim = array.rank - 1; dim >= 0; --dim) {
    const Instruction& operand = instructions_[x.operands[dim]];
    indices.index[dim] = {LocationOf(x.operands[dim]), array.dims[dim] - 1, stride, operand.columns};
    stride *= array.dims[dim];
    differing += operand.columns;
    if (operand.columns && dim == array.rank - 1 && operand.step != kNoStep) indices.step = operand.step;
  }
  indices.columns = differing > 0;
  if (differing > 1) indices.step = 0;
  return indices;
}

// The part of an entry's offset from indices that are equal in all columns.
template <typename A>
int64_t Interpreter<A>::RowOffset(const Indices& indices, int64_t row) {
  int64_t offset = 0;
  for (int dim = 0; dim < indices.rank; ++dim) {
    const auto& index = indices.index[dim];
    if (!index.columns) offset += Clamp(Get<A, Type::i>(index.location.At(row, 0))[0], index.last) * index.stride;
  }
  return offset;
}

template <typename A>
typename Interpreter<A>::Access Interpreter<A>::AccessOf(const Indices& indices, int64_t row, int64_t vector,
                                                         int64_t count) {
  if (indices.step == 0) return {Access::kScattered, 0};
  const auto& index = indices.index[indices.rank - 1];
  const int64_t first = Get<A, Type::i>(index.location.At(row, vector))[0], last = first + indices.step * (count - 1);
  const int64_t low = Min(first, last), high = Max(first, last);
  if (low < INT32_MIN || high > INT32_MAX) return {Access::kScattered, 0};  // wraps around
  if (low >= index.last) return {Access::kSame, index.last};
  if (high <= 0) return {Access::kSame, 0};
  return {low >= 0 && high <= index.last ? Access::kConsecutive : Access::kScattered, low};
}

// The remaining offset of each lane, from indices that differ between columns.
template <typename A>
void Interpreter<A>::Offsets(const Indices& indices, int64_t row, int64_t vector, int64_t* offsets) {
  for (int lane = 0; lane < kLanes<A>; ++lane) offsets[lane] = 0;
  for (int dim = 0; dim < indices.rank; ++dim) {
    const auto& index = indices.index[dim];
    if (!index.columns) continue;
    using Signed = typename Lanes<A>::Signed;
    const int32_t last = int32_t(Min(index.last, 0x7FFFFFFF));
    Signed at = Get<A, Type::i>(index.location.At(row, vector));
    at = at < 0 ? Signed{} : at > last ? Signed{} + last : at;
    int32_t lanes[kLanes<A>];
    std::memcpy(lanes, &at, sizeof(at));
    for (int lane = 0; lane < kLanes<A>; ++lane) offsets[lane] += lanes[lane] * index.stride;
  }
}

template <typename A>
template <Type R, typename S>
void Interpreter<A>::LoadElements(int64_t number, const S* array) {
  const Instruction& x = instructions_[number];
  const Captured& captured = arrays_[x.array];
  if (captured.batch) array += b_ * captured.size();
  const Indices indices = IndicesOf(x);
  const Location to = LocationOf(number);
  const int64_t rows = RowsOf(x), vectors = VectorsOf(x);
  for (int64_t r = 0; r < rows; ++r) {
    const S* const from = array + RowOffset(indices, r);
    if (!indices.columns) {
      Put<A, R>(to.At(r, 0), Fill<A, R>(Element<A, R>(*from)));
      continue;
    }
    const Access all = AccessOf(indices, r, 0, vectors * kLanes<A>);
    if (all.kind == Access::kConsecutive) {
      for (int64_t v = 0; v < vectors; ++v) {
        const S* const run = from + all.first + (indices.step > 0 ? v : vectors - 1 - v) * kLanes<A>;
        Put<A, R>(to.At(r, v), InOrder(Collect<A, R>([run](int lane) { return run[lane]; }), indices.step));
      }
      continue;
    }
    for (int64_t v = 0; v < vectors; ++v) {
      const Access access = AccessOf(indices, r, v, kLanes<A>);
      if (access.kind == Access::kSame) {
        Put<A, R>(to.At(r, v), Fill<A, R>(Element<A, R>(from[access.first])));
      } else {
        int64_t offsets[kLanes<A>];
        Offsets(indices, r, v, offsets);
        Put<A, R>(to.At(r, v), Collect<A, R>([&](int lane) { return from[offsets[lane]]; }));
      }
    }
  }
}

template <typename A>
template <Type R>
void Interpreter<A>::LoadArray(int64_t number) {
  const int array = instructions_[number].array;
  const void* const data = in_->captured[array];
  switch (arrays_[array].dtype) {
#define JAX_FLASH_ELEMENTS(text, name, type, element)                                          \
  case CapturedDType::name:                                                                    \
    if constexpr (R == Type::type) LoadElements<R>(number, static_cast<const element*>(data)); \
    break;
    JAX_FLASH_CAPTURED_DTYPES(JAX_FLASH_ELEMENTS)
#undef JAX_FLASH_ELEMENTS
  }
}

// A value that is linear in the cotangent. It is 0 where the cotangent is 0, even if the derivative there is NaN or
// infinite.
template <typename A>
Vec<A> Interpreter<A>::Cotangent(const Location& value, int64_t row, int64_t vector) const {
  const Vec<A> cotangent = Get<A, Type::f>(slots_[kDerivativeSlot].At(row, vector));
  return cotangent == 0 ? Vec<A>{} : Get<A, Type::f>(value.At(row, vector));
}

template <typename A>
void Interpreter<A>::Accumulate(const Instruction& x) {
  A* const sums = sums_ ? sums_->of[x.array] : nullptr;
  if (!sums) return;
  const Indices indices = IndicesOf(x);
  const Location value = LocationOf(x.operands[x.count - 1]);
  const int64_t vectors = VectorsOf(x);
  for (int64_t r = 0; r < rows_; ++r) {
    A* const to = sums + RowOffset(indices, r);
    // The sum for one entry. Other entries may belong to another worker, so nothing is added to them, not even 0.
    Vec<A> sum = {};
    int64_t same = -1;
    const auto add_sum = [&] {
      for (int lane = 0; same >= 0 && lane < kLanes<A>; ++lane) to[same] += sum[lane];
      sum = Vec<A>{};
    };
    for (int64_t v = 0; v < vectors; ++v) {
      const Vec<A> term = Cotangent(value, r, v);
      // Entries beyond the block's columns do not exist, or belong to another worker.
      const int64_t lanes = Min(kLanes<A>, Width() - v * kLanes<A>);
      const Access access = indices.columns ? AccessOf(indices, r, v, kLanes<A>) : Access{Access::kSame, 0};
      if (lanes == kLanes<A> && access.kind == Access::kSame) {
        if (access.first != same) add_sum();
        same = access.first;
        sum += term;
      } else if (lanes == kLanes<A> && access.kind == Access::kConsecutive) {
        Store(to + access.first, Load(to + access.first) + InOrder(term, indices.step));
      } else {
        int64_t offsets[kLanes<A>];
        Offsets(indices, r, v, offsets);
        for (int64_t lane = 0; lane < lanes; ++lane) to[offsets[lane]] += term[lane];
      }
    }
    add_sum();
  }
}

template <typename A>
void Interpreter<A>::Result(const Instruction& x) {
  const Location value = LocationOf(x.operands[0]);
  const int64_t rows = RowsOf(x), vectors = VectorsOf(x);
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t* const bytes = bytes_ + (x.rows ? first_ + r : 0) * kTileColumns + (x.columns ? block_.c0 : 0);
    for (int64_t v = 0; v < vectors; ++v) {
      if (kind_ == ProgramKind::kMaskMod) {
        typedef uint8_t Bytes __attribute__((vector_size(kLanes<A>)));
        const Bytes some = __builtin_convertvector(Get<A, Type::b>(value.At(r, v)), Bytes);
        std::memcpy(bytes + v * kLanes<A>, &some, sizeof(some));
      } else if (kind_ == ProgramKind::kScoreGrad) {
        Put<A, Type::f>(slots_[kDerivativeSlot].At(r, v), Cotangent(value, r, v));
      } else if (kind_ == ProgramKind::kScoreTangent) {
        Put<A, Type::f>(slots_[kDerivativeSlot].At(r, v), Get<A, Type::f>(value.At(r, v)));
      } else if (instructions_[x.operands[0]].slot != kScoreSlot) {
        Put<A, Type::f>(slots_[kScoreSlot].At(r, v), Get<A, Type::f>(value.At(r, v)));
      }
    }
  }
}

template class Interpreter<float>;
template class Interpreter<double>;

}  // namespace jax_flash::JAX_FLASH_ISA

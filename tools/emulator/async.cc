// mbarriers and asynchronous copies. The target of a copy is NaN from its issue to its completion.
#include <cstring>

#include "ptx.h"
#include "tensor_map.h"

namespace emulator {

// --- mbarrier (9.7.13.15) ---

namespace {

struct Mbarrier {
  int32_t bytes;  // announced bytes that have not arrived
  uint32_t pending : 15, expected : 15, unset : 1, phase : 1;
};
constexpr uint64_t kPhase = uint64_t(1) << 63;

uint64_t* Word(uint32_t address) { return reinterpret_cast<uint64_t*>(Shared(address, 8, 8)); }

Mbarrier Read(uint32_t address) { return emulated_bits<Mbarrier>(*Word(address)); }

void Update(uint32_t address, int arrivals, int bytes) {
  Mbarrier x = Read(address);
  if (x.unset || x.expected == 0) Fail("the mbarrier at %u is not initialised", address & 0xFFFFFF);
  if (int(x.pending) < arrivals) Fail("one arrival too many: %s", DescribeMbarrier(address).c_str());
  x.pending -= arrivals, x.bytes += bytes;
  if (std::abs(x.bytes) >= 1 << 20) Fail("too many bytes: %s", DescribeMbarrier(address).c_str());
  if (x.pending == 0 && x.bytes == 0) x.phase ^= 1, x.pending = x.expected;
  *Word(address) = emulated_bits<uint64_t>(x);
}

}  // namespace

std::string DescribeMbarrier(uint32_t address) {
  const Mbarrier x = Read(address);
  return "at shared address " + std::to_string(address & 0xFFFFFF) + " of rank " + std::to_string(address >> 24) +
         ": phase " + std::to_string(x.phase) + ", " + std::to_string(x.pending) + " of " + std::to_string(x.expected) +
         " arrivals and " + std::to_string(x.bytes) + " bytes are missing";
}

void MbarrierInit(Step& s) {
  const uint32_t count = uint32_t(s[1]);
  if (count == 0 || count >= 1 << 15) Fail("an mbarrier of %u arrivals", count);
  *Word(uint32_t(s[0])) = emulated_bits<uint64_t>(Mbarrier{0, count, count, 0, 0});
}

// "mbarrier.arrive... _, [address]"
void MbarrierArrive(Step& s) {
  Update(uint32_t(s[1]), 1, 0);
  Yield();
}
void MbarrierArriveExpectTx(Step& s) {
  Update(uint32_t(s[1]), 1, int(s[2]));
  Yield();
}

void MbarrierTryWait(Step& s) {
  const uint32_t address = uint32_t(s[1]);
  if (Read(address).unset) Fail("the mbarrier at %u is not initialised", address & 0xFFFFFF);
  WaitWhile(Word(address), kPhase, s[2] << 63, "mbarrier", address);
  s.Set(0, true);
}

// --- Copies (9.7.9.25, 9.7.9.27) ---

namespace {

// Writes that both proxies see.
void Write(uint8_t* shared, const void* from, size_t bytes) {
  std::memcpy(shared, from, bytes);
  std::memcpy(shared + kAsyncProxyOffset, from, bytes);
}
void Fill(uint8_t* shared, uint8_t value, size_t bytes) {
  std::memset(shared, value, bytes);
  std::memset(shared + kAsyncProxyOffset, value, bytes);
}
void Unset(uint8_t* shared, size_t bytes) { Fill(shared, 0xFF, bytes); }

// Checks and returns the source of an asynchronous copy.
uint8_t* Source(uint32_t address, uint32_t bytes, uint32_t alignment) {
  uint8_t* const from = Shared(address, bytes, alignment);
  CompleteFences(address >> 24);
  if (std::memcmp(from, from + kAsyncProxyOffset, bytes) != 0) {
    Fail("%u bytes at %u were written without fence.proxy.async", bytes, address & 0xFFFFFF);
  }
  return from;
}

const uint8_t* Global(uint64_t address, unsigned alignment) {
  if (address % alignment != 0) Fail("address %p is not a multiple of %u", reinterpret_cast<void*>(address), alignment);
  return reinterpret_cast<const uint8_t*>(address);
}

uint32_t BulkBytes(uint64_t bytes) {
  if (bytes == 0 || bytes % 16 != 0) Fail("a bulk copy of %d bytes", int(bytes));
  return uint32_t(bytes);
}

// Calls `function(address in the box, address in HBM, bytes inside the array)` for each chunk of 16 bytes.
template <typename Function>
void ForEachChunk(const TensorMap& map, const int (&at)[4], uint8_t* box, Function function) {
  const int elements = 16 / map.element_bytes;
  for (int r = 0; r < int(map.rows); ++r) {
    for (int c = 0; c < 8; ++c) {
      const int64_t index[4] = {at[0] + c * elements, at[1] + r, at[2], at[3]};
      const uint8_t* global = map.data;
      int64_t inside = elements;
      for (int i = 0; i < 4; ++i) {
        const int64_t left = int64_t(map.sizes[i]) - index[i];
        if (index[i] < 0 || left <= 0) inside = 0;
        if (i == 0) inside = std::min(inside, left);
        global += index[i] * int64_t(map.strides[i]);
      }
      function(box + r * 128 + (c ^ (r & 7)) * 16, global, std::max(inside, int64_t(0)) * map.element_bytes);
    }
  }
}

}  // namespace

void CpAsync(Step& s) {  // to, from, 16, bytes (the rest is zero-filled)
  uint8_t* const to = Shared(uint32_t(s[0]), 16, 16);
  const uint8_t* const from = Global(s[1], 16);
  const size_t bytes = s[3];
  Unset(to, 16);
  Self().cp_async.open.push_back([=] {
    std::memset(to, 0, 16);
    std::memcpy(to, from, bytes);
  });
}

namespace {

void LoadBox(Step& s, uint32_t to, uint32_t barrier) {
  const TensorMap map = *reinterpret_cast<const TensorMap*>(s[1]);
  uint8_t* const box = Shared(to, map.rows * 128, 1024);
  Unset(box, map.rows * 128);
  const int at[4] = {int(s[2]), int(s[3]), int(s[4]), int(s[5])};
  Schedule(Word(barrier), [=] {
    ForEachChunk(map, at, box, [&](uint8_t* shared, const uint8_t* global, int64_t bytes) {
      Fill(shared, 0, 16);
      if (map.to_tf32) {
        for (int i = 0; i < bytes; i += 4) {
          const uint32_t x = NearestTF32(*reinterpret_cast<const uint32_t*>(global + i));
          Write(shared + i, &x, 4);
        }
      } else {
        Write(shared, global, bytes);
      }
    });
    Update(barrier, 0, -int(map.rows) * 128);
  });
}

}  // namespace

void TmaLoad(Step& s) {  // to, map, coordinates, barrier[, mask of the blocks that receive a copy]
  const uint32_t to = uint32_t(s[0]), barrier = uint32_t(s[6]);
  if (s.size() == 7) return LoadBox(s, to, barrier);
  for (uint32_t rank = 0; rank < 16; ++rank) {
    if (s[7] >> rank & 1) LoadBox(s, (to & 0xFFFFFF) | rank << 24, (barrier & 0xFFFFFF) | rank << 24);
  }
}

void TmaStore(Step& s) {  // map, coordinates, from
  const TensorMap map = *reinterpret_cast<const TensorMap*>(s[0]);
  uint8_t* const box = Source(uint32_t(s[5]), map.rows * 128, 1024);
  const int at[4] = {int(s[1]), int(s[2]), int(s[3]), int(s[4])};
  Self().bulk.open.push_back([=] {
    ForEachChunk(map, at, box, [](uint8_t* shared, const uint8_t* global, int64_t bytes) {
      std::memcpy(const_cast<uint8_t*>(global), shared, bytes);
    });
  });
}

void BulkLoad(Step& s) {  // to, from, bytes, barrier
  const uint32_t bytes = BulkBytes(s[2]), barrier = uint32_t(s[3]);
  uint8_t* const to = Shared(uint32_t(s[0]), bytes, 16);
  const uint8_t* const from = Global(s[1], 16);
  Unset(to, bytes);
  Schedule(Word(barrier), [=] {
    Write(to, from, bytes);
    Update(barrier, 0, -int(bytes));
  });
}

void BulkPeerCopy(Step& s) {  // to, from, bytes, barrier
  const uint32_t bytes = BulkBytes(s[2]), barrier = uint32_t(s[3]);
  uint8_t* const to = Shared(uint32_t(s[0]), bytes, 16);
  const uint8_t* const from = Source(uint32_t(s[1]), bytes, 16);
  if (s[0] >> 24 != s[3] >> 24) Fail("a copy to another block than its mbarrier's");
  Unset(to, bytes);
  Schedule(Word(barrier), [=] {
    Write(to, from, bytes);
    Update(barrier, 0, -int(bytes));
  });
}

void BulkStore(Step& s) {  // to, from, bytes
  const uint32_t bytes = BulkBytes(s[2]);
  uint8_t* const to = const_cast<uint8_t*>(Global(s[0], 16));
  const uint8_t* const from = Source(uint32_t(s[1]), bytes, 16);
  Self().bulk.open.push_back([=] { std::memcpy(to, from, bytes); });
}

void BulkReduceAdd(Step& s) {  // to, from, bytes
  const uint32_t bytes = BulkBytes(s[2]);
  float* const to = reinterpret_cast<float*>(const_cast<uint8_t*>(Global(s[0], 16)));
  const float* const from = reinterpret_cast<const float*>(Source(uint32_t(s[1]), bytes, 16));
  Self().bulk.open.push_back([=] {
    for (uint32_t i = 0; i < bytes / 4; ++i) to[i] += from[i];
  });
}

}  // namespace emulator

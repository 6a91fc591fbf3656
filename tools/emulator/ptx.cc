#include "ptx.h"

#include <cctype>
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>

namespace emulator {

// --- Numbers ---

namespace {

float FlushToZero(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

}  // namespace

uint16_t Round(Type type, float x) {
  const uint32_t bits = BitsOf(x), sign = bits >> 16 & 0x8000;
  if (type == Type::kBF16) {
    if (x != x) return 0x7FFF;
    return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  }
  const float size = std::fabs(x);
  if (x != x) return 0x7FFF;
  if (size >= 65520.0f) return uint16_t(sign | 0x7C00);
  // Below 2^-14 the unit is 2^-24, and adding 1/2 rounds to it.
  if (size < FloatOf(0x38800000)) return uint16_t(sign | (BitsOf(size + 0.5f) - BitsOf(0.5f)));
  const uint32_t rounded = BitsOf(size) + 0xFFF + (bits >> 13 & 1);
  return uint16_t(sign | ((rounded >> 13) - (112 << 10)));
}

uint32_t NearestTF32(uint32_t bits) {
  return std::isfinite(FloatOf(bits)) ? (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFFu : bits;
}

float WidenF16(uint16_t x) {
  static const std::vector<float> table = [] {
    std::vector<float> values(1 << 16);
    for (uint32_t i = 0; i < values.size(); ++i) {
      const uint32_t exponent = i >> 10 & 31, fraction = i & 1023;
      const float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                         : exponent == 0 ? std::ldexp(float(fraction), -24)
                                         : std::ldexp(float(fraction + 1024), int(exponent) - 25);
      values[i] = i >> 15 ? -size : size;
    }
    return values;
  }();
  return table[x];
}

// --- Arguments ---

void* Step::Address(size_t i) const {
  const Argument& argument = statement.arguments.at(i);
  if (argument.kind != Argument::kOperand) Fail("%s: argument %zu is no operand", statement.opcode.c_str(), i);
  return operands[argument.value].data;
}

uint64_t Step::NoOperand(const Argument& argument) const {
  switch (argument.kind) {
    case Argument::kRegister:
      return registers[argument.value];
    case Argument::kClusterRank:
      return ClusterRank();
    case Argument::kLanesBelow:
      return (1u << Self().lane()) - 1;
    case Argument::kLanesFrom:
      return -(1u << Self().lane());
    default:
      return argument.value;
  }
}

// --- Instructions (numbers: sections of the PTX ISA 9.x) ---

namespace {

void Nothing(Step&) {}

void AddToGlobal(Step& s) {  // red: 9.7.13.7
  float* const sum = reinterpret_cast<float*>(s[0]);
  if (s[0] % (4 * (s.size() - 1)) != 0) Fail("red: address %p is not aligned", static_cast<void*>(sum));
  for (size_t i = 1; i < s.size(); ++i) sum[i - 1] += s.Float(i);
}

void Count(Step& s) {  // red: 9.7.13.7
  ++*reinterpret_cast<uint32_t*>(s[0]);
  Yield();
}

void LoadCounter(Step& s) {  // ld: 9.7.9.8
  Yield();
  s.Set(0, *reinterpret_cast<const uint32_t*>(s[1]));
}

void Round(Step& s) {  // cvt to a half, or to two, the first argument in the upper: 9.7.9.22
  const auto half = [&](float x) {
    return emulator::Round(s.statement.type, s.statement.relu && !(x > 0) && x == x ? 0.0f : x);
  };
  s.Set(0, s.size() == 2 ? half(s.Float(1)) : uint32_t(half(s.Float(1))) << 16 | half(s.Float(2)));
}

void NotBelow(Step& s) {  // set.geu of two halves: 9.7.7.1
  uint32_t mask = 0;
  for (int shift : {0, 16}) {
    const auto half = [&](size_t i) { return Widen(s.statement.type, uint16_t(s[i] >> shift)); };
    if (!(half(1) < half(2))) mask |= 0xFFFFu << shift;
  }
  s.Set(0, mask);
}

void RoundTF32(Step& s) {  // to nearest, ties away from zero: 9.7.9.22
  const uint32_t bits = uint32_t(s[1]);
  s.Set(0, std::isfinite(s.Float(1)) ? (bits + 0x1000) & ~0x1FFFu : bits);
}

void Move(Step& s) {
  if (s.size() == 2) return s.Set(0, s[1]);
  s.Set(0, s[2] & 0xFFFF), s.Set(1, s[2] >> 16 & 0xFFFF);
}

void LoadShared(Step& s) {  // ld: 9.7.9.8
  uint32_t x;
  std::memcpy(&x, Shared(uint32_t(s[1]), 4, 4), 4);
  s.Set(0, x);
}

// The first entry with a name that is a prefix of the opcode applies.
const struct {
  const char* name;
  void (*execute)(Step& s);
} kInstructions[] = {
    {"setp.ne.b32", [](Step& s) { s.Set(0, s[1] != s[2]); }},
    {"selp.u32", [](Step& s) { s.Set(0, s[3] ? s[1] : s[2]); }},
    {"mov.", Move},
    {"abs.bf16x2", [](Step& s) { s.Set(0, s[1] & 0x7FFF7FFF); }},  // 9.7.4.6
    {"set.geu.u32.bf16x2", NotBelow},
    {"cvt.rna.tf32.f32", RoundTF32},
    {"cvt.rn.tf32.f32", [](Step& s) { s.Set(0, NearestTF32(uint32_t(s[1]))); }},
    {"cvt.rn.", Round},
    {"cvt.f32.", [](Step& s) { s.SetFloat(0, Widen(s.statement.type, uint16_t(s[1]))); }},
    {"ex2.approx.ftz.f32", [](Step& s) { s.SetFloat(0, FlushToZero(std::exp2(FlushToZero(s.Float(1))))); }},
    {"lg2.approx.ftz.f32", [](Step& s) { s.SetFloat(0, std::log2(FlushToZero(s.Float(1)))); }},
    {"rcp.approx.ftz.f32", [](Step& s) { s.SetFloat(0, FlushToZero(1.0f / FlushToZero(s.Float(1)))); }},
    {"red.relaxed.gpu.global.add", AddToGlobal},
    {"red.release.gpu.global.add.u32", Count},
    {"ld.relaxed.gpu.global.u32", LoadCounter},
    {"nanosleep.u32", [](Step&) { Sleep(); }},
    {"setmaxnreg.", [](Step& s) { s.WarpCollective([](void* const*) {}); }},
    {"cp.async.bulk.prefetch.tensor.4d.L2.global", Nothing},
    {"fence.proxy.async.global", Nothing},
    {"fence.acq_rel.gpu", Nothing},
    {"fence.proxy.async", [](Step& s) { FenceProxyAsync(s.caller); }},
    {"fence.mbarrier_init", Nothing},
    {"barrier.cta.sync", [](Step& s) { ArriveAt(int(s[0]), int(s[1]), true); }},
    {"barrier.cta.arrive", [](Step& s) { ArriveAt(int(s[0]), int(s[1]), false); }},
    {"barrier.cluster.arrive", [](Step&) { ArriveAtCluster(); }},
    {"barrier.cluster.wait", [](Step&) { WaitForCluster(); }},
    {"mapa.shared::cluster.u32", [](Step& s) { s.Set(0, (s[1] & 0xFFFFFF) | s[2] << 24); }},
    {"ld.shared.b32", LoadShared},
    {"ld.shared::cluster.u32", LoadShared},
    {"ldmatrix.", Ldmatrix},
    {"stmatrix.", Stmatrix},
    {"movmatrix.", Movmatrix},
    {"mma.sync.", MmaSync},
    {"wgmma.fence", WgmmaFence},
    {"wgmma.mma_async", WgmmaIssue},
    {"wgmma.commit_group", WgmmaCommit},
    {"wgmma.wait_group", WgmmaWait},
    {"mbarrier.init", MbarrierInit},
    {"mbarrier.arrive.expect_tx", MbarrierArriveExpectTx},
    {"mbarrier.arrive", MbarrierArrive},
    {"mbarrier.try_wait.parity", MbarrierTryWait},
    {"cp.async.cg.shared.global", CpAsync},
    {"cp.async.commit_group", [](Step&) { Self().cp_async.Commit(); }},
    {"cp.async.wait_group", [](Step& s) { Self().cp_async.WaitForAllBut(s[0]); }},
    {"cp.async.bulk.commit_group", [](Step&) { Self().bulk.Commit(); }},
    {"cp.async.bulk.wait_group", [](Step& s) { Self().bulk.WaitForAllBut(s[0]); }},
    {"cp.async.bulk.tensor.4d.shared::cluster.global.", TmaLoad},
    {"cp.async.bulk.tensor.4d.global.shared::cta.", TmaStore},
    {"cp.async.bulk.shared::cluster.global.", BulkLoad},
    {"cp.async.bulk.global.shared::cta.", BulkStore},
    {"cp.async.bulk.shared::cluster.shared::cta.", BulkPeerCopy},
    {"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", BulkReduceAdd},
};

}  // namespace

// --- Text ---

struct Ptx {
  std::vector<Statement> statements;
  size_t registers;
};

const Ptx* Parse(const char* text) {
  Ptx* const ptx = new Ptx;
  std::map<std::string, int> registers;
  const char* at = text;
  const auto word = [&] {  // the next word without punctuation; "" at the end of a statement
    while (*at && *at != ';' && std::strchr(" \n\t,[]{}", *at)) ++at;
    const char* const begin = at;
    while (*at && !std::strchr(" \n\t,[]{};", *at)) ++at;
    return std::string(begin, at);
  };
  const auto argument = [&](const std::string& x) -> Argument {
    if (x == "_") return {Argument::kDiscarded, 0};
    if (x == "%%cluster_ctarank") return {Argument::kClusterRank, 0};
    if (x == "%%lanemask_lt") return {Argument::kLanesBelow, 0};
    if (x == "%%lanemask_ge") return {Argument::kLanesFrom, 0};
    if (x[0] == '%') return {Argument::kOperand, std::atoi(x.c_str() + 1)};
    if (std::isdigit(x[0])) return {Argument::kImmediate, std::atoi(x.c_str())};
    if (!registers.count(x)) Fail("PTX: %s is not known in: %s", x.c_str(), text);
    return {Argument::kRegister, registers[x]};
  };
  for (; *at; at += *at == ';') {
    Statement statement;
    std::string opcode = word();
    if (opcode.empty()) continue;
    if (opcode == ".reg") {
      word();  // its type
      for (std::string name = word(); !name.empty(); name = word()) registers.emplace(name, int(registers.size()));
      continue;
    }
    if (opcode[0] == '@') statement.guard = int(argument(opcode.substr(1)).value), opcode = word();
    for (std::string x = word(); !x.empty(); x = word()) statement.arguments.push_back(argument(x));
    const auto has = [&](const char* modifier) { return opcode.find(modifier) != std::string::npos; };
    statement.type = has("tf32") ? Type::kTF32 : has("bf16") ? Type::kBF16 : Type::kF16;
    statement.transposed = has(".trans"), statement.relu = has(".relu");
    statement.execute = nullptr;
    for (const auto& instruction : kInstructions) {
      if (opcode.rfind(instruction.name, 0) == 0 && !statement.execute) statement.execute = instruction.execute;
    }
    if (!statement.execute) Fail("PTX: the emulator has no %s (ptx.cc)", opcode.c_str());
    statement.opcode = std::move(opcode);
    ptx->statements.push_back(std::move(statement));
  }
  ptx->registers = registers.size();
  return ptx;
}

void Execute(const Ptx* ptx, const void* caller, std::initializer_list<Operand> operands) {
  uint64_t registers[8];
  for (const Statement& statement : ptx->statements) {
    if (statement.guard >= 0 && !registers[statement.guard]) continue;
    Step step = {statement, caller, operands.begin(), registers};
    statement.execute(step);
  }
}

}  // namespace emulator

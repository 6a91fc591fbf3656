// The instructions of the kernels' asm statements.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "machine.h"

namespace emulator {

enum class Type { kF16, kBF16, kTF32 };

inline float FloatOf(uint32_t bits) { return emulated_bits<float>(bits); }
inline uint32_t BitsOf(float x) { return emulated_bits<uint32_t>(x); }

// Rounds a float32 to 16 bits, to nearest even, and back.
uint16_t Round(Type type, float x);
float WidenF16(uint16_t x);
inline float Widen(Type type, uint16_t x) { return type == Type::kBF16 ? FloatOf(uint32_t(x) << 16) : WidenF16(x); }
// Rounds the bits of a float32 to TF32, to nearest even.
uint32_t NearestTF32(uint32_t bits);

struct Argument {
  enum Kind { kOperand, kRegister, kImmediate, kClusterRank, kLanesBelow, kLanesFrom, kDiscarded } kind;
  int64_t value;
};

struct Step;

// One instruction. Its arguments are in the order of the text, without brackets and braces.
struct Statement {
  std::string opcode;
  std::vector<Argument> arguments;
  int guard = -1;  // the register of its predicate
  void (*execute)(Step& step);
  // Modifiers of the opcode.
  Type type;
  bool transposed, relu;
};

// A statement that one thread executes.
struct Step {
  const Statement& statement;
  const void* caller;
  const Operand* operands;
  uint64_t* registers;

  size_t size() const { return statement.arguments.size(); }
  void* Address(size_t i) const;                       // of an operand
  uint64_t NoOperand(const Argument& argument) const;  // the value of another argument

  // Most operands have 4 bytes, which need no call of memcpy.
  uint64_t operator[](size_t i) const {
    const Argument& argument = statement.arguments.at(i);
    if (argument.kind != Argument::kOperand) return NoOperand(argument);
    const Operand& from = operands[argument.value];
    if (from.bytes == 4) return *static_cast<const uint32_t*>(from.data);
    uint64_t x = 0;
    std::memcpy(&x, from.data, from.bytes);
    return x;
  }
  void Set(size_t i, uint64_t x) const {
    const Argument& argument = statement.arguments.at(i);
    if (argument.kind == Argument::kRegister) registers[argument.value] = x;
    if (argument.kind != Argument::kOperand) return;
    const Operand& to = operands[argument.value];
    if (to.bytes == 4) {
      *static_cast<uint32_t*>(to.data) = uint32_t(x);
    } else {
      std::memcpy(to.data, &x, to.bytes);
    }
  }
  float Float(size_t i) const { return FloatOf(uint32_t((*this)[i])); }
  void SetFloat(size_t i, float x) const { Set(i, BitsOf(x)); }

  // Runs a collective operation of the warp on the steps of all lanes.
  void WarpCollective(void (*compute)(void* const* lanes)) {
    emulator::WarpCollective(&statement, this, compute, statement.opcode.c_str());
  }
};

inline Step& StepOf(void* lane) { return *static_cast<Step*>(lane); }

// tensor_cores.cc
void Ldmatrix(Step& step);
void Stmatrix(Step& step);
void Movmatrix(Step& step);
void MmaSync(Step& step);
void WgmmaFence(Step& step);
void WgmmaIssue(Step& step);
void WgmmaCommit(Step& step);
void WgmmaWait(Step& step);

// async.cc
void MbarrierInit(Step& step);
void MbarrierArrive(Step& step);
void MbarrierArriveExpectTx(Step& step);
void MbarrierTryWait(Step& step);
void CpAsync(Step& step);
void TmaLoad(Step& step);
void TmaStore(Step& step);
void BulkLoad(Step& step);
void BulkStore(Step& step);
void BulkPeerCopy(Step& step);
void BulkReduceAdd(Step& step);

}  // namespace emulator

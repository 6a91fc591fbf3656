// The instructions of the kernels' asm statements.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "machine.h"

namespace emulator {

enum class Type { kF16, kBF16, kTF32 };

// The bits of an f32, to nearest even; and back.
uint16_t Round(Type type, float x);
float Widen(Type type, uint16_t x);
// The bits of the TF32 nearest to those of an f32; of two the even one.
uint32_t NearestTF32(uint32_t bits);

struct Argument {
  enum Kind { kOperand, kRegister, kImmediate, kClusterRank, kLanesBelow, kLanesFrom, kNowhere } kind;
  int64_t value;
};

struct Step;

// One instruction: its arguments in the order of the text, whatever brackets and braces are around them.
struct Statement {
  std::string opcode;
  std::vector<Argument> arguments;
  int guard = -1;  // the register of its predicate
  void (*execute)(Step& step);
  // Of the opcode.
  Type type;
  bool transposed, relu;
};

// A statement as one thread executes it.
struct Step {
  const Statement& statement;
  const Operand* operands;
  uint64_t* registers;

  size_t size() const { return statement.arguments.size(); }
  void* Place(size_t i) const;  // of an operand
  uint64_t operator[](size_t i) const;
  float Float(size_t i) const;
  void Set(size_t i, uint64_t x) const;
  void SetFloat(size_t i, float x) const;

  // For what the lanes of a warp do together: each brings its step.
  void Together(void (*compute)(void* const* lanes)) {
    emulator::Together(&statement, this, compute, statement.opcode.c_str());
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

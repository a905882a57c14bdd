// A machine that executes PTX, one warp instruction after another, and detects silent faults of a GPU.
//
// A warp's 32 lanes step together; where they diverge, the lanes that are furthest behind run first. Warps of a block
// run until they have to wait; blocks run one after another. What is asynchronous on a GPU (copies into shared memory,
// products of a warp group) happens at once or as late as the program permits, at random: a missing wait shows.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ptx {

constexpr int LANES = 32;
constexpr uint32_t ALL = 0xFFFFFFFFu;
constexpr uint64_t POISON = 0x7FFF7FFF7FFF7FFFull;  // NaN as a float of 64, 32 and 16 bits
constexpr uint32_t SHARED_BASE = 0x400;             // where a block's shared memory begins on Hopper

using Register = std::array<uint64_t, LANES>;

struct Fault : std::runtime_error {
  using runtime_error::runtime_error;
};

struct Warp;
struct Instruction;
using Execute = void (*)(Warp&, const Instruction&, uint32_t mask);

struct Operand {
  int slot;            // of a register, or of a constant, which is kept as one
  int64_t offset = 0;  // [register + offset]
};

struct Instruction {
  Execute execute = nullptr;
  std::vector<Operand> args;  // vectors and address lists are laid out flat, as written
  int guard = -1;             // slot of the predicate
  bool negated = false;
  bool converged = false;        // all lanes that have not exited must execute it together
  bool watches_products = true;  // false: may run beside pending products of a warp group
  int target = -1;               // of a branch
  int vector = 1, bytes = 0;     // of a memory access: elements, bytes of each
  bool is_signed = false;
  int mode = 0, extent = 0;  // of some instructions
  uint64_t number = 0;
  std::string text;
  int file = 0, line = 0;  // of the kernel's Python
};

struct Parameter {
  std::string name;
  int offset, bytes;
};

struct Program {
  std::string name;
  std::vector<Instruction> instructions;
  std::vector<Parameter> parameters;
  int parameter_bytes = 0, slots = 0;
  std::vector<std::pair<int, uint64_t>> constants;            // slot, value
  std::vector<std::pair<int, std::string>> symbols, special;  // slot, name
  std::map<int, std::string> files;
};

struct Copy {  // into shared memory, pending
  uint32_t to;
  uint64_t from;
  uint32_t bytes, valid;
};

struct Product {  // of a warp group, pending
  const Instruction* instruction;
  uint64_t a, b;
  bool accumulates;
};

struct Block;

struct Warp {
  Block* block = nullptr;
  int index = 0;
  std::vector<Register> registers;
  std::array<int, LANES> pc{};
  uint32_t live = ALL;
  int waits_at = -1;    // the barrier it has arrived at
  bool yields = false;  // it polls: others first
  uint64_t steps = 0;
  std::vector<Copy> copies;                    // not committed
  std::vector<std::vector<Copy>> copy_groups;  // committed, the oldest first
  std::vector<Product> products;               // not committed
  std::vector<std::vector<Product>> product_groups;
};

struct Phase {  // of an mbarrier
  int64_t expected = 0, pending = 0, bytes = 0;
  uint32_t parity = 0;
};

struct Bulk {  // a pending copy by the tensor memory unit
  std::array<int32_t, 5> at{};
  const struct Map* map;
  uint32_t to;
};

struct Map {  // contents of a tensor descriptor, at the place of a CUtensorMap's 128 bytes
  uint64_t base;
  uint64_t extents[5];
  uint64_t strides[5];  // bytes, the innermost first
  uint32_t box[5];
  uint32_t rank, bytes, swizzle, fills_nan;
};

struct BlockProduct {  // of Blackwell, pending; or, with a barrier, a request to arrive there
  uint32_t out;
  uint64_t a, b;
  uint32_t shape;
  bool accumulates, fp8, left_in_tensor_memory;
  uint32_t barrier;
};

struct Block {
  const Program* program = nullptr;
  std::vector<uint8_t> shared;
  std::vector<Warp> warps;
  std::map<int, std::pair<int, int>> arrived;   // at each barrier: threads, and how many it waits for (0: all)
  std::map<uint32_t, Phase> phases;             // by address
  std::map<uint32_t, std::vector<Bulk>> bulks;  // by the address of their mbarrier
  std::vector<uint32_t> tensor_memory;          // 128 lanes of 512 columns
  uint32_t tensor_columns = 0;                  // allocated
  std::vector<BlockProduct> block_products;     // in their order
  const std::vector<std::pair<uint64_t, uint64_t>>* ranges = nullptr;  // of global memory, sorted
  std::mt19937 chance;

  bool late() { return chance() & 1; }
};

template <class T>
T as(uint64_t raw) {
  T value;
  std::memcpy(&value, &raw, sizeof value);
  return value;
}

template <class T>
uint64_t raw(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

template <class F>
void lanes(uint32_t mask, F&& f) {
  if (mask == ALL)
    for (int lane = 0; lane < LANES; ++lane) f(lane);
  else
    for (; mask; mask &= mask - 1) f(__builtin_ctz(mask));
}

inline Register& reg(Warp& warp, const Instruction& i, int arg) { return warp.registers[i.args[arg].slot]; }
inline uint64_t address(Warp& warp, const Instruction& i, int arg, int lane) {
  return reg(warp, i, arg)[lane] + i.args[arg].offset;
}
inline uint64_t uniform(Warp& warp, const Instruction& i, int arg, uint32_t mask) {
  return reg(warp, i, arg)[__builtin_ctz(mask)];
}

std::vector<std::string> parts_of(const std::string& opcode);
bool has(const std::vector<std::string>& parts, const char* part);

// Each sets the function that executes an opcode; false if the opcode is unknown.
bool arithmetic(const std::string& opcode, Instruction& i);
bool bits(const std::string& opcode, Instruction& i);
bool conversion(const std::string& opcode, Instruction& i);
bool memory(const std::string& opcode, Instruction& i);
bool tensor_core(const std::string& opcode, Instruction& i);
bool tensor_memory(const std::string& opcode, Instruction& i);
bool bulk_copy(const std::string& opcode, Instruction& i);
bool control(const std::string& opcode, Instruction& i);

std::unique_ptr<Program> parse(const std::string& text);

uint8_t* shared_bytes(Block& block, uint32_t address, uint32_t bytes, uint32_t alignment);
uint8_t* global_bytes(Block& block, uint64_t address, uint32_t bytes, uint32_t alignment);
void finish_copies(Warp& warp, size_t keep);
void finish_products(Warp& warp, size_t keep);
void finish_bulks(Block& block, uint32_t barrier);
void finish_block_products(Block& block, uint32_t barrier);
void arrive_at(Block& block, uint32_t barrier);
float small_float(uint8_t bits, bool e5m2);

inline float from_bf16(uint16_t bits) { return as<float>(uint64_t(bits) << 16); }

}  // namespace ptx

// Runs a program over a grid; the functions that Python calls.
#include "machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>

namespace ptx {

void settle(Warp& w, const Instruction& i);

namespace {

constexpr uint64_t MOST_STEPS = 1'000'000;  // of a warp: beyond it, a wait never ends

struct Launch {
  const Program* program;
  std::array<uint32_t, 3> grid;
  uint32_t threads, shared, seed;
  const uint8_t* parameters;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  uint64_t steps = 0;
};

uint64_t special(const std::string& name, const Launch& launch, const std::array<uint32_t, 3>& block, int warp,
                 int lane) {
  if (name.size() > 2 && name[name.size() - 2] == '.') {
    int axis = name.back() - 'x';
    std::string which = name.substr(0, name.size() - 2);
    if (which == "%tid") return axis == 0 ? warp * LANES + lane : 0;
    if (which == "%ntid") return axis == 0 ? launch.threads : 1;
    if (which == "%ctaid") return block[axis];
    if (which == "%nctaid") return launch.grid[axis];
  }
  if (name == "%laneid") return lane;
  if (name == "%warpid") return warp;
  if (name == "%smid" || name == "%globaltimer" || name == "%clock" || name == "%clock64") return 0;
  throw Fault("the emulator has no register " + name);
}

void fill(Warp& warp, const Launch& launch, const std::array<uint32_t, 3>& at) {
  Register poison;
  poison.fill(POISON);
  const Program& program = *launch.program;
  warp.registers.assign(program.slots, poison);
  for (auto [slot, value] : program.constants) warp.registers[slot].fill(value);
  for (auto& [slot, name] : program.symbols) {
    uint64_t value = SHARED_BASE;
    if (name != "global_smem") {
      auto found = std::find_if(program.parameters.begin(), program.parameters.end(),
                                [&name = name](const Parameter& p) { return p.name == name; });
      if (found == program.parameters.end()) throw Fault("the emulator does not know the symbol " + name);
      value = reinterpret_cast<uint64_t>(launch.parameters + found->offset);
    }
    warp.registers[slot].fill(value);
  }
  for (auto& [slot, name] : program.special)
    for (int lane = 0; lane < LANES; ++lane) warp.registers[slot][lane] = special(name, launch, at, warp.index, lane);
}

// Executes one instruction, for the lanes that are furthest behind.
const Instruction& step(Warp& w) {
  const auto& instructions = w.block->program->instructions;
  int at = w.pc[__builtin_ctz(w.live)];
  uint32_t here = 0;
  lanes(w.live, [&](int l) { at = std::min(at, w.pc[l]); });
  lanes(w.live, [&](int l) { here |= uint32_t(w.pc[l] == at) << l; });
  if (size_t(at) >= instructions.size()) throw Fault("the program ends without a return");
  const Instruction& i = instructions[at];
  lanes(here, [&](int l) { ++w.pc[l]; });
  uint32_t mask = here;
  if (i.guard >= 0) {
    const Register& guard = w.registers[i.guard];
    lanes(here, [&](int l) {
      if (bool(guard[l] & 1) == i.negated) mask &= ~(1u << l);
    });
  }
  try {
    if (i.converged && here != w.live) throw Fault("only some lanes of the warp execute this instruction");
    if (i.watches_products && (!w.products.empty() || !w.product_groups.empty())) settle(w, i);
    if (mask) i.execute(w, i, mask);
    if (++w.steps > MOST_STEPS) throw Fault("the block does not end");
  } catch (const Fault& fault) {
    const auto& files = w.block->program->files;
    auto file = files.find(i.file);
    throw Fault(std::string(fault.what()) + "; warp " + std::to_string(w.index) + ", " +
                (file == files.end() ? "" : file->second + ":" + std::to_string(i.line) + ", ") + "`" +
                i.text.substr(0, 160) + "`");
  }
  return i;
}

// Runs a warp until it ends, waits at a barrier, or polls without success.
void run(Warp& w) {
  w.yields = false;
  while (w.live && w.waits_at < 0 && !w.yields) step(w);
  if (!w.live) {
    w.copy_groups.push_back(std::move(w.copies));
    finish_copies(w, 0);
  }
}

void release(Block& block) {
  int living = 0;
  for (const Warp& w : block.warps) living += w.live ? LANES : 0;
  for (auto& [which, count] : block.arrived) {
    auto& [arrived, awaited] = count;
    if (!arrived || arrived < (awaited ? awaited : living)) continue;
    for (Warp& w : block.warps)
      if (w.waits_at == which) w.waits_at = -1;
    arrived = 0;
  }
}

void run_block(Launch& launch, const std::array<uint32_t, 3>& at, uint32_t number) {
  Block block;
  block.program = launch.program, block.ranges = &launch.ranges;
  block.shared.resize(launch.shared), block.warps.resize(launch.threads / LANES);
  block.chance.seed(launch.seed * 7919 + number);
  for (size_t n = 0; n < block.shared.size(); n += 2) {
    const uint16_t poison = uint16_t(POISON);
    std::memcpy(&block.shared[n], &poison, std::min<size_t>(2, block.shared.size() - n));
  }
  std::vector<int> order;
  for (size_t n = 0; n < block.warps.size(); ++n) {
    block.warps[n].block = &block, block.warps[n].index = int(n);
    fill(block.warps[n], launch, at);
    order.push_back(int(n));
  }
  for (bool living = true; living;) {
    std::shuffle(order.begin(), order.end(), block.chance);
    living = false;
    bool moved = false;
    for (int n : order) {
      Warp& w = block.warps[n];
      if (!w.live || w.waits_at >= 0) continue;
      run(w), moved = true;
    }
    release(block);
    for (const Warp& w : block.warps) living = living || w.live;
    if (living && !moved &&
        std::all_of(block.warps.begin(), block.warps.end(), [](const Warp& w) { return !w.live || w.waits_at >= 0; }))
      throw Fault("a deadlock: every warp waits at a barrier");
  }
  for (const Warp& w : block.warps) launch.steps += w.steps;
}

void run_grid(Launch& launch) {
  std::vector<uint32_t> order(launch.grid[0] * launch.grid[1] * launch.grid[2]);
  for (uint32_t n = 0; n < order.size(); ++n) order[n] = n;
  std::mt19937 chance(launch.seed);
  std::shuffle(order.begin(), order.end(), chance);
  for (uint32_t n : order) {
    std::array<uint32_t, 3> at = {n % launch.grid[0], n / launch.grid[0] % launch.grid[1],
                                  n / launch.grid[0] / launch.grid[1]};
    try {
      run_block(launch, at, n);
    } catch (const Fault& fault) {
      throw Fault(std::string(fault.what()) + ", in block (" + std::to_string(at[0]) + ", " + std::to_string(at[1]) +
                  ", " + std::to_string(at[2]) + ")");
    }
  }
}

int tell(const std::exception& error, char* message, int room) {
  std::snprintf(message, room, "%s", error.what());
  return 1;
}


// A copy at an address of 32 bits, which is what Triton 3.9 takes those of parameters for.
const uint8_t* at_low_address(const void* parameters, size_t bytes) {
  constexpr size_t ROOM = 1 << 16;
  static void* memory = mmap(reinterpret_cast<void*>(1ul << 28), ROOM, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || reinterpret_cast<uint64_t>(memory) >> 32 || bytes > ROOM)
    throw Fault("no memory for parameters below 4 GiB");
  std::memcpy(memory, parameters, bytes);
  return static_cast<const uint8_t*>(memory);
}
}  // namespace
}  // namespace ptx

extern "C" {

// A program from PTX text; or null, with the reason in `message`.
void* ptx_load(const char* text, char* message, int room) {
  try {
    return ptx::parse(text).release();
  } catch (const std::exception& error) {
    ptx::tell(error, message, room);
    return nullptr;
  }
}

// Writes offset and bytes of each parameter, as pairs; returns their number.
int ptx_parameters(void* program, int* pairs, int room) {
  const auto& parameters = static_cast<ptx::Program*>(program)->parameters;
  for (size_t n = 0; n < parameters.size() && int(n) < room; ++n)
    pairs[2 * n] = parameters[n].offset, pairs[2 * n + 1] = parameters[n].bytes;
  return int(parameters.size());
}

// Runs a grid of blocks. `ranges`: first byte and last byte + 1 of each accessible tensor, sorted and disjoint.
int ptx_launch(void* program, const uint32_t* grid, uint32_t threads, uint32_t shared, uint32_t seed,
               const void* parameters, const uint64_t* ranges, int count, uint64_t* steps, char* message, int room) {
  ptx::Launch launch{static_cast<ptx::Program*>(program),
                     {grid[0], grid[1], grid[2]},
                     threads,
                     shared,
                     seed,
                     nullptr,
                     {}};
  for (int n = 0; n < count; ++n) launch.ranges.emplace_back(ranges[2 * n], ranges[2 * n + 1]);
  try {
    launch.parameters = ptx::at_low_address(parameters, launch.program->parameter_bytes);
    ptx::run_grid(launch);
  } catch (const std::exception& error) { return ptx::tell(error, message, room); }
  *steps = launch.steps;
  return 0;
}
}

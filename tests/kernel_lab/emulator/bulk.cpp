// The tensor memory unit of Hopper: boxes copied by a descriptor, and the mbarriers that count their bytes.
#include <algorithm>

#include "machine.h"

namespace ptx {
namespace {

uint32_t swizzled(uint32_t address, uint32_t swizzle) {  // 32, 64 or 128 bytes, 0 for none
  return swizzle ? address ^ ((address >> 7 & (swizzle / 16 - 1)) << 4) : address;
}

template <class F>
void each_row(const Map& map, const std::array<int32_t, 5>& at, F&& f) {  // f(offset in the box, row's address, valid)
  uint32_t rows = 1;
  for (uint32_t d = 1; d < map.rank; ++d) rows *= map.box[d];
  for (uint32_t row = 0; row < rows; ++row) {
    uint64_t address = map.base;
    bool inside = true;
    uint32_t rest = row;
    for (uint32_t d = 1; d < map.rank; ++d) {
      int64_t index = int64_t(at[d]) + rest % map.box[d];
      rest /= map.box[d];
      inside = inside && index >= 0 && index < int64_t(map.extents[d]);
      address += uint64_t(index) * map.strides[d];
    }
    f(row * map.box[0] * map.bytes, address, inside);
  }
}

uint32_t box_bytes(const Map& map) {
  uint32_t bytes = map.bytes;
  for (uint32_t d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return bytes;
}

template <class F>
void each_element(Block& block, const Bulk& bulk, F&& f) {  // f(in shared memory, in global memory or null)
  const Map& map = *bulk.map;
  each_row(map, bulk.at, [&](uint32_t offset, uint64_t address, bool inside) {
    for (uint32_t n = 0; n < map.box[0]; ++n) {
      int64_t column = int64_t(bulk.at[0]) + n;
      bool valid = inside && column >= 0 && column < int64_t(map.extents[0]);
      uint32_t to = swizzled(bulk.to + offset + n * map.bytes, map.swizzle);
      uint64_t from = address + uint64_t(column) * map.bytes;
      f(shared_bytes(block, to, map.bytes, 1), valid ? global_bytes(block, from, map.bytes, map.bytes) : nullptr);
    }
  });
}

void fetch(Block& block, const Bulk& bulk) {
  const Map& map = *bulk.map;
  const uint16_t nan = 0x7FFF;
  each_element(block, bulk, [&](uint8_t* to, const uint8_t* from) {
    if (from) std::memcpy(to, from, map.bytes);
    else if (map.fills_nan && map.bytes == 2) std::memcpy(to, &nan, 2);
    else std::memset(to, 0, map.bytes);
  });
}

Phase& phase_at(Block& block, uint32_t address) {
  auto found = block.phases.find(address);
  if (found == block.phases.end()) throw Fault("an mbarrier that was not initialized");
  return found->second;
}
void advance(Phase& phase) {
  if (phase.pending == 0 && phase.bytes == 0) phase.pending = phase.expected, phase.parity ^= 1;
}

const Map& map_at(Warp& w, const Instruction& i, int arg, uint32_t mask) {
  return *reinterpret_cast<const Map*>(uniform(w, i, arg, mask));
}
void check(const Map& map, uint32_t shared) {
  uint32_t alignment = map.swizzle ? map.swizzle * 8 : 128;
  if (shared % alignment)
    throw Fault("a bulk copy to or from shared memory that is not aligned to " + std::to_string(alignment));
}

// cp.async.bulk.tensor.Nd.shared::cluster.global.mbarrier::complete_tx::bytes [to], [map, {at}], [barrier]
void bulk_load(Warp& w, const Instruction& i, uint32_t mask) {
  lanes(mask, [&](int l) {
    uint32_t one = 1u << l;
    Bulk bulk{{}, &map_at(w, i, 1, one), uint32_t(address(w, i, 0, l))};
    int rank = i.extent;
    if (bulk.map->rank != uint32_t(rank)) throw Fault("a descriptor of another rank");
    for (int d = 0; d < rank; ++d) bulk.at[d] = int32_t(reg(w, i, 2 + d)[l]);
    check(*bulk.map, bulk.to);
    uint32_t barrier = uint32_t(address(w, i, 2 + rank, l));
    phase_at(*w.block, barrier);
    w.block->bulks[barrier].push_back(bulk);
    if (!w.block->late()) finish_bulks(*w.block, barrier);
  });
}

// cp.async.bulk.tensor.Nd.global.shared::cta.bulk_group [map, {at}], [from]: what is written is visible at once
void bulk_store(Warp& w, const Instruction& i, uint32_t mask) {
  lanes(mask, [&](int l) {
    Bulk bulk{{}, &map_at(w, i, 0, 1u << l), uint32_t(address(w, i, 1 + i.extent, l))};
    for (int d = 0; d < i.extent; ++d) bulk.at[d] = int32_t(reg(w, i, 1 + d)[l]);
    check(*bulk.map, bulk.to);
    each_element(*w.block, bulk, [&](const uint8_t* from, uint8_t* to) {
      if (to) std::memcpy(to, from, bulk.map->bytes);
    });
  });
}

void initialise(Warp& w, const Instruction& i, uint32_t mask) {
  lanes(mask, [&](int l) {
    uint32_t at = uint32_t(address(w, i, 0, l));
    shared_bytes(*w.block, at, 8, 8);
    int64_t count = int64_t(uint32_t(reg(w, i, 1)[l]));
    if (w.block->phases.count(at)) throw Fault("an mbarrier is initialized while it is in use");
    w.block->phases[at] = {count, count, 0, 0};
  });
}
void invalidate(Warp& w, const Instruction& i, uint32_t mask) {
  lanes(mask, [&](int l) {
    uint32_t at = uint32_t(address(w, i, 0, l));
    phase_at(*w.block, at);
    if (!w.block->bulks[at].empty()) throw Fault("an mbarrier is invalidated while copies to it are pending");
    w.block->phases.erase(at);
  });
}
void arrive_expecting(Warp& w, const Instruction& i, uint32_t mask) {  // mbarrier.arrive.expect_tx _, [at], bytes
  lanes(mask, [&](int l) {
    uint32_t at = uint32_t(address(w, i, 1, l));
    phase_at(*w.block, at).bytes += uint32_t(reg(w, i, 2)[l]);
    arrive_at(*w.block, at);
  });
}
void arrive(Warp& w, const Instruction& i, uint32_t mask) {  // mbarrier.arrive _, [at]{, count}
  lanes(mask, [&](int l) {
    uint32_t count = i.args.size() > 2 ? uint32_t(reg(w, i, 2)[l]) : 1;
    while (count--) arrive_at(*w.block, uint32_t(address(w, i, 1, l)));
  });
}
void try_wait(Warp& w, const Instruction& i, uint32_t mask) {  // mbarrier.try_wait.parity done, [at], parity
  lanes(mask, [&](int l) {
    uint32_t at = uint32_t(address(w, i, 1, l)), parity = uint32_t(reg(w, i, 2)[l]) & 1;
    phase_at(*w.block, at);
    finish_bulks(*w.block, at);
    finish_block_products(*w.block, at);
    bool done = phase_at(*w.block, at).parity != parity;
    reg(w, i, 0)[l] = done;
    if (!done) w.yields = true;
  });
}
void elect(Warp& w, const Instruction& i, uint32_t mask) {  // elect.sync lane|chosen, members
  int leader = __builtin_ctz(mask);
  lanes(mask, [&](int l) { reg(w, i, 0)[l] = leader, reg(w, i, 1)[l] = l == leader; });
}
void nothing(Warp&, const Instruction&, uint32_t) {}

}  // namespace

void arrive_at(Block& block, uint32_t barrier) {
  Phase& phase = phase_at(block, barrier);
  if (--phase.pending < 0) throw Fault("more arrive at an mbarrier than it was initialized for");
  advance(phase);
}

void finish_bulks(Block& block, uint32_t barrier) {
  auto found = block.bulks.find(barrier);
  if (found == block.bulks.end()) return;
  for (const Bulk& bulk : found->second) {
    fetch(block, bulk);
    Phase& phase = phase_at(block, barrier);
    phase.bytes -= box_bytes(*bulk.map);
    advance(phase);
  }
  found->second.clear();
}

bool bulk_copy(const std::string& opcode, Instruction& i) {
  auto parts = parts_of(opcode);
  if (opcode.rfind("cp.async.bulk.tensor.", 0) == 0) {
    i.extent = parts[4][0] - '0';
    i.execute = parts[5] == "global" ? bulk_store : bulk_load;
  } else if (opcode.rfind("cp.async.bulk.commit_group", 0) == 0 || opcode.rfind("cp.async.bulk.wait_group", 0) == 0) {
    i.execute = nothing;
  } else if (parts[0] == "mbarrier") {
    i.execute = parts[1] == "init"        ? initialise
                : parts[1] == "inval"     ? invalidate
                : parts[1] == "try_wait"  ? try_wait
                : has(parts, "expect_tx") ? arrive_expecting
                                          : arrive;
  } else if (opcode == "elect.sync") {
    i.execute = elect, i.converged = true;
  } else if (parts[0] == "fence" || parts[0] == "membar") {
    i.execute = nothing;
  } else {
    return false;
  }
  return true;
}

}  // namespace ptx

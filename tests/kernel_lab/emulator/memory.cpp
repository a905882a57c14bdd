// Loads, stores, atomics and copies into shared memory; every address is checked.
#include <algorithm>

#include "machine.h"

namespace ptx {

static std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", (unsigned long long)value);
  return text;
}

uint8_t* shared_bytes(Block& block, uint32_t address, uint32_t bytes, uint32_t alignment) {
  if (address < SHARED_BASE || address - SHARED_BASE + uint64_t(bytes) > block.shared.size())
    throw Fault("byte " + std::to_string(int64_t(address) - SHARED_BASE) + " of " +
                std::to_string(block.shared.size()) + " bytes of shared memory");
  if (address % alignment)
    throw Fault("misaligned: " + hex(address) + " in shared memory, for " + std::to_string(alignment) + " bytes");
  return block.shared.data() + (address - SHARED_BASE);
}

uint8_t* global_bytes(Block& block, uint64_t address, uint32_t bytes, uint32_t alignment) {
  auto after = std::upper_bound(block.ranges->begin(), block.ranges->end(), std::make_pair(address, ~uint64_t(0)));
  if (after == block.ranges->begin() || std::prev(after)->second < address + bytes) {
    std::string where = " outside every tensor";
    if (after != block.ranges->begin()) {
      auto [first, last] = *std::prev(after);
      where = ": byte " + std::to_string(address - first) + " of a tensor of " + std::to_string(last - first);
    }
    throw Fault("out of bounds" + where);
  }
  if (address % alignment) throw Fault("misaligned: " + hex(address) + ", for " + std::to_string(alignment) + " bytes");
  return reinterpret_cast<uint8_t*>(address);
}

namespace {

enum Space { GLOBAL, SHARED, PARAMETER };

Space space_of(const std::vector<std::string>& parts) {
  for (const auto& part : parts)
    if (part.rfind("shared", 0) == 0) return SHARED;
  return has(parts, "param") ? PARAMETER : GLOBAL;
}

uint8_t* bytes_at(Warp& w, const Instruction& i, uint64_t address, uint32_t bytes) {
  if (i.mode == PARAMETER) return reinterpret_cast<uint8_t*>(address);
  if (i.mode == SHARED) return shared_bytes(*w.block, uint32_t(address), bytes, bytes);
  return global_bytes(*w.block, address, bytes, bytes);
}

uint64_t read(const uint8_t* from, const Instruction& i) {
  uint64_t value = 0;
  std::memcpy(&value, from, i.bytes);
  if (i.is_signed && i.bytes < 8) value = uint64_t(int64_t(value << (64 - 8 * i.bytes)) >> (64 - 8 * i.bytes));
  return value;
}

void load(Warp& w, const Instruction& i, uint32_t mask) {
  lanes(mask, [&](int l) {
    const uint8_t* from = bytes_at(w, i, address(w, i, i.vector, l), i.vector * i.bytes);
    for (int n = 0; n < i.vector; ++n) reg(w, i, n)[l] = read(from + n * i.bytes, i);
  });
}

void polling_load(Warp& w, const Instruction& i, uint32_t mask) {
  w.yields = true;
  load(w, i, mask);
}

void store(Warp& w, const Instruction& i, uint32_t mask) {
  lanes(mask, [&](int l) {
    uint8_t* to = bytes_at(w, i, address(w, i, 0, l), i.vector * i.bytes);
    for (int n = 0; n < i.vector; ++n) std::memcpy(to + n * i.bytes, &reg(w, i, n + 1)[l], i.bytes);
  });
}

enum Atomic { ADD, ADD_F32, EXCHANGE, COMPARE, MAX_S, MAX_U, MIN_S, MIN_U, AND, OR, XOR };

void atomic(Warp& w, const Instruction& i, uint32_t mask) {  // extent: 1 if the old value is returned
  lanes(mask, [&](int l) {
    uint8_t* at = bytes_at(w, i, address(w, i, i.extent, l), i.bytes);
    uint64_t old = read(at, i), operand = reg(w, i, i.extent + 1)[l], fresh = old;
    int64_t a = int64_t(old), b = i.bytes == 4 ? int32_t(operand) : int64_t(operand);
    uint64_t ub = i.bytes == 4 ? uint32_t(operand) : operand;
    switch (Atomic(i.number)) {
      case ADD: fresh = old + operand; break;
      case ADD_F32: fresh = raw(as<float>(old) + as<float>(operand)); break;
      case EXCHANGE: fresh = operand; break;
      case COMPARE:
        if (old == ub) fresh = reg(w, i, i.extent + 2)[l];
        break;
      case MAX_S: fresh = uint64_t(std::max(a, b)); break;
      case MIN_S: fresh = uint64_t(std::min(a, b)); break;
      case MAX_U: fresh = std::max(old, ub); break;
      case MIN_U: fresh = std::min(old, ub); break;
      case AND: fresh = old & operand; break;
      case OR: fresh = old | operand; break;
      case XOR: fresh = old ^ operand; break;
    }
    std::memcpy(at, &fresh, i.bytes);
    if (i.extent) reg(w, i, 0)[l] = old;
  });
  w.yields = true;
}

bool atomic_operation(const std::vector<std::string>& parts, Instruction& i) {
  const std::string& type = parts.back();
  bool is_signed = type[0] == 's';
  if (has(parts, "add")) {
    if (type[0] == 'f' && type != "f32") return false;
    i.number = type == "f32" ? ADD_F32 : ADD;
  } else if (has(parts, "exch")) i.number = EXCHANGE;
  else if (has(parts, "cas")) i.number = COMPARE;
  else if (has(parts, "max")) i.number = is_signed ? MAX_S : MAX_U;
  else if (has(parts, "min")) i.number = is_signed ? MIN_S : MIN_U;
  else if (has(parts, "and")) i.number = AND;
  else if (has(parts, "or")) i.number = OR;
  else if (has(parts, "xor")) i.number = XOR;
  else return false;
  i.is_signed = is_signed;
  return true;
}

void perform(Warp& w, const Copy& copy) {
  uint8_t* to = shared_bytes(*w.block, copy.to, copy.bytes, copy.bytes);
  if (copy.valid) std::memcpy(to, global_bytes(*w.block, copy.from, copy.valid, copy.bytes), copy.valid);
  std::memset(to + copy.valid, 0, copy.bytes - copy.valid);
}

void copy_async(Warp& w, const Instruction& i, uint32_t mask) {  // cp.async [to], [from], bytes{, valid}
  bool late = w.block->late();
  lanes(mask, [&](int l) {
    uint32_t bytes = uint32_t(reg(w, i, 2)[l]), valid = i.args.size() > 3 ? uint32_t(reg(w, i, 3)[l]) : bytes;
    Copy copy{uint32_t(address(w, i, 0, l)), address(w, i, 1, l), bytes, std::min(bytes, valid)};
    shared_bytes(*w.block, copy.to, bytes, bytes);
    if (copy.valid) global_bytes(*w.block, copy.from, copy.valid, bytes);
    if (late) w.copies.push_back(copy);
    else perform(w, copy);
  });
}
void commit_copies(Warp& w, const Instruction&, uint32_t) {
  w.copy_groups.push_back(std::move(w.copies));
  w.copies.clear();
}
void wait_copies(Warp& w, const Instruction& i, uint32_t mask) { finish_copies(w, uniform(w, i, 0, mask)); }
void wait_all_copies(Warp& w, const Instruction& i, uint32_t mask) {
  commit_copies(w, i, mask);
  finish_copies(w, 0);
}

// Eight rows of 16 bytes a matrix; lane 4 r + c holds the columns 2 c and 2 c + 1 of row r, or of its transpose.
void load_matrices(Warp& w, const Instruction& i, uint32_t) {
  std::vector<std::array<uint32_t, LANES>> loaded(i.vector);
  for (int m = 0; m < i.vector; ++m) {
    uint16_t matrix[8][8];
    for (int r = 0; r < 8; ++r)
      std::memcpy(matrix[r], shared_bytes(*w.block, uint32_t(address(w, i, i.vector, 8 * m + r)), 16, 16), 16);
    for (int l = 0; l < LANES; ++l) {
      int r = l / 4, c = l % 4 * 2;
      loaded[m][l] = i.number ? matrix[c][r] | matrix[c + 1][r] << 16 : matrix[r][c] | matrix[r][c + 1] << 16;
    }
  }
  for (int m = 0; m < i.vector; ++m)
    for (int l = 0; l < LANES; ++l) reg(w, i, m)[l] = loaded[m][l];
}
void store_matrices(Warp& w, const Instruction& i, uint32_t) {
  for (int m = 0; m < i.vector; ++m) {
    uint16_t matrix[8][8];
    for (int l = 0; l < LANES; ++l)
      for (int half = 0; half < 2; ++half) {
        uint16_t value = uint16_t(reg(w, i, m + 1)[l] >> (16 * half));
        int r = l / 4, c = l % 4 * 2 + half;
        (i.number ? matrix[c][r] : matrix[r][c]) = value;
      }
    for (int r = 0; r < 8; ++r)
      std::memcpy(shared_bytes(*w.block, uint32_t(address(w, i, 0, 8 * m + r)), 16, 16), matrix[r], 16);
  }
}

}  // namespace

void finish_copies(Warp& w, size_t keep) {
  while (w.copy_groups.size() > keep) {
    for (const Copy& copy : w.copy_groups.front()) perform(w, copy);
    w.copy_groups.erase(w.copy_groups.begin());
  }
}

bool memory(const std::string& opcode, Instruction& i) {
  auto parts = parts_of(opcode);
  const std::string& type = parts.back();
  i.vector = has(parts, "v4") || has(parts, "x4")   ? 4
             : has(parts, "v2") || has(parts, "x2") ? 2
             : has(parts, "v8")                     ? 8
                                                    : 1;
  i.mode = space_of(parts);
  if (parts[0] == "ld" || parts[0] == "st" || parts[0] == "atom" || parts[0] == "red") {
    if (type.find('x') != std::string::npos) return false;
    i.bytes = std::atoi(type.c_str() + 1) / 8;
  }
  if (parts[0] == "ld") {
    i.is_signed = type[0] == 's';
    i.execute = has(parts, "acquire") || has(parts, "volatile") || has(parts, "relaxed") ? polling_load : load;
  } else if (parts[0] == "st") {
    i.execute = store;
  } else if (parts[0] == "atom" || parts[0] == "red") {
    i.extent = parts[0] == "atom";
    i.execute = atomic;
    return i.vector == 1 && atomic_operation(parts, i);
  } else if (opcode.rfind("cp.async.c", 0) == 0 && parts[2] != "commit_group") {
    i.execute = copy_async;
  } else if (opcode == "cp.async.commit_group") {
    i.execute = commit_copies;
  } else if (opcode == "cp.async.wait_group") {
    i.execute = wait_copies;
  } else if (opcode == "cp.async.wait_all") {
    i.execute = wait_all_copies;
  } else if (parts[0] == "ldmatrix" || parts[0] == "stmatrix") {
    if (!has(parts, "m8n8") || type != "b16") return false;
    i.number = has(parts, "trans"), i.converged = true;
    i.execute = parts[0] == "ldmatrix" ? load_matrices : store_matrices;
  } else {
    return false;
  }
  return true;
}

}  // namespace ptx

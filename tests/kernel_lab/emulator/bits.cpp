// Instructions on the bits of a lane: shifts, fields, bytes, logic of three operands.
#include <algorithm>
#include <type_traits>

#include "machine.h"

namespace ptx {
namespace {

template <class T>
void shift_left(Warp& w, const Instruction& i, uint32_t mask) {
  auto &d = reg(w, i, 0), &a = reg(w, i, 1), &b = reg(w, i, 2);
  lanes(mask, [&](int l) {
    uint32_t by = uint32_t(b[l]);
    d[l] = by >= 8 * sizeof(T) ? 0 : raw<T>(T(as<T>(a[l]) << by));
  });
}
template <class T>
void shift_right(Warp& w, const Instruction& i, uint32_t mask) {
  auto &d = reg(w, i, 0), &a = reg(w, i, 1), &b = reg(w, i, 2);
  lanes(mask, [&](int l) {
    uint32_t by = uint32_t(b[l]), width = 8 * sizeof(T);
    T value = as<T>(a[l]);
    d[l] = raw<T>(by < width ? T(value >> by) : T(std::is_signed_v<T> && value < 0 ? -1 : 0));
  });
}
template <class T>
void extract(Warp& w, const Instruction& i, uint32_t mask) {  // bfe
  auto &d = reg(w, i, 0), &a = reg(w, i, 1), &b = reg(w, i, 2), &c = reg(w, i, 3);
  lanes(mask, [&](int l) {
    int bits = 8 * sizeof(T), from = b[l] & 0xFF, length = c[l] & 0xFF;
    uint64_t value = from >= bits ? 0 : uint64_t(std::make_unsigned_t<T>(as<T>(a[l]))) >> from;
    if (length < 64) value &= (1ull << length) - 1;
    bool negative = std::is_signed_v<T> && length && (as<T>(a[l]) >> std::min(from + length - 1, bits - 1)) & 1;
    if (negative && length < 64) value |= ~0ull << length;
    d[l] = raw<T>(T(value));
  });
}
void permute_bytes(Warp& w, const Instruction& i, uint32_t mask) {  // prmt.b32
  lanes(mask, [&](int l) {
    uint64_t both = uint32_t(reg(w, i, 1)[l]) | reg(w, i, 2)[l] << 32;
    uint32_t selector = uint32_t(reg(w, i, 3)[l]), result = 0;
    for (int n = 0; n < 4; ++n) {
      uint32_t which = selector >> (4 * n) & 15, byte = uint32_t(both >> (8 * (which & 7))) & 0xFF;
      if (which & 8) byte = byte & 0x80 ? 0xFF : 0;
      result |= byte << (8 * n);
    }
    reg(w, i, 0)[l] = result;
  });
}
void logic3(Warp& w, const Instruction& i, uint32_t mask) {  // lop3.b32
  lanes(mask, [&](int l) {
    uint32_t a = uint32_t(reg(w, i, 1)[l]), b = uint32_t(reg(w, i, 2)[l]), c = uint32_t(reg(w, i, 3)[l]), result = 0;
    uint32_t truth = uint32_t(reg(w, i, 4)[l]);
    for (int row = 0; row < 8; ++row)
      if (truth >> row & 1) result |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
    reg(w, i, 0)[l] = result;
  });
}
template <int DIRECTION>
void funnel(Warp& w, const Instruction& i, uint32_t mask) {  // shf.{l,r}.wrap.b32
  lanes(mask, [&](int l) {
    uint64_t both = uint32_t(reg(w, i, 1)[l]) | reg(w, i, 2)[l] << 32;
    uint32_t by = reg(w, i, 3)[l] & 31;
    reg(w, i, 0)[l] = DIRECTION < 0 ? uint32_t((both << by) >> 32) : uint32_t(both >> by);
  });
}
}  // namespace

bool bits(const std::string& opcode, Instruction& i) {
  static const std::map<std::string, Execute> TABLE = {
      {"shl.b16", shift_left<uint16_t>},  {"shl.b32", shift_left<uint32_t>},  {"shl.b64", shift_left<uint64_t>},
      {"shr.u16", shift_right<uint16_t>}, {"shr.u32", shift_right<uint32_t>}, {"shr.u64", shift_right<uint64_t>},
      {"shr.b16", shift_right<uint16_t>}, {"shr.b32", shift_right<uint32_t>}, {"shr.b64", shift_right<uint64_t>},
      {"shr.s16", shift_right<int16_t>},  {"shr.s32", shift_right<int32_t>},  {"shr.s64", shift_right<int64_t>},
      {"bfe.u32", extract<uint32_t>},     {"bfe.s32", extract<int32_t>},      {"bfe.u64", extract<uint64_t>},
      {"bfe.s64", extract<int64_t>},      {"prmt.b32", permute_bytes},        {"lop3.b32", logic3},
      {"shf.l.wrap.b32", funnel<-1>},     {"shf.r.wrap.b32", funnel<1>}};
  auto found = TABLE.find(opcode);
  if (found == TABLE.end()) return false;
  i.execute = found->second;
  return true;
}

}  // namespace ptx

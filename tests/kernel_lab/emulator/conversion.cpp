// cvt, between numbers of any two types, and the packed forms for 8- and 16-bit floats.
#include <cmath>
#include <limits>

#include "machine.h"

namespace ptx {

float small_float(uint8_t bits, bool e5m2) {  // e4m3fn or e5m2
  int mantissa_bits = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7, exponent = (bits & 0x7F) >> mantissa_bits;
  int mantissa = bits & ((1 << mantissa_bits) - 1);
  float magnitude;
  if (e5m2 && exponent == 31) magnitude = mantissa ? NAN : INFINITY;
  else if (!e5m2 && (bits & 0x7F) == 0x7F) magnitude = NAN;
  else if (exponent == 0) magnitude = std::ldexp(float(mantissa), 1 - bias - mantissa_bits);
  else magnitude = std::ldexp(float(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
  return bits & 0x80 ? -magnitude : magnitude;
}

namespace {

uint8_t to_small(float x, bool e5m2) {  // to the nearest, ties to even, beyond the largest to the largest
  int mantissa_bits = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
  uint8_t sign = std::signbit(x) ? 0x80 : 0, largest = e5m2 ? 0x7B : 0x7E;
  if (x != x) return 0x7F;
  float magnitude = std::fabs(x);
  if (magnitude == 0) return sign;
  if (magnitude >= small_float(largest, e5m2)) return sign | largest;
  int exponent = std::max(std::ilogb(magnitude), 1 - bias);
  float units = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));  // the mantissa, with its leading one
  int code = int(units) + ((exponent + bias - 1) << mantissa_bits);
  return sign | uint8_t(std::min<int>(code, largest));
}

uint16_t to_half(float x, bool brain) {
  if (brain) {
    uint32_t bits = uint32_t(raw(x));
    return x != x ? 0x7FFF : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
  return uint16_t(raw<_Float16>(_Float16(x)));
}

enum Kind { SIGNED, UNSIGNED, FLOAT, BRAIN };
struct Type {
  Kind kind;
  int bits;
};
Type type_of(const std::string& name) {
  if (name[0] == 'b' && name[1] == 'f') return {BRAIN, 16};
  return {name[0] == 's' ? SIGNED : name[0] == 'f' ? FLOAT : UNSIGNED, std::atoi(name.c_str() + 1)};
}

double float_of(uint64_t bits, Type type) {
  if (type.kind == BRAIN) return from_bf16(uint16_t(bits));
  if (type.bits == 16) return double(as<_Float16>(bits));
  return type.bits == 32 ? double(as<float>(bits)) : as<double>(bits);
}
int64_t integer_of(uint64_t bits, Type type) {
  int unused = 64 - type.bits;
  return type.kind == SIGNED ? int64_t(bits << unused) >> unused : int64_t(bits << unused >> unused);
}

// number: 0 = to nearest, 1 = towards zero, 2 = down, 3 = up; mode: the types
void convert(Warp& w, const Instruction& i, uint32_t mask) {
  Type to{Kind(i.mode & 15), (i.mode >> 4) & 0xFF}, from{Kind(i.mode >> 12 & 15), i.mode >> 16 & 0xFF};
  bool to_float = to.kind == FLOAT || to.kind == BRAIN, from_float = from.kind == FLOAT || from.kind == BRAIN;
  lanes(mask, [&](int l) {
    uint64_t bits = reg(w, i, 1)[l], result;
    double value = 0;
    if (from_float) {
      value = float_of(bits, from);
      if (!to_float || (i.extent && to.bits == from.bits))
        value = i.number == 1   ? std::trunc(value)
                : i.number == 2 ? std::floor(value)
                : i.number == 3 ? std::ceil(value)
                                : std::nearbyint(value);
    }
    if (to_float) {
      if (!from_float && from.kind == UNSIGNED && from.bits == 64) value = double(bits);
      else if (!from_float) value = double(integer_of(bits, from));
      if (to.bits == 64) result = raw<double>(value);
      else if (to.bits == 32) result = raw<float>(float(value));
      else result = to_half(float(value), to.kind == BRAIN);
    } else if (from_float) {
      double low = to.kind == SIGNED ? -std::ldexp(1., to.bits - 1) : 0;
      double high = std::ldexp(1., to.bits - (to.kind == SIGNED)) - 1;
      value = value != value ? 0 : std::min(std::max(value, low), high);
      result = to.kind == SIGNED ? uint64_t(int64_t(value)) : uint64_t(value);
      if (to.bits < 64) result &= (1ull << to.bits) - 1;
    } else {
      result = uint64_t(integer_of(bits, from));
      if (to.bits < 64) result &= (1ull << to.bits) - 1;
    }
    reg(w, i, 0)[l] = result;
  });
}

void pack_halves(Warp& w, const Instruction& i, uint32_t mask) {  // d = {b, a}
  lanes(mask, [&](int l) {
    uint64_t high = to_half(as<float>(reg(w, i, 1)[l]), i.mode), low = to_half(as<float>(reg(w, i, 2)[l]), i.mode);
    reg(w, i, 0)[l] = high << 16 | low;
  });
}
void pack_bytes(Warp& w, const Instruction& i, uint32_t mask) {
  lanes(mask, [&](int l) {
    uint64_t high = to_small(as<float>(reg(w, i, 1)[l]), i.mode), low = to_small(as<float>(reg(w, i, 2)[l]), i.mode);
    reg(w, i, 0)[l] = high << 8 | low;
  });
}
void unpack_bytes(Warp& w, const Instruction& i, uint32_t mask) {  // to two halves of 16 bits
  lanes(mask, [&](int l) {
    uint64_t both = reg(w, i, 1)[l];
    uint64_t low = to_half(small_float(both & 0xFF, i.mode), false),
             high = to_half(small_float(both >> 8 & 0xFF, i.mode), false);
    reg(w, i, 0)[l] = high << 16 | low;
  });
}

}  // namespace

bool conversion(const std::string& opcode, Instruction& i) {
  auto parts = parts_of(opcode);
  if (parts[0] != "cvt") return false;
  const std::string &to = parts[parts.size() - 2], &from = parts.back();
  if (from == "f32" && (to == "bf16x2" || to == "f16x2")) {
    if (!has(parts, "rn")) return false;
    i.execute = pack_halves, i.mode = to == "bf16x2";
  } else if (from == "f32" && (to == "e4m3x2" || to == "e5m2x2")) {
    if (!has(parts, "rn") || !has(parts, "satfinite")) return false;
    i.execute = pack_bytes, i.mode = to == "e5m2x2";
  } else if (to == "f16x2" && (from == "e4m3x2" || from == "e5m2x2")) {
    i.execute = unpack_bytes, i.mode = from == "e5m2x2";
  } else {
    auto known = [](const std::string& type) {
      return type.find('x') == std::string::npos && std::string("sufb").find(type[0]) != std::string::npos;
    };
    if (!known(to) || !known(from) || has(parts, "sat") || has(parts, "satfinite")) return false;
    Type a = type_of(to), b = type_of(from);
    i.mode = a.kind | a.bits << 4 | b.kind << 12 | b.bits << 16;
    i.extent = has(parts, "rni") || has(parts, "rzi") || has(parts, "rmi") || has(parts, "rpi");
    i.number = has(parts, "rzi") ? 1 : has(parts, "rmi") ? 2 : has(parts, "rpi") ? 3 : 0;
    if (has(parts, "rz") || has(parts, "rm") || has(parts, "rp")) return false;
    i.execute = convert;
  }
  return true;
}

}  // namespace ptx

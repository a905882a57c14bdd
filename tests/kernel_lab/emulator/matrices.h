// Elements of matrices, and how a descriptor lays a matrix out in shared memory.
#pragma once
#include "machine.h"

namespace ptx {

enum Element { BF16, F16, TF32, E4M3, E5M2 };

inline int bytes_of(Element e) { return e == TF32 ? 4 : e == BF16 || e == F16 ? 2 : 1; }

inline bool element_of(const std::string& name, Element& e) {
  static const std::map<std::string, Element> NAMES = {
      {"bf16", BF16}, {"f16", F16}, {"tf32", TF32}, {"e4m3", E4M3}, {"e5m2", E5M2}};
  auto found = NAMES.find(name);
  if (found != NAMES.end()) e = found->second;
  return found != NAMES.end();
}

inline float value_of(const uint8_t* at, Element e) {
  uint32_t bits = 0;
  std::memcpy(&bits, at, bytes_of(e));
  switch (e) {
    case BF16: return from_bf16(uint16_t(bits));
    case F16: return float(as<_Float16>(bits));
    case TF32: return as<float>(bits & ~0x1FFFull);  // ten bits of mantissa are read
    default: return small_float(uint8_t(bits), e == E5M2);
  }
}
inline float value_in(uint64_t packed, int n, Element e) {
  uint8_t bytes[8];
  std::memcpy(bytes, &packed, 8);
  return value_of(bytes + n * bytes_of(e), e);
}

// A matrix in shared memory, by its 64-bit descriptor: `across` is the index along m or n.
struct Shared {
  uint32_t start, leading, stride;
  int swizzle;  // bytes of a row that are shuffled: 0, 32, 64, 128
  bool along_k;
  Element element;
  int bytes;

  Shared(uint64_t d, int swizzle, bool along_k, Element e)
      : swizzle(swizzle), along_k(along_k), element(e), bytes(bytes_of(e)) {
    start = uint32_t(d & 0x3FFF) << 4, leading = uint32_t(d >> 16 & 0x3FFF) << 4,
    stride = uint32_t(d >> 32 & 0x3FFF) << 4;
    if (d >> 49 & 7) throw Fault("a matrix descriptor with a base offset is not emulated");
  }
  uint32_t at(int across, int k) const {
    uint32_t offset;
    if (along_k && swizzle) {  // eight rows of `swizzle` bytes, then the next eight
      offset = across / 8 * stride + across % 8 * swizzle + k * bytes;
    } else if (along_k) {  // blocks of 8 rows of 16 bytes
      int per = 16 / bytes;
      offset = across / 8 * stride + across % 8 * 16 + k / per * leading + k % per * bytes;
    } else if (swizzle) {
      int per = swizzle / bytes;
      offset = across / per * leading + across % per * bytes + k / 8 * stride + k % 8 * swizzle;
    } else {
      int per = 16 / bytes;
      offset = across / per * stride + across % per * bytes + k / 8 * leading + k % 8 * 16;
    }
    uint32_t address = start + offset;
    uint32_t chunks = swizzle / 16;  // bits 4.. are mixed with bits 7..
    return swizzle ? address ^ ((address >> 7 & (chunks - 1)) << 4) : address;
  }
  float value(Block& block, int across, int k) const {
    return value_of(shared_bytes(block, at(across, k), bytes, bytes), element);
  }
};

}  // namespace ptx

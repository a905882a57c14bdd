// Branches, barriers, and exchanges between the lanes of a warp.
#include <algorithm>
#include <cmath>

#include "machine.h"

namespace ptx {
namespace {

void branch(Warp& w, const Instruction& i, uint32_t mask) {
  lanes(mask, [&](int l) { w.pc[l] = i.target; });
}
void leave(Warp& w, const Instruction&, uint32_t mask) { w.live &= ~mask; }
void trap(Warp&, const Instruction&, uint32_t) { throw Fault("a trap: an assertion of the kernel failed"); }
void nothing(Warp&, const Instruction&, uint32_t) {}
void let_others(Warp& w, const Instruction&, uint32_t) { w.yields = true; }

void barrier(Warp& w, const Instruction& i, uint32_t mask) {  // bar.sync which{, threads}
  w.waits_at = int(uniform(w, i, 0, mask));
  auto& [arrived, awaited] = w.block->arrived[w.waits_at];
  arrived += LANES, awaited = i.args.size() > 1 ? int(uniform(w, i, 1, mask)) : 0;
}

int source_of(const Instruction& i, int l, uint32_t by, uint32_t clamp) {
  int segment = int(clamp >> 8) & 31, last = int(clamp & 31), low = l & segment, high = low | (last & ~segment);
  switch (i.mode) {
    case 0: {
      int j = l - int(by);
      return j >= high ? j : l;
    }  // up: `last` is 0
    case 1: {
      int j = l + int(by);
      return j <= high ? j : l;
    }  // down
    case 2: {
      int j = l ^ int(by);
      return j <= high ? j : l;
    }  // bfly
    default: {
      int j = low | (int(by) & ~segment);
      return j <= high ? j : l;
    }
  }
}
void shuffle(Warp& w, const Instruction& i, uint32_t mask) {  // shfl.sync.MODE.b32 d{|p}, a, by, clamp, members
  int a = i.number ? 2 : 1;
  Register from = reg(w, i, a);
  lanes(mask, [&](int l) {
    int source = source_of(i, l, uint32_t(reg(w, i, a + 1)[l]), uint32_t(reg(w, i, a + 2)[l]));
    if (i.number) reg(w, i, 1)[l] = source != l || i.mode == 3;
    reg(w, i, 0)[l] = uint32_t(from[source & 31]);
  });
}

template <class T, class F>
void reduce(Warp& w, const Instruction& i, uint32_t mask) {  // redux.sync
  const Register& from = reg(w, i, 1);
  T total = as<T>(from[__builtin_ctz(mask)]);
  lanes(mask & (mask - 1), [&](int l) { total = F()(total, as<T>(from[l])); });
  lanes(mask, [&](int l) { reg(w, i, 0)[l] = raw<T>(total); });
}
struct Sum {
  template <class T>
  T operator()(T a, T b) const {
    return a + b;
  }
};
struct Largest {
  template <class T>
  T operator()(T a, T b) const {
    return std::max(a, b);
  }
};
struct Least {
  template <class T>
  T operator()(T a, T b) const {
    return std::min(a, b);
  }
};
struct LargestNumber {
  float operator()(float a, float b) const { return std::fmax(a, b); }
};
struct LeastNumber {
  float operator()(float a, float b) const { return std::fmin(a, b); }
};
struct Both {
  template <class T>
  T operator()(T a, T b) const {
    return a & b;
  }
};
struct Any {
  template <class T>
  T operator()(T a, T b) const {
    return a | b;
  }
};

void vote(Warp& w, const Instruction& i, uint32_t mask) {  // vote.sync.{ballot.b32,any.pred,all.pred} d, p, members
  uint32_t set = 0;
  lanes(mask, [&](int l) { set |= uint32_t(reg(w, i, 1)[l] & 1) << l; });
  uint64_t result = i.mode == 0 ? set : i.mode == 1 ? set != 0 : set == mask;
  lanes(mask, [&](int l) { reg(w, i, 0)[l] = result; });
}

}  // namespace

bool control(const std::string& opcode, Instruction& i) {
  auto parts = parts_of(opcode);
  static const std::map<std::string, Execute> REDUCTIONS = {
      {"add.s32", reduce<int32_t, Sum>},         {"add.u32", reduce<uint32_t, Sum>},
      {"max.s32", reduce<int32_t, Largest>},     {"max.u32", reduce<uint32_t, Largest>},
      {"min.s32", reduce<int32_t, Least>},       {"min.u32", reduce<uint32_t, Least>},
      {"max.f32", reduce<float, LargestNumber>}, {"min.f32", reduce<float, LeastNumber>},
      {"and.b32", reduce<uint32_t, Both>},       {"or.b32", reduce<uint32_t, Any>}};
  if (parts[0] == "bra") {
    i.execute = branch, i.watches_products = false;
  } else if (parts[0] == "ret" || parts[0] == "exit") {
    i.execute = leave;
  } else if (parts[0] == "trap") {
    i.execute = trap;
  } else if (opcode == "bar.warp.sync") {
    i.execute = nothing, i.converged = true;
  } else if (opcode == "bar.sync" || opcode == "barrier.sync" || opcode == "barrier.sync.aligned") {
    i.execute = barrier, i.converged = true;
  } else if (parts[0] == "nanosleep") {
    i.execute = let_others;
  } else if (parts[0] == "setmaxnreg" || parts[0] == "griddepcontrol") {
    i.execute = nothing;
  } else if (opcode.rfind("shfl.sync.", 0) == 0) {
    static const std::map<std::string, int> MODES = {{"up", 0}, {"down", 1}, {"bfly", 2}, {"idx", 3}};
    i.execute = shuffle, i.converged = true, i.mode = MODES.at(parts[2]), i.number = i.args.size() == 6;
  } else if (opcode.rfind("redux.sync.", 0) == 0) {
    auto found = REDUCTIONS.find(parts[2] + "." + parts.back());
    if (parts.size() != 4) return false;  // absolute values, or NaN that propagates
    if (found == REDUCTIONS.end()) return false;
    i.execute = found->second, i.converged = true;
  } else if (opcode.rfind("vote.sync.", 0) == 0) {
    i.execute = vote, i.converged = true, i.mode = parts[2] == "ballot" ? 0 : parts[2] == "any" ? 1 : 2;
  } else {
    return false;
  }
  return true;
}

}  // namespace ptx

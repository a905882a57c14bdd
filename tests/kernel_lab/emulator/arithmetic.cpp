// Instructions of one lane each: integers, floats, predicates, moves.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "machine.h"

namespace ptx {
namespace {

struct bf16 {
  uint16_t bits;
  operator float() const { return from_bf16(bits); }
};
using f16 = _Float16;

uint16_t to_bf16(float x) {
  uint32_t bits = uint32_t(raw(x));
  if (x != x) return 0x7FFF;
  return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

template <class T>
T rounded(float x) {
  if constexpr (std::is_same_v<T, bf16>) return bf16{to_bf16(x)};
  else return T(x);
}

struct Entry {
  Execute execute;
  size_t args = 0;  // its operands, the result included; 0 = as many as there are
  Entry(Execute execute = nullptr, size_t args = 0) : execute(execute), args(args) {}
};

std::unordered_map<std::string, Entry>& table() {
  static std::unordered_map<std::string, Entry> instance;
  return instance;
}

template <class F, class D, class S>
void one(Warp& w, const Instruction& i, uint32_t mask) {
  auto &d = reg(w, i, 0), &a = reg(w, i, 1);
  lanes(mask, [&](int l) { d[l] = raw<D>(F()(as<S>(a[l]))); });
}
template <class F, class D, class S>
void two(Warp& w, const Instruction& i, uint32_t mask) {
  auto &d = reg(w, i, 0), &a = reg(w, i, 1), &b = reg(w, i, 2);
  lanes(mask, [&](int l) { d[l] = raw<D>(F()(as<S>(a[l]), as<S>(b[l]))); });
}
template <class F, class D, class S>
void three(Warp& w, const Instruction& i, uint32_t mask) {
  auto &d = reg(w, i, 0), &a = reg(w, i, 1), &b = reg(w, i, 2), &c = reg(w, i, 3);
  lanes(mask, [&](int l) { d[l] = raw<D>(F()(as<S>(a[l]), as<S>(b[l]), as<S>(c[l]))); });
}

template <class T>
const char* const NAME = nullptr;
template <>
const char* const NAME<bool> = "pred";
template <>
const char* const NAME<int16_t> = "s16";
template <>
const char* const NAME<uint16_t> = "u16";
template <>
const char* const NAME<int32_t> = "s32";
template <>
const char* const NAME<uint32_t> = "u32";
template <>
const char* const NAME<int64_t> = "s64";
template <>
const char* const NAME<uint64_t> = "u64";
template <>
const char* const NAME<float> = "f32";
template <>
const char* const NAME<double> = "f64";
template <>
const char* const NAME<f16> = "f16";
template <>
const char* const NAME<bf16> = "bf16";

template <class T>
void name(const std::string& operation, Entry entry) {
  std::string type = NAME<T>;
  table()[operation + "." + type] = entry;
  if (type[0] == 'u') table()[operation + ".b" + type.substr(1)] = entry;  // bits
}
template <class F, class... Ts>
void unary(const char* op) {
  (name<Ts>(op, {one<F, Ts, Ts>, 2}), ...);
}
template <class F, class... Ts>
void binary(const char* op) {
  (name<Ts>(op, {two<F, Ts, Ts>, 3}), ...);
}
template <class F, class... Ts>
void ternary(const char* op) {
  (name<Ts>(op, {three<F, Ts, Ts>, 4}), ...);
}

#define OPERATION(NAME, BODY, ...)       \
  struct NAME {                          \
    template <class T>                   \
    auto operator()(__VA_ARGS__) const { \
      BODY                               \
    }                                    \
  }
#define SMALL_FLOAT (std::is_same_v<T, bf16> || std::is_same_v<T, f16>)
OPERATION(Add, if constexpr (SMALL_FLOAT) return rounded<T>(float(a) + float(b)); else return T(a + b);, T a, T b);
OPERATION(Sub, if constexpr (SMALL_FLOAT) return rounded<T>(float(a) - float(b)); else return T(a - b);, T a, T b);
OPERATION(Mul, if constexpr (SMALL_FLOAT) return rounded<T>(float(a) * float(b)); else return T(a * b);, T a, T b);
OPERATION(
    Div,
    if constexpr (std::is_integral_v<T>) {
      if (b == 0) return T(-1);
    } return T(a / b);
    , T a, T b);
OPERATION(Rem, return T(b ? a % b : a);, T a, T b);
OPERATION(And, return T(a & b);, T a, T b);
OPERATION(Or, return T(a | b);, T a, T b);
OPERATION(Xor, return T(a ^ b);, T a, T b);
struct Not {
  bool operator()(bool a) const { return !a; }
  template <class T>
  T operator()(T a) const {
    return T(~a);
  }
};
OPERATION(Neg, if constexpr (SMALL_FLOAT) return rounded<T>(-float(a)); else return T(-a);, T a);
OPERATION(Abs, if constexpr (SMALL_FLOAT) return rounded<T>(std::fabs(float(a))); else return T(a < 0 ? -a : a);, T a);
struct AbsFloat {
  template <class T>
  T operator()(T a) const {
    return std::fabs(a);
  }
};
template <bool NAN_WINS>
struct MaxFloat {
  template <class T>
  T operator()(T x, T y) const {
    float a = x, b = y;
    if (a != a) return NAN_WINS ? x : y;
    if (b != b) return NAN_WINS ? y : x;
    return a > b ? x : y;
  }
};
template <bool NAN_WINS>
struct MinFloat {
  template <class T>
  T operator()(T x, T y) const {
    float a = x, b = y;
    if (a != a) return NAN_WINS ? x : y;
    if (b != b) return NAN_WINS ? y : x;
    return a < b ? x : y;
  }
};
template <class F>
struct OfThree {
  template <class T>
  T operator()(T a, T b, T c) const {
    return F()(F()(a, b), c);
  }
};
struct MinMagnitude {  // of the smaller magnitude, negative where one of the two is
  float operator()(float a, float b) const {
    if (a != a || b != b) return NAN;
    return std::copysign(std::min(std::fabs(a), std::fabs(b)), std::signbit(a) != std::signbit(b) ? -1.f : 1.f);
  }
};
OPERATION(Max, return a > b ? a : b;, T a, T b);
OPERATION(Min, return a < b ? a : b;, T a, T b);
OPERATION(MaxOrZero, return std::max(std::max(a, b), T(0));, T a, T b);
OPERATION(MinOrZero, return std::max(std::min(a, b), T(0));, T a, T b);
OPERATION(Fma, if constexpr (SMALL_FLOAT) return rounded<T>(std::fma(float(a), float(b), float(c)));
          else return std::fma(a, b, c);, T a, T b, T c);
OPERATION(MadLo, return T(a * b + c);, T a, T b, T c);
struct MulHi {
  int32_t operator()(int32_t a, int32_t b) const { return int32_t((int64_t(a) * b) >> 32); }
  uint32_t operator()(uint32_t a, uint32_t b) const { return uint32_t((uint64_t(a) * b) >> 32); }
  int64_t operator()(int64_t a, int64_t b) const { return int64_t((__int128(a) * b) >> 64); }
  uint64_t operator()(uint64_t a, uint64_t b) const { return uint64_t(((unsigned __int128)a * b) >> 64); }
};
OPERATION(Exp2, return T(std::exp2(float(a)));, T a);
OPERATION(Log2, return T(std::log2(float(a)));, T a);
OPERATION(Sqrt, return T(std::sqrt(a));, T a);
OPERATION(Rsqrt, return T(1 / std::sqrt(a));, T a);
OPERATION(Rcp, return T(1 / a);, T a);
OPERATION(Sin, return T(std::sin(a));, T a);
OPERATION(Cos, return T(std::cos(a));, T a);
OPERATION(Tanh, return T(std::tanh(float(a)));, T a);
struct Popc {
  template <class T>
  uint32_t operator()(T a) const {
    return uint32_t(__builtin_popcountll(a));
  }
};
struct Clz32 {
  uint32_t operator()(uint32_t a) const { return a ? uint32_t(__builtin_clz(a)) : 32; }
};

template <class S, class D, bool ADDS>
void wide(Warp& w, const Instruction& i, uint32_t mask) {
  auto &d = reg(w, i, 0), &a = reg(w, i, 1), &b = reg(w, i, 2);
  lanes(mask, [&](int l) {
    D product = D(as<S>(a[l])) * D(as<S>(b[l]));
    if constexpr (ADDS) product += as<D>(reg(w, i, 3)[l]);
    d[l] = raw<D>(product);
  });
}
template <class F, class T>
void packed(Warp& w, const Instruction& i, uint32_t mask) {  // of two elements
  constexpr int BITS = 8 * sizeof(T);
  lanes(mask, [&](int l) {
    uint64_t result = 0;
    for (int half = 0; half < 2; ++half) {
      float x[3] = {};
      for (size_t n = 1; n < i.args.size(); ++n) x[n - 1] = as<T>(reg(w, i, int(n))[l] >> (BITS * half));
      result |= uint64_t(raw(rounded<T>(F()(x[0], x[1], x[2])))) << (BITS * half);
    }
    reg(w, i, 0)[l] = result;
  });
}
template <class F, class T>
void mixed(Warp& w, const Instruction& i, uint32_t mask) {  // float, with the last operand float, too
  lanes(mask, [&](int l) {
    float x[3] = {};
    size_t last = i.args.size() - 1;
    for (size_t n = 1; n < last; ++n) x[n - 1] = as<T>(reg(w, i, int(n))[l]);
    x[last - 1] = as<float>(reg(w, i, int(last))[l]);
    reg(w, i, 0)[l] = raw(F()(x[0], x[1], x[2]));
  });
}
struct Plus {
  float operator()(float a, float b, float) const { return a + b; }
};
struct Minus {
  float operator()(float a, float b, float) const { return a - b; }
};
struct Times {
  float operator()(float a, float b, float) const { return a * b; }
};
struct PlusTimes {
  float operator()(float a, float b, float c) const { return std::fma(a, b, c); }
};
struct Larger {
  float operator()(float a, float b, float) const { return MaxFloat<false>()(a, b); }
};
struct Smaller {
  float operator()(float a, float b, float) const { return MinFloat<false>()(a, b); }
};

template <class F>
void both(const std::string& op) {
  table()[op + ".bf16x2"] = packed<F, bf16>, table()[op + ".f16x2"] = packed<F, f16>;
  table()[op + ".f32x2"] = packed<F, float>;
  table()[op + ".f32.bf16"] = mixed<F, bf16>, table()[op + ".f32.f16"] = mixed<F, f16>;
}

template <class T, class F>
void compare(Warp& w, const Instruction& i, uint32_t mask) {
  auto &d = reg(w, i, 0), &a = reg(w, i, 1), &b = reg(w, i, 2);
  lanes(mask, [&](int l) { d[l] = F()(as<T>(a[l]), as<T>(b[l])); });
}
#define COMPARISON(NAME, BODY)        \
  struct NAME {                       \
    template <class T>                \
    bool operator()(T a, T b) const { \
      return BODY;                    \
    }                                 \
  }
COMPARISON(Eq, a == b);
COMPARISON(Ne, !(a == b) && a == a && b == b);
COMPARISON(Lt, a < b);
COMPARISON(Le, a <= b);
COMPARISON(Gt, a > b);
COMPARISON(Ge, a >= b);
COMPARISON(Unordered, a != a || b != b);
COMPARISON(Ordered, a == a && b == b);
COMPARISON(Equ, a == b || a != a || b != b);
COMPARISON(Neu, !(a == b));
COMPARISON(Ltu, !(a >= b));
COMPARISON(Leu, !(a > b));
COMPARISON(Gtu, !(a <= b));
COMPARISON(Geu, !(a < b));

template <class T>
void comparisons() {
  name<T>("setp.eq", compare<T, Eq>), name<T>("setp.ne", compare<T, Ne>), name<T>("setp.lt", compare<T, Lt>);
  name<T>("setp.le", compare<T, Le>), name<T>("setp.gt", compare<T, Gt>), name<T>("setp.ge", compare<T, Ge>);
  if constexpr (!std::is_integral_v<T>) {
    name<T>("setp.nan", compare<T, Unordered>), name<T>("setp.num", compare<T, Ordered>);
    name<T>("setp.equ", compare<T, Equ>), name<T>("setp.neu", compare<T, Neu>), name<T>("setp.ltu", compare<T, Ltu>);
    name<T>("setp.leu", compare<T, Leu>), name<T>("setp.gtu", compare<T, Gtu>), name<T>("setp.geu", compare<T, Geu>);
  }
}

template <int BITS>
void select(Warp& w, const Instruction& i, uint32_t mask) {
  auto &d = reg(w, i, 0), &a = reg(w, i, 1), &b = reg(w, i, 2), &p = reg(w, i, 3);
  constexpr uint64_t kept = BITS == 64 ? ~0ull : (1ull << BITS) - 1;
  lanes(mask, [&](int l) { d[l] = (p[l] & 1 ? a[l] : b[l]) & kept; });
}
void move_predicate(Warp& w, const Instruction& i, uint32_t mask) {
  lanes(mask, [&](int l) { reg(w, i, 0)[l] = reg(w, i, 1)[l] & 1; });
}
void move(Warp& w, const Instruction& i, uint32_t mask) {  // also to and from a vector of smaller registers
  size_t count = i.args.size() - 1;
  if (count == 1) lanes(mask, [&](int l) { reg(w, i, 0)[l] = reg(w, i, 1)[l] + i.args[1].offset; });
  else if (i.text.find('{') > i.text.find(','))  // d, {a, b}
    lanes(mask, [&](int l) {
      uint64_t value = 0, part = i.bytes * 8 / count;
      for (size_t n = 0; n < count; ++n) value |= (reg(w, i, int(n) + 1)[l] & ((1ull << part) - 1)) << (n * part);
      reg(w, i, 0)[l] = value;
    });
  else
    lanes(mask, [&](int l) {
      uint64_t value = reg(w, i, int(count))[l], part = i.bytes * 8 / count;
      for (size_t n = 0; n < count; ++n) reg(w, i, int(n))[l] = value >> (n * part) & ((1ull << part) - 1);
    });
}
void same(Warp& w, const Instruction& i, uint32_t mask) {  // cvta: address spaces are one
  lanes(mask, [&](int l) { reg(w, i, 0)[l] = reg(w, i, 1)[l]; });
}

template <uint32_t KEPT, uint32_t TURNED>
void signs(Warp& w, const Instruction& i, uint32_t mask) {  // of two floats of 16 bits
  lanes(mask, [&](int l) { reg(w, i, 0)[l] = (uint32_t(reg(w, i, 1)[l]) & KEPT) ^ TURNED; });
}

void fill() {
#define INTEGERS int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t
#define UNSIGNED uint16_t, uint32_t, uint64_t
#define FLOATS float, double
  binary<Add, INTEGERS, FLOATS, bf16, f16>("add"), binary<Sub, INTEGERS, FLOATS, bf16, f16>("sub");
  binary<Mul, FLOATS, bf16, f16>("mul"), binary<Mul, INTEGERS>("mul.lo"), ternary<MadLo, INTEGERS>("mad.lo");
  binary<MulHi, int32_t, uint32_t, int64_t, uint64_t>("mul.hi");
  binary<Div, INTEGERS, FLOATS>("div"), binary<Rem, INTEGERS>("rem");
  binary<And, UNSIGNED, bool>("and"), binary<Or, UNSIGNED, bool>("or"), binary<Xor, UNSIGNED, bool>("xor");
  unary<Not, UNSIGNED, bool>("not"), unary<Neg, int16_t, int32_t, int64_t, FLOATS, bf16, f16>("neg");
  unary<Abs, int16_t, int32_t, int64_t, bf16, f16>("abs"), unary<AbsFloat, FLOATS>("abs");
  binary<Max, INTEGERS>("max"), binary<Min, INTEGERS>("min");
  binary<MaxOrZero, int32_t>("max.relu"), binary<MinOrZero, int32_t>("min.relu");
  binary<MaxFloat<false>, float, bf16, f16>("max"), binary<MinFloat<false>, float, bf16, f16>("min");
  binary<MaxFloat<true>, float, bf16, f16>("max.NaN"), binary<MinFloat<true>, float, bf16, f16>("min.NaN");
  ternary<OfThree<MaxFloat<false>>, float>("max.3"), ternary<OfThree<MinFloat<false>>, float>("min.3");
  ternary<OfThree<MaxFloat<true>>, float>("max.3.NaN"), ternary<OfThree<MinFloat<true>>, float>("min.3.NaN");
  binary<MinMagnitude, float>("min.NaN.xorsign.abs");
  ternary<Fma, FLOATS, bf16, f16>("fma");
  unary<Exp2, float, f16>("ex2"), unary<Log2, float>("lg2"), unary<Sqrt, FLOATS>("sqrt"), unary<Rsqrt, FLOATS>("rsqrt");
  unary<Rcp, FLOATS>("rcp"), unary<Sin, float>("sin"), unary<Cos, float>("cos"), unary<Tanh, float, f16>("tanh");
  name<uint32_t>("popc", one<Popc, uint32_t, uint32_t>), name<uint64_t>("popc", one<Popc, uint32_t, uint64_t>);
  name<uint32_t>("clz", one<Clz32, uint32_t, uint32_t>);
  comparisons<int16_t>(), comparisons<uint16_t>(), comparisons<int32_t>(), comparisons<uint32_t>();
  comparisons<int64_t>(), comparisons<uint64_t>(), comparisons<float>(), comparisons<double>();
  comparisons<bf16>(), comparisons<f16>();
  auto& t = table();
  t["mul.wide.s16"] = wide<int16_t, int32_t, false>, t["mul.wide.u16"] = wide<uint16_t, uint32_t, false>;
  t["mul.wide.s32"] = wide<int32_t, int64_t, false>, t["mul.wide.u32"] = wide<uint32_t, uint64_t, false>;
  t["mad.wide.s32"] = wide<int32_t, int64_t, true>, t["mad.wide.u32"] = wide<uint32_t, uint64_t, true>;
  t["mad.wide.s16"] = wide<int16_t, int32_t, true>, t["mad.wide.u16"] = wide<uint16_t, uint32_t, true>;
  both<Plus>("add"), both<Minus>("sub"), both<Times>("mul"), both<PlusTimes>("fma"), both<Larger>("max"),
      both<Smaller>("min");
  for (const char* type : {"b", "f", "s", "u"})
    for (int bits : {16, 32, 64})
      t["selp." + std::string(type) + std::to_string(bits)] = bits == 16   ? select<16>
                                                              : bits == 32 ? select<32>
                                                                           : select<64>;
  t["mov.pred"] = move_predicate;
  for (const char* type : {"bf16x2", "f16x2"}) {
    t[std::string("abs.") + type] = signs<0x7FFF7FFF, 0>, t[std::string("neg.") + type] = signs<~0u, 0x80008000>;
  }
}

}  // namespace

bool arithmetic(const std::string& opcode, Instruction& i) {
  if (table().empty()) fill();
  std::string plain;
  auto parts = parts_of(opcode);
  if (parts[0] == "mov" && parts[1] != "pred") {
    i.bytes = std::atoi(parts[1].c_str() + 1) / 8;
    i.execute = move;
    return true;
  }
  if (parts[0] == "cvta") {
    i.execute = same;
    return true;
  }
  if ((parts[0] == "max" || parts[0] == "min") && i.args.size() == 4) parts[0] += ".3";
  for (const auto& part : parts)  // subnormals are kept, and rounding is exact
    if (part != "ftz" && part != "rn" && part != "approx" && part != "full") plain += (plain.empty() ? "" : ".") + part;
  auto found = table().find(plain);
  if (found == table().end() || (found->second.args && found->second.args != i.args.size())) return false;
  i.execute = found->second.execute;
  return true;
}

}  // namespace ptx

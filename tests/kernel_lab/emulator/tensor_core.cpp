// Matrix products: mma of a warp, wgmma of a warp group. Products are exact, sums are kept in float.
//
// Which lane holds which element, and how a descriptor lays a matrix out in shared memory: PTX ISA, "Matrix multiply-
// accumulate operation using mma" and "Asynchronous warpgroup level matrix multiply-accumulate operation".
#include "matrices.h"

namespace ptx {
namespace {

// [16, k] of the left side, four registers a lane. A register holds 4 bytes of a row.
void left_fragment(Warp& w, const Instruction& i, int first, Element e, int k, float* a) {
  int per = 4 / bytes_of(e), half = k / 2;
  for (int r = 0; r < 4; ++r)
    for (int l = 0; l < LANES; ++l)
      for (int n = 0; n < per; ++n)
        a[(l / 4 + (r & 1) * 8) * k + l % 4 * per + n + (r >> 1) * half] = value_in(reg(w, i, first + r)[l], n, e);
}

// mma.sync.aligned.m16n8k{8,16,32}.row.col.f32.A.B.f32 d, a, b, c
void multiply(Warp& w, const Instruction& i, uint32_t) {
  Element left = Element(i.mode & 15), right = Element(i.mode >> 4);
  int k = i.extent, per = 4 / bytes_of(right);
  std::vector<float> a(16 * k), b(8 * k);
  left_fragment(w, i, 4, left, k, a.data());
  for (int r = 0; r < 2; ++r)
    for (int l = 0; l < LANES; ++l)
      for (int n = 0; n < per; ++n)
        b[l / 4 * k + l % 4 * per + n + r * k / 2] = value_in(reg(w, i, 8 + r)[l], n, right);
  float d[4][LANES];
  for (int l = 0; l < LANES; ++l)
    for (int r = 0; r < 4; ++r) {
      int row = l / 4 + (r >> 1) * 8, column = l % 4 * 2 + (r & 1);
      float sum = 0;
      for (int n = 0; n < k; ++n) sum += a[row * k + n] * b[column * k + n];
      d[r][l] = as<float>(reg(w, i, 10 + r)[l]) + sum;
    }
  for (int r = 0; r < 4; ++r)
    for (int l = 0; l < LANES; ++l) reg(w, i, r)[l] = raw(d[r][l]);
}

struct Shape {  // of a wgmma, from the parser
  int n, k;
  Element left, right;
  bool left_in_registers, left_k_major, right_k_major;
  int scale_a, scale_b;
};

Shape shape_of(const Instruction& i) {
  uint64_t s = i.number;
  return {int(s & 0x1FF),    int(s >> 9 & 0x7F), Element(s >> 16 & 7), Element(s >> 19 & 7), bool(s >> 22 & 1),
          bool(s >> 23 & 1), bool(s >> 24 & 1),  s >> 25 & 1 ? -1 : 1, s >> 26 & 1 ? -1 : 1};
}

int swizzle_of(uint64_t descriptor) {
  static const int BYTES[] = {0, 128, 64, 32};
  return BYTES[descriptor >> 62];
}

void perform(Warp& w, const Product& product) {
  const Instruction& i = *product.instruction;
  Shape s = shape_of(i);
  int accumulators = s.n / 2;
  std::vector<float> a(16 * s.k), b(s.k * s.n), d(16 * s.n);
  if (s.left_in_registers) {
    left_fragment(w, i, accumulators, s.left, s.k, a.data());
  } else {
    Shared left(product.a, swizzle_of(product.a), s.left_k_major, s.left);
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < s.k; ++k) a[row * s.k + k] = left.value(*w.block, w.index % 4 * 16 + row, k);
  }
  Shared right(product.b, swizzle_of(product.b), s.right_k_major, s.right);
  for (int k = 0; k < s.k; ++k)
    for (int n = 0; n < s.n; ++n) b[k * s.n + n] = right.value(*w.block, n, k);
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < s.k; ++k) {
      float x = a[row * s.k + k] * s.scale_a * s.scale_b;
      for (int n = 0; n < s.n; ++n) d[row * s.n + n] += x * b[k * s.n + n];
    }
  for (int r = 0; r < accumulators; ++r) {
    Register& out = reg(w, i, r);
    for (int l = 0; l < LANES; ++l) {
      int row = l / 4 + (r >> 1 & 1) * 8, column = r / 4 * 8 + l % 4 * 2 + (r & 1);
      float before = product.accumulates ? as<float>(out[l]) : 0;
      out[l] = raw(before + d[row * s.n + column]);
    }
  }
}

void finish_all(Warp& w) {
  finish_products(w, 0);
  for (const Product& product : w.products) perform(w, product);
  w.products.clear();
}

void multiply_async(Warp& w, const Instruction& i, uint32_t mask) {
  Shape s = shape_of(i);
  int at = s.n / 2;
  Product product{&i, 0, 0, false};
  if (s.left_in_registers) at += 4;
  else product.a = uniform(w, i, at++, mask);
  product.b = uniform(w, i, at++, mask);
  product.accumulates = uniform(w, i, at, mask) & 1;
  if (w.block->late() || !w.products.empty() || !w.product_groups.empty()) w.products.push_back(product);
  else perform(w, product);
}

void commit_products(Warp& w, const Instruction&, uint32_t) {
  w.product_groups.push_back(std::move(w.products));
  w.products.clear();
}
void wait_products(Warp& w, const Instruction& i, uint32_t mask) { finish_products(w, uniform(w, i, 0, mask)); }
void nothing(Warp&, const Instruction&, uint32_t) {}

bool warp_group(const std::vector<std::string>& parts,
                Instruction& i) {  // wgmma.mma_async.sync.aligned.m64nNkK.f32.A.B
  int n, k;
  Element left, right;
  if (std::sscanf(parts[4].c_str(), "m64n%dk%d", &n, &k) != 2 || parts[5] != "f32" || !element_of(parts[6], left) ||
      !element_of(parts[7], right))
    return false;
  size_t second = i.text.find('}') + 1;  // behind the accumulators
  bool in_registers = i.text.find('{', second) != std::string::npos;
  size_t used = n / 2 + (in_registers ? 4 : 1) + 2;  // up to and with the predicate
  size_t words = i.args.size() - used;               // scales, and which sides are transposed
  std::string tail = i.text.substr(in_registers ? i.text.rfind('}') + 1 : second);
  std::vector<std::string> fields;
  for (size_t at = 0; (at = tail.find(',', at)) != std::string::npos;) fields.push_back(tail.substr(++at));
  auto flag = [&](size_t back) { return std::atoi(fields[fields.size() - back].c_str()); };
  bool sixteen = bytes_of(left) == 2;
  size_t transposes = sixteen ? (in_registers ? 1 : 2) : 0;
  if (words != 2 + transposes) return false;
  bool left_k = !(sixteen && !in_registers && flag(2)), right_k = !(sixteen && flag(1));
  bool minus_a = flag(transposes + 2) < 0, minus_b = flag(transposes + 1) < 0;
  i.number = uint64_t(n) | uint64_t(k) << 9 | uint64_t(left) << 16 | uint64_t(right) << 19 |
             uint64_t(in_registers) << 22 | uint64_t(left_k) << 23 | uint64_t(right_k) << 24 | uint64_t(minus_a) << 25 |
             uint64_t(minus_b) << 26;
  i.execute = multiply_async;
  return true;
}

}  // namespace

void finish_products(Warp& w, size_t keep) {
  while (w.product_groups.size() > keep) {
    for (const Product& product : w.product_groups.front()) perform(w, product);
    w.product_groups.erase(w.product_groups.begin());
  }
}

// The assembler waits where an instruction accesses registers of pending products.
void settle(Warp& w, const Instruction& i) {
  auto touches = [&](const std::vector<Product>& group) {
    for (const Product& product : group) {
      int count = shape_of(*product.instruction).n / 2 + (shape_of(*product.instruction).left_in_registers ? 4 : 0);
      for (const Operand& mine : i.args)
        for (int n = 0; n < count; ++n)
          if (product.instruction->args[n].slot == mine.slot) return true;
    }
    return false;
  };
  bool touched = touches(w.products);
  for (const auto& group : w.product_groups) touched = touched || touches(group);
  if (touched) finish_all(w);
}

bool tensor_core(const std::string& opcode, Instruction& i) {
  auto parts = parts_of(opcode);
  if (parts[0] == "wgmma") {
    i.converged = true, i.watches_products = false;
    if (parts[1] == "mma_async") return warp_group(parts, i);
    i.execute = parts[1] == "fence" ? nothing : parts[1] == "commit_group" ? commit_products : wait_products;
    return true;
  }
  if (parts[0] != "mma") return false;
  int k;
  Element left, right;
  if (parts.size() != 10 || std::sscanf(parts[3].c_str(), "m16n8k%d", &k) != 1 || parts[6] != "f32" ||
      parts[9] != "f32" || !element_of(parts[7], left) || !element_of(parts[8], right) || k * bytes_of(left) != 32)
    return false;
  i.execute = multiply, i.converged = true, i.mode = left | right << 4, i.extent = k;
  return true;
}

}  // namespace ptx

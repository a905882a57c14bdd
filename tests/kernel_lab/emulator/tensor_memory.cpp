// Blackwell: tensor memory of 128 lanes and 512 columns of 4 bytes, and a block's products, whose sums it holds.
//
// Layouts: PTX ISA, "TensorCore 5th generation family instructions".
#include "matrices.h"

namespace ptx {
namespace {

uint32_t& cell(Block& block, uint32_t lane, uint32_t column) {
  if (lane >= 128 || column >= block.tensor_columns)
    throw Fault("lane " + std::to_string(lane) + ", column " + std::to_string(column) + " of " +
                std::to_string(block.tensor_columns) + " allocated columns of tensor memory");
  return block.tensor_memory[lane * 512 + column];
}

void allocate(Warp& w, const Instruction& i, uint32_t mask) {  // [where to write the address], columns
  uint32_t at = uint32_t(address(w, i, 0, __builtin_ctz(mask))), columns = uint32_t(uniform(w, i, 1, mask));
  if (w.block->tensor_columns) throw Fault("tensor memory is allocated twice");
  if (columns > 512) throw Fault("more tensor memory is requested than exists");
  w.block->tensor_memory.assign(128 * 512, uint32_t(POISON)), w.block->tensor_columns = columns;
  std::memset(shared_bytes(*w.block, at, 4, 4), 0, 4);
}
void release(Warp& w, const Instruction&, uint32_t) { w.block->tensor_columns = 0; }

// Lane and column of register r: a warp has 32 lanes to itself; in the 16-lane shape its halves are `split` columns
// apart.
template <class F>
void cells(Warp& w, const Instruction& i, uint32_t base, uint32_t split, F&& f) {
  bool halves = i.mode;
  uint32_t first = base >> 16, column = base & 0xFFFF;
  if (first / 32 != uint32_t(w.index % 4)) throw Fault("another warp's lanes of tensor memory");
  for (int l = 0; l < LANES; ++l)
    for (int r = 0; r < i.vector; ++r) {
      uint32_t lane = first + (halves ? l % 16 : l), at = column + r + (halves && l >= 16 ? split : 0);
      f(l, r, cell(*w.block, lane, at));
    }
}
void load(Warp& w, const Instruction& i, uint32_t mask) {  // {registers}, [at]{, split}
  uint32_t split = i.mode ? uint32_t(uniform(w, i, i.vector + 1, mask)) : 0;
  uint32_t base = uint32_t(address(w, i, i.vector, __builtin_ctz(mask)));
  cells(w, i, base, split, [&](int l, int r, uint32_t& at) { reg(w, i, r)[l] = at; });
}
void store(Warp& w, const Instruction& i, uint32_t mask) {  // [at]{, split}, {registers}
  uint32_t split = i.mode ? uint32_t(uniform(w, i, 1, mask)) : 0;
  uint32_t base = uint32_t(address(w, i, 0, __builtin_ctz(mask)));
  int skipped = i.mode ? 2 : 1;
  cells(w, i, base, split, [&](int l, int r, uint32_t& at) { at = uint32_t(reg(w, i, r + skipped)[l]); });
}

int swizzle_of(uint64_t descriptor) {
  switch (descriptor >> 61) {
    case 0: return 0;
    case 2: return 128;
    case 4: return 64;
    case 6: return 32;
    default: throw Fault("a swizzle that is not emulated");
  }
}
Element element_of(uint32_t format, bool fp8) {
  if (format > 2 || (fp8 && format > 1)) throw Fault("an element format that is not emulated");
  return fp8 ? (format ? E5M2 : E4M3) : format == 0 ? F16 : format == 1 ? BF16 : TF32;
}
uint32_t lane_of(int row, int m) { return m == 64 ? row / 16 * 32 + row % 16 : row; }

void perform(Block& block, const BlockProduct& product) {
  uint32_t d = product.shape;
  int n = (d >> 17 & 63) * 8, m = (d >> 24 & 31) * 16;
  Element left = element_of(d >> 7 & 7, product.fp8), right = element_of(d >> 10 & 7, product.fp8);
  int k = 32 / bytes_of(left), per = 4 / bytes_of(left);
  if ((d >> 4 & 3) != 1 || (d & 15) || (m != 64 && m != 128)) throw Fault("a kind of product that is not emulated");
  float sign = (d >> 13 & 1) != (d >> 14 & 1) ? -1 : 1;
  std::vector<float> a(m * k), b(k * n), sum(n);
  for (int row = 0; row < m; ++row)
    for (int c = 0; c < k; ++c) {
      if (product.left_in_tensor_memory) {
        uint32_t at = uint32_t(product.a), packed = cell(block, (at >> 16) + lane_of(row, m), (at & 0xFFFF) + c / per);
        a[row * k + c] = value_in(packed, c % per, left);
      } else {
        a[row * k + c] = Shared(product.a, swizzle_of(product.a), !(d >> 15 & 1), left).value(block, row, c);
      }
    }
  Shared shared(product.b, swizzle_of(product.b), !(d >> 16 & 1), right);
  for (int c = 0; c < k; ++c)
    for (int column = 0; column < n; ++column) b[c * n + column] = shared.value(block, column, c);
  for (int row = 0; row < m; ++row) {
    std::fill(sum.begin(), sum.end(), 0.f);
    for (int c = 0; c < k; ++c)
      for (int column = 0; column < n; ++column) sum[column] += sign * a[row * k + c] * b[c * n + column];
    for (int column = 0; column < n; ++column) {
      uint32_t& at = cell(block, (product.out >> 16) + lane_of(row, m), (product.out & 0xFFFF) + column);
      at = uint32_t(raw((product.accumulates ? as<float>(at) : 0.f) + sum[column]));
    }
  }
}

void multiply(Warp& w, const Instruction& i, uint32_t mask) {  // [out], a | [a], b, shape, accumulates
  lanes(mask, [&](int l) {
    BlockProduct product{uint32_t(address(w, i, 0, l)), address(w, i, 1, l), reg(w, i, 2)[l], uint32_t(reg(w, i, 3)[l]),
                         bool(reg(w, i, 4)[l] & 1),     bool(i.mode),        bool(i.extent),  0};
    w.block->block_products.push_back(product);
  });
}
void commit(Warp& w, const Instruction& i, uint32_t mask) {  // [mbarrier]: arrive when all products so far are done
  lanes(mask, [&](int l) {
    BlockProduct marker{};
    marker.barrier = uint32_t(address(w, i, 0, l));
    w.block->block_products.push_back(marker);
    if (!w.block->late()) finish_block_products(*w.block, marker.barrier);
  });
}
void nothing(Warp&, const Instruction&, uint32_t) {}

}  // namespace

// Runs them in order, up to and including the last one that arrives at this barrier.
void finish_block_products(Block& block, uint32_t barrier) {
  auto& queue = block.block_products;
  size_t last = queue.size();
  while (last > 0 && queue[last - 1].barrier != barrier) --last;
  for (size_t n = 0; n < last; ++n) {
    if (queue[n].barrier) arrive_at(block, queue[n].barrier);
    else perform(block, queue[n]);
  }
  queue.erase(queue.begin(), queue.begin() + last);
}

bool tensor_memory(const std::string& opcode, Instruction& i) {
  auto parts = parts_of(opcode);
  if (parts[0] != "tcgen05") return false;
  i.converged = has(parts, "aligned");
  if (parts[1] == "ld" || parts[1] == "st") {
    i.mode = has(parts, "16x32bx2");
    if (!i.mode && !has(parts, "32x32b")) return false;
    i.vector = std::atoi(parts[5].c_str() + 1);
    i.execute = parts[1] == "ld" ? load : store;
  } else if (parts[1] == "mma") {
    if (!has(parts, "kind::f16") && !has(parts, "kind::f8f6f4") && !has(parts, "kind::tf32")) return false;
    if (i.args.size() != 5 || !has(parts, "cta_group::1")) return false;
    i.mode = has(parts, "kind::f8f6f4"), i.extent = i.text.find('[') != i.text.rfind('[');
    i.execute = multiply;
  } else if (parts[1] == "commit") {
    i.execute = commit;
  } else if (parts[1] == "alloc") {
    i.execute = allocate;
  } else if (parts[1] == "dealloc") {
    i.execute = release;
  } else if (parts[1].rfind("wait::", 0) == 0 || parts[1].rfind("fence::", 0) == 0 ||
             parts[1] == "relinquish_alloc_permit") {
    i.execute = nothing;
  } else {
    return false;
  }
  return true;
}

}  // namespace ptx

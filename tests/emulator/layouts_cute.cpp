// Fragment, swizzle and descriptor layouts as CuTe has them, one line per index. layouts_emulated.cpp prints the same
// lines from what the emulator does; test_emulator_layouts.py compares them.
//
// Needs the headers of CUTLASS and of a CUDA toolkit; runs on the host.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // all N, not the powers of two alone
#include <cstdint>
#include <cstdio>
#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

namespace {

using namespace cute;

// Which registers meet in d += a b: element i of A (lane * 8 + number) and element j of B (lane * 4 + number) have a
// product in element c of D (lane * 4 + number) iff they share k.
template <class Operation>
void print_mma(const char* name) {
  using Traits = MMA_Traits<Operation>;
  const auto a = typename Traits::ALayout{};  // (lane, number) -> m + 16 k
  const auto b = typename Traits::BLayout{};  // -> n + 8 k
  const auto c = typename Traits::CLayout{};  // -> m + 16 n
  int element_of_d[16 * 8];
  for (int lane = 0; lane < 32; ++lane) {
    for (int v = 0; v < 4; ++v) element_of_d[int(c(lane, v))] = lane * 4 + v;
  }
  for (int i = 0; i < 256; ++i) {
    const int mk = a(i / 8, i % 8);
    for (int j = 0; j < 128; ++j) {
      const int nk = b(j / 4, j % 4);
      if (mk / 16 == nk / 8) std::printf("%s a%d b%d d%d\n", name, i, j, element_of_d[mk % 16 + 16 * (nk % 8)]);
    }
  }
}

// Which element of whose row a lane gets: (lane, register, half) <- (lane that gave the row's address, element).
template <class Operation>
void print_ldmatrix(const char* name) {
  using Traits = Copy_Traits<Operation>;
  const auto from = typename Traits::SrcLayout{};  // (lane, bit) -> position
  const auto to = typename Traits::DstLayout{};
  static int source[32 * 128];
  for (int lane = 0; lane < 32; ++lane) {
    for (int bit = 0; bit < 128; bit += 16) source[int(from(lane, bit))] = lane * 8 + bit / 16;
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int half = 0; half < 8; ++half) {
      const int s = source[int(to(lane, 16 * half))];
      std::printf("%s lane %d register %d half %d: row %d element %d\n", name, lane, half / 2, half % 2, s / 8, s % 8);
    }
  }
}

template <class Swizzling>
void print_swizzle(int span) {
  for (int address = 0; address < 4096; address += 4) {
    std::printf("swizzle %d: %d -> %d\n", span, address, int(Swizzling::apply(address)));
  }
}

// Byte offsets of a tile in shared memory. CuTe's swizzles are of byte addresses: recast to those of elements first.
template <class Layout>
auto element_offsets(const Layout& layout) {
  return as_position_independent_swizzle_layout(layout);
}

// The tile `rows` x `columns` that a bulk copy with this swizzle fills: rows of one span.
template <class Atom>
void print_bulk_copy(int span, const Atom& atom) {
  const auto offset = element_offsets(atom);
  for (int row = 0; row < 8; ++row) {
    for (int column = 0; column < span / 2; ++column) {
      std::printf("bulk copy swizzle %d row %d column %d: byte %d\n", span, row, column, int(offset(row, column)) * 2);
    }
  }
}

// An operand of wgmma, MN x 64 (k), and the 64-bit descriptor of its k block `block`.
template <GMMA::Major major, class Layout>
void print_operand(const char* name, const Layout& layout) {
  static uint16_t storage[256 * 64];
  const auto offset = element_offsets(layout);
  constexpr int kRows = size<0>(Layout{}), kBlocks = size<1>(Layout{}) / 16;
  for (int block = 0; block < kBlocks; ++block) {
    const auto tensor = make_tensor(make_smem_ptr(reinterpret_cast<half_t*>(storage)), layout);
    const auto tile = local_tile(tensor, Shape<Int<kRows>, _16>{}, make_coord(0, block));
    const GmmaDescriptor descriptor = SM90::GMMA::make_gmma_desc<major>(tile);
    std::printf("%s block %d leading %d stride %d swizzle %d\n", name, block,
                int(descriptor.bitfield.leading_byte_offset_) * 16, int(descriptor.bitfield.stride_byte_offset_) * 16,
                int(descriptor.bitfield.layout_type_));
    for (int mn = 0; mn < kRows; ++mn) {
      for (int k = 0; k < 16; ++k) {
        std::printf("%s block %d (%d, %d): byte %d\n", name, block, mn, k, int(offset(mn, block * 16 + k)) * 2);
      }
    }
  }
}

template <int N, class Operation>
void print_wgmma_accumulator() {
  const auto c = typename MMA_Traits<Operation>::CLayout{};  // (thread, number) -> m + 64 n
  for (int thread = 0; thread < 128; ++thread) {
    for (int v = 0; v < N / 2; ++v) {
      const int mn = c(thread, v);
      std::printf("wgmma %d thread %d d[%d]: (%d, %d)\n", N, thread, v, mn % 64, mn / 64);
    }
  }
}
template <class Operation>
void print_wgmma_a() {
  const auto a = typename MMA_Traits<Operation>::ALayout{};
  for (int thread = 0; thread < 128; ++thread) {
    for (int v = 0; v < 8; ++v) {
      const int mk = a(thread, v);
      std::printf("wgmma A thread %d half %d: (%d, %d)\n", thread, v, mk % 64, mk / 64);
    }
  }
}

}  // namespace

int main() {
  print_mma<SM80_16x8x16_F32BF16BF16F32_TN>("mma bf16");
  print_mma<SM80_16x8x16_F32F16F16F32_TN>("mma f16");
  print_ldmatrix<SM75_U32x4_LDSM_N>("ldmatrix");
  print_ldmatrix<SM75_U16x8_LDSM_T>("ldmatrix trans");
  print_swizzle<Swizzle<3, 4, 3>>(128);
  print_swizzle<Swizzle<2, 4, 3>>(64);
  print_swizzle<Swizzle<1, 4, 3>>(32);
  print_bulk_copy(128, GMMA::Layout_K_SW128_Atom<half_t>{});
  print_bulk_copy(64, GMMA::Layout_K_SW64_Atom<half_t>{});
  print_bulk_copy(32, GMMA::Layout_K_SW32_Atom<half_t>{});

  constexpr auto K = GMMA::Major::K;
  constexpr auto MN = GMMA::Major::MN;
  print_operand<K>("K 128 64", tile_to_shape(GMMA::Layout_K_SW128_Atom<half_t>{}, Shape<_64, _64>{}));
  print_operand<K>("K 128 176", tile_to_shape(GMMA::Layout_K_SW128_Atom<half_t>{}, Shape<Int<176>, _64>{}));
  print_operand<K>("K 128 256", tile_to_shape(GMMA::Layout_K_SW128_Atom<half_t>{}, Shape<_256, _64>{}));
  print_operand<K>("K 64 128", tile_to_shape(GMMA::Layout_K_SW64_Atom<half_t>{}, Shape<_128, _32>{}));
  print_operand<K>("K 32 64", tile_to_shape(GMMA::Layout_K_SW32_Atom<half_t>{}, Shape<_64, _16>{}));
  // Chunks of eight columns one after the other, each of all rows.
  print_operand<K>("K 0 64", tile_to_shape(GMMA::Layout_K_INTER_Atom<half_t>{}, Shape<_64, _16>{}));
  // Spans of 64 columns one after the other, each of all k.
  print_operand<MN>("MN 128 64",
                    tile_to_shape(GMMA::Layout_MN_SW128_Atom<half_t>{}, Shape<_64, _64>{}, Step<_2, _1>{}));
  print_operand<MN>("MN 128 256",
                    tile_to_shape(GMMA::Layout_MN_SW128_Atom<half_t>{}, Shape<_256, _64>{}, Step<_2, _1>{}));
  print_operand<MN>("MN 64 64", tile_to_shape(GMMA::Layout_MN_SW64_Atom<half_t>{}, Shape<_64, _32>{}, Step<_2, _1>{}));
  print_operand<K>("A K 128 64", tile_to_shape(GMMA::Layout_K_SW128_Atom<half_t>{}, Shape<_64, _64>{}));
  print_operand<MN>("A MN 128 64",
                    tile_to_shape(GMMA::Layout_MN_SW128_Atom<half_t>{}, Shape<_64, _64>{}, Step<_2, _1>{}));

  print_wgmma_accumulator<32, SM90_64x32x16_F32F16F16_SS<K, K>>();
  print_wgmma_accumulator<48, SM90::GMMA::MMA_64x48x16_F32F16F16_SS<K, K>>();
  print_wgmma_accumulator<64, SM90_64x64x16_F32F16F16_SS<K, K>>();
  print_wgmma_accumulator<80, SM90::GMMA::MMA_64x80x16_F32F16F16_SS<K, K>>();
  print_wgmma_accumulator<96, SM90_64x96x16_F32F16F16_SS<K, K>>();
  print_wgmma_accumulator<112, SM90::GMMA::MMA_64x112x16_F32F16F16_SS<K, K>>();
  print_wgmma_accumulator<128, SM90_64x128x16_F32F16F16_SS<K, K>>();
  print_wgmma_accumulator<176, SM90::GMMA::MMA_64x176x16_F32F16F16_SS<K, K>>();
  print_wgmma_accumulator<192, SM90_64x192x16_F32F16F16_SS<K, K>>();
  print_wgmma_accumulator<256, SM90_64x256x16_F32F16F16_SS<K, K>>();
  print_wgmma_a<SM90_64x64x16_F32F16F16_RS<K, K>>();
  return 0;
}

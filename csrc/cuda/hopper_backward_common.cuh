// What the Hopper backward kernels share: which blocks of the other axis a warpgroup works on, and their products.
#pragma once
#include "attention_backward_common.cuh"
#include "hopper_common.cuh"

namespace packattn::cuda::hopper {

// Blocks of BLOCK rows of the other axis, counted from the tile's first, as the 64 rows of a warpgroup see them: some
// row something of blocks some_first <= n < some_last, all rows all of first <= n < last, which is inside if it is not
// empty. The same in all threads of the group.
template <int BLOCK>
struct GroupBlocks {
  int some_first, first, last, some_last;

  PACKATTN_DEVICE GroupBlocks(const GroupRanges& x, const Tile& tile) {
    const bool some = x.some_begin < x.some_end;
    some_first = some ? (x.some_begin - tile.begin) / BLOCK : 0;
    some_last = some ? (x.some_end - tile.begin + BLOCK - 1) / BLOCK : 0;
    first = x.full_begin >= tile.end
                ? some_last
                : (x.full_begin > tile.begin ? (x.full_begin - tile.begin + BLOCK - 1) / BLOCK : 0);
    const int end = x.full_end < tile.end ? x.full_end : tile.end;
    last = some && end > tile.begin ? (end - tile.begin) / BLOCK : 0;
  }
};

// x = A B^T over COLUMNS columns, both in shared memory: A 64 rows of panels that are `panel_a` bytes, B of `panel_b`.
// A group of its own, not waited for.
template <class T, int COLUMNS, int N>
PACKATTN_DEVICE void multiply_rows(float (&x)[N], uint32_t a, uint32_t panel_a, uint32_t b, uint32_t panel_b) {
  ptx::hold(a);  // else the descriptors of all steps are kept in registers across blocks
  const uint64_t from_a = matrix_descriptor(a, 16, 1024, Swizzle::bytes128);
  const uint64_t from_b = matrix_descriptor(b, 16, 1024, Swizzle::bytes128);
#pragma unroll
  for (int i = 0; i < COLUMNS / 16; ++i) {  // K-major: 16 columns are 32 bytes inside a panel
    ptx::wgmma_ss<T, false, false>(x, advance(from_a, i / 4 * panel_a + i % 4 * 32),
                                   advance(from_b, i / 4 * panel_b + i % 4 * 32), i > 0);
  }
  ptx::wgmma_commit();
}

// x += A B, A from registers, B 16 STEPS rows in shared memory. A group of its own, not waited for.
template <class T, int STEPS, int N>
PACKATTN_DEVICE void multiply_columns(float (&x)[N], const uint32_t (&a)[STEPS][4], uint32_t b) {
  const uint64_t from_b = matrix_descriptor(b, STEPS * 16 * 128, 1024, Swizzle::bytes128);
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {  // MN-major: 16 rows are 2048 bytes, the leading offset is a panel
    ptx::wgmma_rs<T, true>(x, a[i], advance(from_b, i * 2048), true);
  }
  ptx::wgmma_commit();
}

}  // namespace packattn::cuda::hopper

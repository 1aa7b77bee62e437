// Building blocks of the tensor-core kernels: matrices in shared memory, their way there and back, and the products of
// one warp. Fragment layouts: ptx.cuh.
//
// A matrix in shared memory holds rows of PITCH 16-bit numbers (a multiple of 32) in chunks of 16 bytes. ldmatrix reads
// one chunk column of 8 rows at a time, and the 32 banks hold 8 chunks, so the chunks of a row are permuted such that 8
// consecutive rows have the same chunk column in 8 different places:
//   PITCH a multiple of 64 (rows of whole 128-byte lines): chunk c of row r stands at c ^ (r & 7), among the 8 of a
//   line. else (rows of an odd number of 64-byte halves: row parity picks the half): c ^ (r >> 1 & 3), among 4 of a
//   half.
// A matrix starts at a multiple of 128 bytes. Its lane addresses (lane_a, lane_b) are made once; column steps are then
// one XOR (column_step) and rows, lines and sibling matrices are additions of constants.
#pragma once
#include "ptx.cuh"

namespace packattn::cuda::tile {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// ---- layout

template <int PITCH>
constexpr int kGroup = PITCH % 64 == 0 ? 8 : 4;  // chunks among which the swizzle permutes

__host__ __device__ constexpr int matrix_bytes(int rows, int pitch) { return rows * pitch * 2; }

// Byte offset of 16-byte chunk `chunk` of row `row`.
template <int PITCH>
PACKATTN_DEVICE uint32_t chunk_at(int row, int chunk) {
  static_assert(PITCH % 32 == 0);
  constexpr int G = kGroup<PITCH>;
  const int key = G == 8 ? row & 7 : row >> 1 & 3;
  return static_cast<uint32_t>(row * PITCH * 2 + (chunk ^ key) * 16);
}

// Lane addresses of the 16 x 16 block at row 0, column 0: as operand A, and as operand B of a product along the rows'
// numbers (out = weights * matrix, read transposed); as operand B of a product along the columns (out = a * matrix^T).
template <int PITCH>
PACKATTN_DEVICE uint32_t lane_a(int lane) {
  return chunk_at<PITCH>(lane % 16, lane / 16);
}
template <int PITCH>
PACKATTN_DEVICE uint32_t lane_b(int lane) {
  return chunk_at<PITCH>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
// The lane address `step` times 16 columns further on.
template <int PITCH>
PACKATTN_DEVICE uint32_t column_step(uint32_t lane_address, int step) {
  constexpr int S = kGroup<PITCH> / 2;
  return (lane_address ^ static_cast<uint32_t>(step % S * 32)) + static_cast<uint32_t>(step / S * S * 32);
}

// ---- global memory to shared memory

// What one thread copies of one head of a [rows, heads, dim] tensor: 8 (4) lanes side by side share a row.
struct Source {
  const uint16_t* any;   // some address inside the tensor, given to copies that read nothing
  const uint16_t* next;  // this thread's first chunk of the next rows to copy
  int64_t row_stride;
  int dim;
  uint32_t to;  // where that chunk goes in the matrix
};

template <int PITCH>
PACKATTN_DEVICE Source source_at(const void* data, int64_t row_stride, int64_t head_stride, int head, int64_t row,
                                 int dim, int thread) {
  constexpr int G = kGroup<PITCH>;
  Source source;
  source.any = static_cast<const uint16_t*>(data);
  source.next = source.any + head * head_stride + (row + thread / G) * row_stride + thread % G * 8;
  source.row_stride = row_stride;
  source.dim = dim;
  source.to = chunk_at<PITCH>(thread / G, thread % G);
  return source;
}

// Starts the copies of the next ROWS rows into the matrix at `matrix`, and moves on by ROWS rows. Only the first
// `valid` rows (may be negative or more than ROWS) and the first dim columns are read, the rest is zero-filled.
template <int PITCH, int ROWS, int THREADS>
PACKATTN_DEVICE void copy_rows(uint32_t matrix, Source& source, int valid) {
  constexpr int G = kGroup<PITCH>, STEP = THREADS / G, LINES = PITCH / (8 * G);
  static_assert(THREADS % (8 * G) == 0 && (ROWS % STEP == 0 || STEP % ROWS == 0) && ROWS % 8 == 0);
  constexpr int STEPS = ROWS > STEP ? ROWS / STEP : 1;
  const uint32_t to = matrix + source.to;
  const int64_t step = static_cast<int64_t>(STEP) * source.row_stride;
  if (STEP <= ROWS || source.to < ROWS * PITCH * 2) {
    const uint16_t* from = source.next;
    if (valid >= ROWS && source.dim == PITCH) {
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
#pragma unroll
        for (int j = 0; j < LINES; ++j) {
          ptx::cp_async16(to + i * STEP * PITCH * 2 + j * G * 16, from + j * G * 8, true);
        }
        from += step;
      }
    } else {
      // The thread's row and chunk, got back from `to` rather than kept in registers.
      const int row = static_cast<int>(source.to / (PITCH * 2));
      const int column = static_cast<int>(source.to / 16 % (PITCH / 8)) ^ (G == 8 ? row & 7 : row >> 1 & 3);
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
#pragma unroll
        for (int j = 0; j < LINES; ++j) {
          const bool ok = row + i * STEP < valid && (column + j * G) * 8 < source.dim;
          ptx::cp_async16(to + i * STEP * PITCH * 2 + j * G * 16, ok ? from + j * G * 8 : source.any, ok);
        }
        from += step;
      }
    }
  }
  source.next += static_cast<int64_t>(ROWS) * source.row_stride;
}

// ---- products of one warp

template <int A, int B>
PACKATTN_DEVICE void zero(float (&x)[A][B][4]) {
#pragma unroll
  for (int a = 0; a < A; ++a) {
#pragma unroll
    for (int b = 0; b < B; ++b) {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[a][b][j] = 0.f;
    }
  }
}

// MT x KS blocks of operand A: rows in blocks of 16, columns in steps of 16.
template <int PITCH, int MT, int KS>
PACKATTN_DEVICE void load_a(uint32_t (&a)[MT][KS][4], uint32_t lane_address) {
#pragma unroll
  for (int m = 0; m < MT; ++m) {
#pragma unroll
    for (int ks = 0; ks < KS; ++ks) {
      ptx::ldmatrix_x4(a[m][ks], column_step<PITCH>(lane_address, ks) + m * 16 * PITCH * 2);
    }
  }
}

// out += A * B^T: A has MT * 16 rows, B has NT * 8 rows (NT even), both KS * 16 columns. `b` is the lane_b address of
// B. A comes from shared memory (`a`: lane_a address) or, in the second form, from registers.
template <class T, int PITCH, int KS, int MT, int NT>
PACKATTN_DEVICE void multiply_rows(float (&out)[MT][NT][4], uint32_t a, uint32_t b) {
#pragma unroll
  for (int ks = 0; ks < KS; ++ks) {
    uint32_t af[MT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) ptx::ldmatrix_x4(af[m], column_step<PITCH>(a, ks) + m * 16 * PITCH * 2);
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      uint32_t bf[4];
      ptx::ldmatrix_x4(bf, column_step<PITCH>(b, ks) + n * 8 * PITCH * 2);
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        ptx::mma16816<T>(out[m][n], af[m], bf[0], bf[1]);
        ptx::mma16816<T>(out[m][n + 1], af[m], bf[2], bf[3]);
      }
    }
  }
}
template <class T, int PITCH, int KS, int MT, int NT>
PACKATTN_DEVICE void multiply_rows(float (&out)[MT][NT][4], const uint32_t (&a)[MT][KS][4], uint32_t b) {
#pragma unroll
  for (int ks = 0; ks < KS; ++ks) {
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      uint32_t bf[4];
      ptx::ldmatrix_x4(bf, column_step<PITCH>(b, ks) + n * 8 * PITCH * 2);
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        ptx::mma16816<T>(out[m][n], a[m][ks], bf[0], bf[1]);
        ptx::mma16816<T>(out[m][n + 1], a[m][ks], bf[2], bf[3]);
      }
    }
  }
}

// Accumulators of MT * 16 rows and NT * 8 columns, rounded to T, as operand A.
template <class T, int MT, int NT>
PACKATTN_DEVICE void as_operand(uint32_t (&a)[MT][NT / 2][4], const float (&c)[MT][NT][4]) {
#pragma unroll
  for (int m = 0; m < MT; ++m) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) a[m][n / 2][n % 2 * 2 + r] = ptx::pack2<T>(c[m][n][2 * r], c[m][n][2 * r + 1]);
    }
  }
}

// out += A * B: A has MT * 16 rows and KS * 16 columns, B has KS * 16 rows and NT * 8 columns (NT even). `b` is the
// lane_a address of B, moved to the first of its columns that are wanted.
template <class T, int PITCH, int MT, int KS, int NT>
PACKATTN_DEVICE void multiply_columns(float (&out)[MT][NT][4], const uint32_t (&a)[MT][KS][4], uint32_t b) {
#pragma unroll
  for (int ks = 0; ks < KS; ++ks) {
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      uint32_t bf[4];
      ptx::ldmatrix_x4_trans(bf, column_step<PITCH>(b, n / 2) + ks * 16 * PITCH * 2);
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        ptx::mma16816<T>(out[m][n], a[m][ks], bf[0], bf[1]);
        ptx::mma16816<T>(out[m][n + 1], a[m][ks], bf[2], bf[3]);
      }
    }
  }
}

// The same with A still in accumulators.
template <class T, int PITCH, int MT, int WT, int NT>
PACKATTN_DEVICE void multiply_columns(float (&out)[MT][NT][4], const float (&weights)[MT][WT][4], uint32_t b) {
  uint32_t a[MT][WT / 2][4];
  as_operand<T>(a, weights);
  multiply_columns<T, PITCH>(out, a, b);
}

// ---- registers to global memory

// Writes factor * x (MT * 16 rows, NT * 8 columns of one warp) as T. `stage`: a matrix in shared memory of as many rows
// and PITCH columns that no other warp touches; what this warp read from it before is overwritten. to: where row 0
// goes. Only `rows` rows (may be negative) and `dim` columns are written.
template <class T, int PITCH, int MT, int NT>
PACKATTN_DEVICE void store_rows(const float (&x)[MT][NT][4], float factor, uint32_t stage, uint16_t* to,
                                int64_t row_stride, int rows, int dim, int lane) {
  constexpr int G = kGroup<PITCH>, STEP = 32 / G;
  static_assert(NT * 8 <= PITCH && NT % G == 0);
  ptx::warp_sync();  // ldmatrix reads of other lanes come first
#pragma unroll
  for (int m = 0; m < MT; ++m) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        ptx::sts32(stage + chunk_at<PITCH>(m * 16 + lane / 4 + 8 * r, n) + lane % 4 * 4,
                   ptx::pack2<T>(x[m][n][2 * r] * factor, x[m][n][2 * r + 1] * factor));
      }
    }
  }
  ptx::warp_sync();
  const int column = lane % G;
  to += lane / G * row_stride + column * 8;
#pragma unroll
  for (int i = 0; i < MT * 16; i += STEP) {
    const int row = i + lane / G;
#pragma unroll
    for (int j = 0; j < NT; j += G) {
      if (row < rows && (column + j) * 8 < dim) {
        ptx::store_global(reinterpret_cast<uint4*>(to + j * 8), ptx::lds128(stage + chunk_at<PITCH>(row, column + j)));
      }
    }
    to += STEP * row_stride;
  }
}

// ---- ranges

// What a warp's rows see. Outside [some_begin, some_end) no row sees anything, inside [full_begin, full_end) all rows
// see everything. Nothing here assumes that ranges are in order.
struct Span {
  int some_begin;
  int some_end;
  int full_begin;
  int full_end;
};

// Writes the ranges of ROWS rows of one warp, cut to [low, high), to `table` (8 bytes a row), and returns their span;
// the warp sees the table after its next warp_sync or block_sync. begin, end: of the warp's first row. Rows that see
// nothing get an empty range. Rows at or past `rows` are nobody's: they see everything and do not count.
template <int ROWS>
PACKATTN_DEVICE Span load_ranges(uint32_t table, const int32_t* begin, const int32_t* end, int rows, int low, int high,
                                 int lane) {
  constexpr int kMax = 0x7FFFFFFF;
  Span span = {kMax, 0, 0, kMax};
#pragma unroll
  for (int i = 0; i < ROWS; i += 32) {
    const int row = i + lane;
    int b = 0, e = kMax;
    if (row < rows) {
      b = ptx::load_global(begin + row);
      e = ptx::load_global(end + row);
      b = b < low ? low : b;
      e = e > high ? high : e;
      if (b < e) {
        span.some_begin = b < span.some_begin ? b : span.some_begin;
        span.some_end = e > span.some_end ? e : span.some_end;
      } else {
        b = kMax;
        e = 0;
      }
      span.full_begin = b > span.full_begin ? b : span.full_begin;
      span.full_end = e < span.full_end ? e : span.full_end;
    }
    if (ROWS % 32 == 0 || row < ROWS) {
      ptx::sts32(table + row * 8, ptx::ibits(b));
      ptx::sts32(table + row * 8 + 4, ptx::ibits(e));
    }
  }
  span.some_begin = ptx::reduce_min(span.some_begin);
  span.some_end = ptx::reduce_max(span.some_end);
  span.full_begin = ptx::reduce_max(span.full_begin);
  span.full_end = ptx::reduce_min(span.full_end);
  return span;
}

// x[m][n][.] = value wherever the row's range leaves out the column; column 0 stands for number `first`.
template <int MT, int NT>
PACKATTN_DEVICE void mask(float (&x)[MT][NT][4], uint32_t table, int first, float value, int lane) {
#pragma unroll
  for (int m = 0; m < MT; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 range = ptx::lds64(table + (m * 16 + lane / 4 + 8 * r) * 8);
      const int begin = ptx::fint(range.x) - first - lane % 4 * 2, end = ptx::fint(range.y) - first - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (n * 8 + j < begin || n * 8 + j >= end) x[m][n][2 * r + j] = value;
        }
      }
    }
  }
}

// ---- numbers

// tanh(x / (2 log2 e)): the caller folds 2 log2 e into x. The error is a rounding or two of 1, which is what a soft
// cap needs: its score is an exponent, so the absolute error counts.
PACKATTN_DEVICE float tanh_scaled(float x) { return fmaf(-2.f, ptx::rcp(1.f + ptx::ex2(x)), 1.f); }

}  // namespace packattn::cuda::tile

// Writing a row of a 64 x kColumns fragment (see ptx.cuh) to memory; all four lanes of the row take part.
#pragma once

#include "ptx.cuh"

// Lane i of four gets element i of each: a 4 x 4 transpose in two exchanges.
FFA_DEVICE void transpose_quad(uint32 (&x)[4]) {
    const bool odd = ptx::lane_index() & 1, upper = ptx::lane_index() & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32 received = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], 1);
        (odd ? x[i] : x[i + 1]) = received;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32 received = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + 2], 2);
        (upper ? x[i] : x[i + 2]) = received;
    }
}

// The first `columns` elements of row h (0, 1) of this thread's fragment, if `valid`.  The lanes exchange their pairs, so
// that each holds eight neighbouring columns.
template <DType kType, int kColumns>
FFA_DEVICE void store_row(uint16* row, bool valid, const float (&values)[kColumns / 2], int h, int columns) {
    const int lane = ptx::lane_index() & 3;
#pragma unroll
    for (int j = 0; j < kColumns / 8; j += 4) {
        uint32 pair[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pair[i] = ptx::pack_pair<kType>(values[4 * (j + i) + 2 * h], values[4 * (j + i) + 2 * h + 1]);
        }
        transpose_quad(pair);
        const int column = 8 * (j + lane);
        if (valid && column < columns) {
            ptx::store_global_v4(row + column, pair[0], pair[1], pair[2], pair[3]);
        }
    }
}
template <DType kType, int kColumns>
FFA_DEVICE void store_row(float* row, bool valid, const float (&values)[kColumns / 2], int h, int columns) {
    if (!valid) return;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
        const int column = 8 * j + 2 * (ptx::lane_index() & 3);
        if (column < columns) {
            *reinterpret_cast<float2*>(row + column) = make_float2(values[4 * j + 2 * h], values[4 * j + 2 * h + 1]);
        }
    }
}

// Copies rows of up to four tensors from place to place, 16 bytes at a time: keys and values into a message for another
// GPU, out of it, and among other rows.
#include "ptx.cuh"

constexpr int kThreads = 256, kVectors = 4, kCopies = 4;

// A row is [a, size_b, inner] vectors of 16 bytes; strides count in them.
struct RowCopy {
    const uint4* source;
    uint4* target;
    const int64* source_index;  // [rows], or null: row i
    const int64* target_index;
    int64 source_row, source_a, source_b, target_row, target_a, target_b;
    int rows, size_b, inner, vectors;  // vectors: of all rows
};
struct CopyParams {
    RowCopy copies[kCopies];
    int first_block[kCopies];  // of each copy; beyond the last copy: the number of blocks
};
static_assert(sizeof(CopyParams) == 400, "the host packs what the kernel reads");

extern "C" __global__ void __launch_bounds__(kThreads)
    ffa_copy_rows(const __grid_constant__ CopyParams params) {
    int which = 0;
    while (which + 1 < kCopies && static_cast<int>(blockIdx.x) >= params.first_block[which + 1]) ++which;
    const RowCopy& copy = params.copies[which];
    const int first = (blockIdx.x - params.first_block[which]) * (kThreads * kVectors) + threadIdx.x;
    uint4 values[kVectors];
    uint4* targets[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int at = first + i * kThreads;
        targets[i] = nullptr;
        if (at >= copy.vectors) continue;
        // Rows of one plane follow each other, as they lie where heads come before rows.
        const int segment = at / copy.inner, column = at % copy.inner;
        const int plane = segment / copy.rows, row = segment % copy.rows;
        const int a = plane / copy.size_b, b = plane % copy.size_b;
        const int64 from = copy.source_index ? copy.source_index[row] : row;
        const int64 to = copy.target_index ? copy.target_index[row] : row;
        values[i] = copy.source[from * copy.source_row + a * copy.source_a + b * copy.source_b + column];
        targets[i] = copy.target + to * copy.target_row + a * copy.target_a + b * copy.target_b + column;
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        if (targets[i]) *targets[i] = values[i];
    }
}

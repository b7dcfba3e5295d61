// The two light kernels around the attention backward.
//
// prepare, where dQ is summed: the rows' statistics (row_statistics.cuh), zeros in the dQ buffer and the work counters.
//
// finish: the dQ buffer, scaled, into dq; and where dK and dV were summed in float32, these into dk and dv.
//
// The dQ buffer holds, for each panel of 64 columns, groups of 8 query rows as fragments of dQ^T: float4 number
// warp * 32 + lane of a group has the columns 16 warp + lane / 4 (+ 8) of the rows 2 (lane % 4) (+ 1), row first.
//
// The dK/dV buffer holds a key tile as fragments of the consumer warpgroups: float4 number
// (half * kColumns / 8 + j) * 128 + thread has the columns 8 j + 2 (lane % 4) (+ 1) of the rows
// 64 half + 16 warp + lane / 4 (+ 8), column first; dK before dV.
#pragma once

#include "backward_shared.cuh"
#include "row_statistics.cuh"

namespace ffa {

constexpr int kConvertRows = 32;      // query rows of a block
constexpr int kConvertThreads = 256;

struct PrepareParams {
    const void* out;
    const void* d_out;
    const float* lse;    // [B * H, q_len]
    const float* d_lse;  // the same, or null
    float* row_shift;    // [B * H, padded_rows]
    float* row_delta;
    float4* dq_buffer;   // kHeadDim / 4 for each padded row
    int* work_counters;  // two
    const int* split;    // see BackwardParams
    int64 out_batch, out_head, out_row;  // strides in elements
    int64 d_out_batch, d_out_head, d_out_row;
    int heads, q_len, padded_rows, v_dim;
};

struct FinishParams {
    const int* split;  // see BackwardParams
    const float4* dq_buffer;
    void* dq;
    int64 dq_batch, dq_head, dq_row;
    int heads, q_len, padded_rows, head_dim;
    float scale;
    int row_blocks;  // blocks of the grid that convert dq; two for each key tile and key/value head follow
    const float4* dkv_buffer;
    void* dk;
    void* dv;
    int64 dk_batch, dk_head, dk_row;
    int64 dv_batch, dv_head, dv_row;
    const int* head_ptr;  // of the plan, as in MaskParams
    const int* tile_begin;
    const int* tile_end;
    int kv_heads, tiles, mask_batches, mask_heads, v_dim;
};

template <DType kType, int kHeadDim, int kVDim, class OutElement>
FFA_DEVICE void prepare(const PrepareParams& params) {
    constexpr int kLanes = (kVDim > 128 ? 256 : kVDim) / 8;  // of a row
    constexpr int kPassRows = kConvertThreads / kLanes;
    static_assert(32 % kLanes == 0, "a row stays inside a warp");
    if (blockIdx.x == 0 && threadIdx.x < 2) params.work_counters[threadIdx.x] = 0;
    if (params.split != nullptr && *params.split) return;
    const int blocks = params.padded_rows / kConvertRows;
    const int head_row = blockIdx.x / blocks, first_row = blockIdx.x % blocks * kConvertRows;
    const int batch = head_row / params.heads, head = head_row % params.heads;
    const int64 first_entry = static_cast<int64>(blockIdx.x) * kConvertRows;

    const int lane = threadIdx.x % kLanes, column = lane * 8;
#pragma unroll
    for (int pass = 0; pass < kConvertRows / kPassRows; ++pass) {
        const int entry = pass * kPassRows + threadIdx.x / kLanes;
        const int row = first_row + entry;
        float sum = 0.0f;
        if (row < params.q_len && column < params.v_dim) {
            const auto* out = static_cast<const OutElement*>(params.out) + batch * params.out_batch +
                              head * params.out_head + row * params.out_row;
            const auto* d_out = static_cast<const uint16*>(params.d_out) + batch * params.d_out_batch +
                                head * params.d_out_head + row * params.d_out_row;
            sum = dot(Eight<kType, OutElement>::load(out + column), Eight<kType, uint16>::load(d_out + column), sum);
        }
#pragma unroll
        for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (lane == 0) {
            RowStatistics statistics;
            if (row < params.q_len) {
                statistics = RowStatistics::load(params.lse, params.d_lse, static_cast<int64>(head_row) * params.q_len + row);
                statistics.finish(sum);
            }
            params.row_shift[first_entry + entry] = statistics.shift;
            params.row_delta[first_entry + entry] = statistics.delta;
        }
    }
    float4* buffer = params.dq_buffer + first_entry * (kHeadDim / 4);
#pragma unroll
    for (int i = threadIdx.x; i < kConvertRows * kHeadDim / 4; i += kConvertThreads) {
        buffer[i] = {0.0f, 0.0f, 0.0f, 0.0f};
    }
}

// dK (which = 0) or dV (1) of one block of the buffer; blocks are numbered as by Planner::find_item.
template <class C, int kColumns> FFA_DEVICE void finish_keys(const FinishParams& params, int block, int which) {
    using Element = typename C::GradientType;
    const int plane = block / params.tiles, tile = block % params.tiles;
    const bool by_plane = params.mask_heads > 1 || params.mask_batches == 1;
    const int kv_head = plane % params.kv_heads;
    int batch = plane / params.kv_heads, index = tile;
    if (!by_plane) {
        while (params.head_ptr[batch + 1] <= tile) ++batch;
    } else if (params.mask_batches > 1) {
        index += params.head_ptr[batch * params.mask_heads];
    }
    const int begin = params.tile_begin[index], rows = params.tile_end[index] - begin;
    const float4* buffer = params.dkv_buffer + static_cast<int64>(block) * (C::kKeys * (C::kHeadDim + C::kVDim) / 4) +
                           which * (C::kKeys * C::kHeadDim / 4);
    const int64 batch_stride = which ? params.dv_batch : params.dk_batch;
    const int64 head_stride = which ? params.dv_head : params.dk_head;
    auto* out = static_cast<Element*>(which ? params.dv : params.dk) + batch * batch_stride + kv_head * head_stride;
    const int64 row_stride = which ? params.dv_row : params.dk_row;
    const float scale = which ? 1.0f : params.scale;
#pragma unroll 4
    for (int i = threadIdx.x; i < C::kKeys * kColumns / 4; i += kConvertThreads) {
        const int slice = i / 128, thread = i % 128, lane = thread % 32;
        const int row = slice / (kColumns / 8) * 64 + thread / 32 * 16 + lane / 4;
        const int column = slice % (kColumns / 8) * 8 + lane % 4 * 2;
        if (column >= (which ? params.v_dim : params.head_dim)) continue;
        const float4 fragment = buffer[i];
        Element* to = out + (begin + row) * row_stride + column;
        if (row < rows) store_pair<C::kType>(to, fragment.x * scale, fragment.y * scale);
        if (row + 8 < rows) store_pair<C::kType>(to + 8 * row_stride, fragment.z * scale, fragment.w * scale);
    }
}

template <class C, class Element> FFA_DEVICE void finish(const FinishParams& params) {
    if (params.split != nullptr && *params.split) return;
    constexpr DType kType = C::kType;
    constexpr int kHeadDim = C::kHeadDim;
    if (blockIdx.x >= params.row_blocks) {
        const int job = blockIdx.x - params.row_blocks;
        if (C::kHeadDim == C::kVDim) {
            finish_keys<C, C::kHeadDim>(params, job / 2, job % 2);
        } else if (job % 2) {
            finish_keys<C, C::kVDim>(params, job / 2, 1);
        } else {
            finish_keys<C, C::kHeadDim>(params, job / 2, 0);
        }
        return;
    }
    if constexpr (!C::kSumDq) return;
    // Rows 16 bytes longer than a multiple of 128: writes of a fragment touch every bank once.
    __shared__ float rows[kConvertRows][kHeadDim + 4];
    const int blocks = params.padded_rows / kConvertRows;
    const int head_row = blockIdx.x / blocks, first_row = blockIdx.x % blocks * kConvertRows;
    if (first_row >= params.q_len) return;
    constexpr int kGroups = kConvertRows / kRowGroup, kGroupVectors = kRowGroup * kPanelColumns / 4;
    const int64 panel_groups = static_cast<int64>(params.row_blocks) * kGroups;
#pragma unroll
    for (int i = threadIdx.x; i < C::kPanels * kGroups * kGroupVectors; i += kConvertThreads) {
        const int panel = i / (kGroups * kGroupVectors), vector = i % (kGroups * kGroupVectors);
        const float4 fragment =
            params.dq_buffer[(panel * panel_groups + static_cast<int64>(blockIdx.x) * kGroups) * kGroupVectors + vector];
        const int lane = vector % 32, warp = vector % kGroupVectors / 32;
        const int row = vector / kGroupVectors * kRowGroup + lane % 4 * 2;
        const int column = panel * kPanelColumns + warp * 16 + lane / 4;
        rows[row][column] = fragment.x;
        rows[row + 1][column] = fragment.y;
        rows[row][column + 8] = fragment.z;
        rows[row + 1][column + 8] = fragment.w;
    }
    __syncthreads();
    const int batch = head_row / params.heads, head = head_row % params.heads;
    auto* dq = static_cast<Element*>(params.dq) + batch * params.dq_batch + head * params.dq_head;
    constexpr int kLanes = kHeadDim / 8;
#pragma unroll
    for (int i = threadIdx.x; i < kConvertRows * kLanes; i += kConvertThreads) {
        const int block_row = i / kLanes, row = first_row + block_row, column = i % kLanes * 8;
        if (row >= params.q_len || column >= params.head_dim) continue;
        float values[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j] = rows[block_row][column + j] * params.scale;
        Element* to = dq + row * params.dq_row + column;
        if constexpr (sizeof(Element) == 4) {
            reinterpret_cast<float4*>(to)[0] = {values[0], values[1], values[2], values[3]};
            reinterpret_cast<float4*>(to)[1] = {values[4], values[5], values[6], values[7]};
        } else {
            uint32 pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) pairs[j] = ptx::pack_pair<kType>(values[2 * j], values[2 * j + 1]);
            *reinterpret_cast<uint4*>(to) = {pairs[0], pairs[1], pairs[2], pairs[3]};
        }
    }
}

}  // namespace ffa

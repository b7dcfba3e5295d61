// Writing a warpgroup's rows of the forward kernel: output, log-sum-exp and maximum.
#pragma once

#include "forward_work.cuh"
#include "row_output.cuh"
#include "softmax.cuh"

// What a consumer warpgroup knows of its item, and the output it accumulates.
struct OutputRows {
    const ForwardParams& params;
    Shared& shared;
    const int group;   // consumer warpgroup
    const int thread;  // in the warpgroup
    float (&acc_o)[kVDim / 2];
    Item item;

    // Row h (0, 1) of this thread's fragment, counted from the first row of the tile.
    FFA_DEVICE int fragment_row(int h) const { return 64 * group + 16 * (thread / 32) + lane_index() / 4 + 8 * h; }

    FFA_DEVICE void store_statistics(int h, float lse, float max_score) {
        const int row = item.row_begin + fragment_row(h) / kPack;
        if (lane_index() % 4 != 0 || row >= item.row_end) return;
        const int64 head = static_cast<int64>(item.batch) * params.heads + item.head + fragment_row(h) % kPack;
        params.lse[head * params.q_len + row] = lse;
        if (params.max_score != nullptr) params.max_score[head * params.q_len + row] = max_score;
    }

    // Rows that attend to nothing.
    FFA_DEVICE void store_empty() {
        if constexpr (kAccumulate) return;
        constexpr int kElementBytes = kWideOut ? 4 : 2;
        constexpr int kElements = 16 / kElementBytes;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            store_statistics(h, negative_infinity, negative_infinity);
            if (item.row_begin + fragment_row(h) / kPack >= item.row_end) continue;
            uint8* const row = static_cast<uint8*>(params.out_pointer) + output_offset(fragment_row(h)) * kElementBytes;
            for (int column = kElements * (lane_index() & 3); column < params.v_dim; column += 4 * kElements) {
                *reinterpret_cast<uint4*>(row + column * kElementBytes) = make_uint4(0, 0, 0, 0);
            }
        }
    }

    // As `store`, merged with what is there: out is the mean of both, weighted by 2^lse (FlashDecoding's combination).
    FFA_DEVICE void merge(const OnlineSoftmax& rows) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = item.row_begin + fragment_row(h) / kPack;
            const bool valid = row < item.row_end;
            const int64 head = static_cast<int64>(item.batch) * params.heads + item.head + fragment_row(h) % kPack;
            const int64 at = head * params.q_len + min(row, params.q_len - 1);
            const float earlier = params.lse[at];
            const float earlier_top = params.max_score != nullptr ? params.max_score[at] : negative_infinity;
            float sum = rows.sum[h], top = rows.seen[h];
#pragma unroll
            for (int lanes = 1; lanes <= 2; lanes *= 2) {
                sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lanes));
            }
            __syncwarp();  // all lanes have read before one writes
            if (!valid || top == negative_infinity) continue;
            const float now = rows.max[h] * params.scale_log2 + log2_approx(sum);
            const float larger = fmaxf(earlier, now);
            const float total = larger + log2_approx(exp2_approx(earlier - larger) + exp2_approx(now - larger));
            const float keep = exp2_approx(earlier - total), factor = exp2_approx(now - total) / sum;
            store_statistics(h, total, fmaxf(earlier_top, top * params.scale_log2));
            float* const to = static_cast<float*>(params.out_pointer) + output_offset(fragment_row(h));
#pragma unroll
            for (int j = 0; j < kVDim / 8; ++j) {
                const int column = 8 * j + 2 * (lane_index() & 3);
                if (column >= params.v_dim) continue;
                float2& pair = *reinterpret_cast<float2*>(to + column);
                const float2 old = pair;
                pair = make_float2(fmaf(acc_o[4 * j + 2 * h], factor, old.x * keep),
                                   fmaf(acc_o[4 * j + 2 * h + 1], factor, old.y * keep));
            }
        }
    }

    // Normalizes and writes the rows of `item` and their statistics.
    FFA_DEVICE void store(const OnlineSoftmax& rows) {
        if constexpr (kAccumulate) {
            merge(rows);
            return;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = rows.sum[h], top = rows.seen[h];
#pragma unroll
            for (int lanes = 1; lanes <= 2; lanes *= 2) {
                sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lanes));
            }
            const bool empty = top == negative_infinity;
            const float inverse = empty ? 0.0f : 1.0f / sum;
#pragma unroll
            for (int j = 0; j < kVDim / 8; ++j) {
                acc_o[4 * j + 2 * h] *= inverse;
                acc_o[4 * j + 2 * h + 1] *= inverse;
            }
            store_statistics(h,
                             empty ? negative_infinity : rows.max[h] * params.scale_log2 + log2_approx(sum),
                             empty ? negative_infinity : top * params.scale_log2);
        }
        if constexpr (kWideOut) {
            store_direct<float>();
        } else if constexpr (kStageOut) {
            store_staged();
        } else {
            store_direct<uint16>();
        }
    }

    FFA_DEVICE int64 output_offset(int tile_row) const {
        return item.batch * params.out_stride_batch + (item.head + tile_row % kPack) * params.out_stride_head +
               (item.row_begin + tile_row / kPack) * params.out_stride_row;
    }

    // Straight from the registers.
    template <class Element> FFA_DEVICE void store_direct() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const bool valid = item.row_begin + fragment_row(h) / kPack < item.row_end;
            Element* const row = static_cast<Element*>(params.out_pointer) + output_offset(fragment_row(h));
            store_row<kType, kVDim>(row, valid, acc_o, h, params.v_dim);
        }
    }

    // In the input's type: through shared memory, by TMA where all 64 rows are stored.
    FFA_DEVICE void store_staged() {
        uint8* const staging = shared.out + group * 64 * kVDim * 2;
        const uint32 barrier = 1 + kConsumers + group;
        if (thread == 0) bulk_wait_read<0>();
        named_barrier_sync(barrier, 128);
        const int row = 16 * (thread / 32) + (lane_index() & 15);
#pragma unroll
        for (int c = 0; c < kVDim / 16; ++c) {
            const int byte = 32 * c + 16 * (lane_index() / 16);
            const float* const value = acc_o + 8 * c;
            stmatrix_x4(smem_address(staging) + staging_offset(row, byte), pack_pair<kType>(value[0], value[1]),
                        pack_pair<kType>(value[2], value[3]), pack_pair<kType>(value[4], value[5]),
                        pack_pair<kType>(value[6], value[7]));
        }
        const int end_row = item.row_begin + (group + 1) * (64 / kPack);
        const bool whole = end_row <= item.row_end || item.row_end == params.q_len;  // TMA clips at q_len
        fence_proxy_async();
        named_barrier_sync(barrier, 128);
        if (whole) {
            if (thread == 0) {
#pragma unroll
                for (int panel = 0; panel < kPanelsV; ++panel) {
                    tma_store_4d(params.out, staging + panel * 64 * kSwizzleV, panel * kSwizzleV / 2, item.head,
                                 item.row_begin + group * (64 / kPack), item.batch);
                }
                bulk_commit();
            }
        } else {
            constexpr int kChunks = kVDim / 8;  // of 16 bytes
            for (int i = thread; i < 64 * kChunks; i += 128) {
                const int tile_row = 64 * group + i / kChunks, chunk = i % kChunks;
                if (item.row_begin + tile_row / kPack < item.row_end && 8 * chunk < params.v_dim) {
                    *reinterpret_cast<uint4*>(static_cast<uint16*>(params.out_pointer) + output_offset(tile_row) +
                                              8 * chunk) =
                        *reinterpret_cast<const uint4*>(staging + staging_offset(i / kChunks, 16 * chunk));
                }
            }
        }
    }

    // Where byte `byte` of row `row` of the warpgroup's output lies in its swizzled panels.
    FFA_DEVICE static int staging_offset(int row, int byte) {
        const int offset = byte / kSwizzleV * 64 * kSwizzleV + row * kSwizzleV + byte % kSwizzleV;
        return offset ^ (((offset >> 7) & (kSwizzleV / 16 - 1)) << 4);
    }
};

// What the backward must know of a query row beside its q and dO: lse, with +inf for a row without keys, so that its
// weights are 0, and delta = sum(dO * O) - dlse / ln 2, so that dS = P (dP - delta) (FlashAttention-2, arXiv 2307.08691,
// section 3.1; lse is in the log2 domain, so that d lse / d s = P / ln 2).
#pragma once

#include "ptx.cuh"

struct RowStatistics {
    float shift = -ptx::negative_infinity, delta = 0.0f;

    // Without sum(dO * O), of entry `at` of lse and d_lse (may be null).
    FFA_DEVICE static RowStatistics load(const float* lse, const float* d_lse, int64 at) {
        constexpr float kLog2E = 1.4426950408889634f;
        RowStatistics row;
        row.shift = __ldg(lse + at);
        if (d_lse != nullptr) row.delta = -kLog2E * __ldg(d_lse + at);
        return row;
    }

    FFA_DEVICE void finish(float sum) {
        const bool empty = shift == ptx::negative_infinity;
        shift = empty ? -ptx::negative_infinity : shift;
        delta = empty ? 0.0f : delta + sum;
    }
};

// Eight neighbouring elements (16-byte aligned): float32, or 16-bit ones of kType.
template <DType kType, class Element> struct Eight;

template <DType kType> struct Eight<kType, uint16> {
    uint4 pairs = {0, 0, 0, 0};

    FFA_DEVICE static Eight load(const uint16* from) { return {*reinterpret_cast<const uint4*>(from)}; }
    FFA_DEVICE void unpack(float (&values)[8]) const {
        ptx::unpack_pair<kType>(pairs.x, values[0], values[1]);
        ptx::unpack_pair<kType>(pairs.y, values[2], values[3]);
        ptx::unpack_pair<kType>(pairs.z, values[4], values[5]);
        ptx::unpack_pair<kType>(pairs.w, values[6], values[7]);
    }
};

template <DType kType> struct Eight<kType, float> {
    float4 halves[2] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};

    FFA_DEVICE static Eight load(const float* from) {
        return {{reinterpret_cast<const float4*>(from)[0], reinterpret_cast<const float4*>(from)[1]}};
    }
    FFA_DEVICE void unpack(float (&values)[8]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            values[4 * i] = halves[i].x, values[4 * i + 1] = halves[i].y;
            values[4 * i + 2] = halves[i].z, values[4 * i + 3] = halves[i].w;
        }
    }
};

// sum + x y
template <class X, class Y> FFA_DEVICE float dot(const X& x, const Y& y, float sum) {
    float of_x[8], of_y[8];
    x.unpack(of_x);
    y.unpack(of_y);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(of_x[i], of_y[i], sum);
    return sum;
}

// Arrivals at an mbarrier on behalf of a whole warp.
//
// FFA_EVERY_LANE_ARRIVES is for tools that look for races: they do not see that what other lanes did before __syncwarp()
// comes before the arrival of one lane (tests/gpu/sanitize_ffa.py).
#pragma once

#include "ptx.cuh"

#ifndef FFA_EVERY_LANE_ARRIVES
#define FFA_EVERY_LANE_ARRIVES false
#endif

constexpr uint32 kWarpArrivals = FFA_EVERY_LANE_ARRIVES ? 32 : 1;  // that a barrier counts for a warp

// All lanes are done with what the barrier guards.
FFA_DEVICE void arrive_warp(uint64* barrier) {
    __syncwarp();
    if (FFA_EVERY_LANE_ARRIVES || ptx::lane_index() == 0) ptx::mbarrier_arrive(barrier);
}

// Attention backward for Hopper: gradients of q, k, v over the tiles of a transposed plan.
//
// K/V-stationary: a work item is one key tile of one key/value head; it walks the query runs of some or all query heads
// of the group in steps of kRows query rows.  Per step, all transposed so that P^T feeds a product from registers:
//
//     S^T = K Q^T            P^T = exp2(scale log2e S^T - lse), masked
//     dP^T = V dO^T          dS^T = P^T (dP^T - delta)
//     dV += P^T dO           dK += dS^T Q         dQ^T = K^T dS^T, added to a float32 buffer
//
// (FlashAttention-2/3, arXiv 2307.08691 and 2407.08608.)  Where dQ must be summed in a fixed order, or the head is too
// wide for all of it, the last product is left to another kernel (gradient_q.cu).  Two consumer warpgroups own 64 keys each and exchange dS
// through shared memory for dQ; producer warps walk the plan, load tiles with TMA and turn row intervals into bits.
// Products are issued so that the tensor cores have work beside others': dP beside the exponentials, dV beside the
// exchange of dS, dK beside the sums into dQ.
//
// The dQ buffer (see backward_convert.cuh) holds groups of 8 query rows in fragment order, so that a warp adds 512
// contiguous bytes at once; that is why steps begin at multiples of 8 rows.
#pragma once

#include "backward_consumer.cuh"
#include "backward_producer.cuh"
#include "backward_wide_consumer.cuh"

namespace ffa {

template <class C> FFA_DEVICE void backward(const BackwardParams& params) {
    if (params.split != nullptr && (*params.split != 0) == C::kSumDq) return;
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    auto& shared = *reinterpret_cast<BackwardShared<C>*>(dynamic_shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kKvStages; ++i) {
            ptx::mbarrier_init(&shared.kv_full[i], 1);
            ptx::mbarrier_init(&shared.kv_empty[i], kConsumerArrivals);
        }
        shared.last_mask = 3;
        ptx::mbarrier_init(&shared.mask_full, kWarpArrivals);
        ptx::mbarrier_init(&shared.mask_empty, C::kKeys == 64 ? kConsumerArrivals / 2 : kConsumerArrivals);
        for (int i = 0; i < C::kStages; ++i) {
            ptx::mbarrier_init(&shared.step_full[i], 1);
            ptx::mbarrier_init(&shared.q_full[i], 1);
            // Consumers, Masker, Summer.
            ptx::mbarrier_init(&shared.q_empty[i], kConsumerArrivals + (1 + C::kSumDq) * kWarpArrivals);
            ptx::mbarrier_init(&shared.d_out_full[i], 1);
            ptx::mbarrier_init(&shared.d_out_empty[i], kConsumerArrivals);
        }
        if constexpr (C::kKeys == 64) {
            for (int i = 0; i < 2; ++i) {
                ptx::mbarrier_init(&shared.weights_full[i], kConsumerArrivals / 2);
                ptx::mbarrier_init(&shared.weights_empty[i], kConsumerArrivals / 2);
            }
        }
        ptx::mbarrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = ptx::warp_uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        ptx::register_decrease<kProducerRegisters>();
        const int warp = ptx::warp_uniform(threadIdx.x / 32);
        if (warp == 0) {
            if (ptx::elect_one()) Planner<C>{params, shared}.run();
        } else if (warp == 1) {
            Masker<C>{params, shared}.run();
        } else if (warp == 2) {
            if (ptx::elect_one()) RowLoader<C>{params, shared}.run();
        } else if constexpr (C::kSumDq) {
            Summer<C>{params, shared}.run();
        }
    } else {
        ptx::register_increase<kConsumerRegisters>();
        if constexpr (C::kKeys == 64) {
            WideConsumer<C>{params, shared, 0}.run(warpgroup - 1);
        } else {
            Consumer<C>{params, shared, warpgroup - 1}.run();
        }
    }
}

}  // namespace ffa

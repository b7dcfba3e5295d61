// Thin wrappers around the PTX instructions that the Hopper (sm_90a) kernels use; no other header is needed, so that a
// kernel compiles in seconds under NVRTC and nvcc alike.  Semantics: PTX ISA, chapters "Asynchronous warpgroup level
// matrix instructions", "mbarrier" and "cp.async.bulk".
#pragma once

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

#define FFA_DEVICE __device__ __forceinline__

enum class DType { bf16, fp16 };

namespace ptx {

// A CUtensorMap; passed inside a `const __grid_constant__` kernel parameter.
struct alignas(64) TensorMap {
    uint8 bytes[128];
};

constexpr float negative_infinity = __builtin_bit_cast(float, 0xff800000u);

// ---- threads and addresses -----------------------------------------------------------------------------------------

FFA_DEVICE uint32 smem_address(const void* pointer) { return static_cast<uint32>(__cvta_generic_to_shared(pointer)); }

FFA_DEVICE int lane_index() { return threadIdx.x & 31; }

// The same value in every lane, told to the compiler as well.
FFA_DEVICE int warp_uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// One lane of a converged warp.
FFA_DEVICE bool elect_one() {
    uint32 elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

template <int kRegisters> FFA_DEVICE void register_increase() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> FFA_DEVICE void register_decrease() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- barriers ------------------------------------------------------------------------------------------------------

FFA_DEVICE void named_barrier_sync(uint32 id, uint32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
FFA_DEVICE void named_barrier_arrive(uint32 id, uint32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

FFA_DEVICE void mbarrier_init(uint64* barrier, uint32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}
// Makes mbarrier_init visible to the copy engine; then a CTA-wide barrier is still needed.
FFA_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
FFA_DEVICE void mbarrier_arrive(uint64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}
FFA_DEVICE void mbarrier_arrive_expect_bytes(uint64* barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
                 : "memory");
}
FFA_DEVICE bool mbarrier_try_wait(uint64* barrier, uint32 parity) {
    uint32 done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(smem_address(barrier)), "r"(parity)
                 : "memory");
    return done != 0;
}
// Waits until the phase of this parity has completed (a fresh barrier counts as having completed parity 1).
FFA_DEVICE void mbarrier_wait(uint64* barrier, uint32 parity) {
    while (!mbarrier_try_wait(barrier, parity)) {}
}

// Orders this thread's ordinary shared-memory accesses before later ones of the copy engine and the tensor cores.
FFA_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- bulk copies (TMA) ---------------------------------------------------------------------------------------------

FFA_DEVICE void tma_prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Cache policies as createpolicy.fractional encodes them.
constexpr uint64 kEvictNormal = 0x1000000000000000ull;
constexpr uint64 kEvictFirst = 0x12F0000000000000ull;
constexpr uint64 kEvictLast = 0x14F0000000000000ull;

FFA_DEVICE void tma_load_4d(void* smem, const TensorMap& map, uint64* barrier, int c0, int c1, int c2, int c3,
                            uint64 policy = kEvictNormal) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem_address(smem)),
                 "l"(&map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
                 : "memory");
}
FFA_DEVICE void tma_store_4d(const TensorMap& map, const void* smem, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(smem_address(smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}
// Contiguous bytes (a multiple of 16, both addresses aligned to 16).
FFA_DEVICE void bulk_load(void* smem, const void* global, uint64* barrier, uint32 bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::"r"(
                     smem_address(smem)),
                 "l"(global), "r"(smem_address(barrier)), "r"(bytes)
                 : "memory");
}
FFA_DEVICE void bulk_reduce_add_f32(float* global, const void* smem, uint32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
                 "r"(smem_address(smem)), "r"(bytes)
                 : "memory");
}
// One access of 16 bytes a thread: left to itself the compiler may make four of it to save moves.
FFA_DEVICE void store_global_v4(void* global, uint32 x, uint32 y, uint32 z, uint32 w) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
// global[0..3] += x, y, z, w; one access of 16 bytes a thread.
FFA_DEVICE void reduce_add_global_v4(float* global, float x, float y, float z, float w) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x), "f"(y), "f"(z), "f"(w)
                 : "memory");
}
// *global += x if it is wanted, without a branch.
FFA_DEVICE void reduce_add_global(float* global, float x, bool wanted) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p red.relaxed.gpu.global.add.f32 [%0], %1;\n}" ::"l"(global),
                 "f"(x), "r"(static_cast<int>(wanted))
                 : "memory");
}
FFA_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's committed stores still read their shared memory.
template <int kPending> FFA_DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until at most kPending of this thread's committed stores are not yet complete in global memory.
template <int kPending> FFA_DEVICE void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- matrix fragments in shared memory -----------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
FFA_DEVICE void stmatrix_x4(uint32 address, uint32 r0, uint32 r1, uint32 r2, uint32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}
FFA_DEVICE void stmatrix_x4_transposed(uint32 address, uint32 r0, uint32 r1, uint32 r2, uint32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0),
                 "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------

FFA_DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
FFA_DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
FFA_DEVICE float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
FFA_DEVICE float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Within two units in the last place, for all numbers.
FFA_DEVICE float divide_approx(float x, float by) {
    float y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(by));
    return y;
}
FFA_DEVICE float sqrt_approx(float x) {
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
FFA_DEVICE float rsqrt_approx(float x) {
    float y;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// NaN if one of them is.
FFA_DEVICE float max_nan(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
FFA_DEVICE float min_nan(float x, float y) {
    float z;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
// Shift that gives 0 for amounts of 32 and more.
FFA_DEVICE uint32 shift_left_saturating(uint32 value, uint32 amount) {
    uint32 y;
    asm("shl.b32 %0, %1, %2;" : "=r"(y) : "r"(value), "r"(amount));
    return y;
}

// `count` ones from bit `first` on; positions of 32 and more fall away.
FFA_DEVICE uint32 bit_mask(uint32 first, uint32 count) {
    uint32 y;
    asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(y) : "r"(first), "r"(count));
    return y;
}

// Two floats rounded to 16 bits; `low` lands in the low half.
template <DType kType> FFA_DEVICE uint32 pack_pair(float low, float high) {
    uint32 y;
    if constexpr (kType == DType::bf16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    }
    return y;
}
template <DType kType> FFA_DEVICE void unpack_pair(uint32 pair, float& low, float& high) {
    if constexpr (kType == DType::bf16) {
        low = __uint_as_float(pair << 16);
        high = __uint_as_float(pair & 0xffff0000u);
    } else {
        asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
            : "=f"(low), "=f"(high)
            : "r"(pair));
    }
}

// ---- warpgroup matrix products -------------------------------------------------------------------------------------

FFA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FFA_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending committed groups are running.
template <int kPending> FFA_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of registers that a running product reads or writes across this point.
template <int kCount> FFA_DEVICE void fence_registers(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount> FFA_DEVICE void fence_registers(uint32 (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// d[64 x N] (+)= a[64 x 16] b[16 x N]; d is overwritten where `accumulate` is 0.  Fragment of d: thread t of the
// warpgroup holds rows t / 32 * 16 + (t % 32) / 4 (+ 8) and columns 8 j + 2 (t % 4) (+ 1):
// d[4 j + 2 h + c] is row + 8 h, column + c.
// wgmma_ss: a and b in shared memory (descriptors; kStridedA / kStridedB: the contraction axis is not the contiguous
// one).  wgmma_rs: a in registers, fragment as d of a 64 x 16 product packed in pairs.
template <DType kType, int kN, bool kStridedA = false, bool kStridedB = false> struct Wgmma;

#define FFA_S8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define FFA_R4 "%0,%1,%2,%3," FFA_S8(4, 5, 6, 7, 8, 9, 10, 11)
#define FFA_R0 FFA_S8(0, 1, 2, 3, 4, 5, 6, 7)
#define FFA_R8 FFA_R0 "," FFA_S8(8, 9, 10, 11, 12, 13, 14, 15)
#define FFA_R16 FFA_R8 "," FFA_S8(16, 17, 18, 19, 20, 21, 22, 23)
#define FFA_R24 FFA_R16 "," FFA_S8(24, 25, 26, 27, 28, 29, 30, 31)
#define FFA_R32 FFA_R24 "," FFA_S8(32, 33, 34, 35, 36, 37, 38, 39)
#define FFA_R40 FFA_R32 "," FFA_S8(40, 41, 42, 43, 44, 45, 46, 47)
#define FFA_R48 FFA_R40 "," FFA_S8(48, 49, 50, 51, 52, 53, 54, 55)
#define FFA_R56 FFA_R48 "," FFA_S8(56, 57, 58, 59, 60, 61, 62, 63)
#define FFA_R64 FFA_R56 "," FFA_S8(64, 65, 66, 67, 68, 69, 70, 71)
#define FFA_R72 FFA_R64 "," FFA_S8(72, 73, 74, 75, 76, 77, 78, 79)
#define FFA_R80 FFA_R72 "," FFA_S8(80, 81, 82, 83, 84, 85, 86, 87)
#define FFA_R88 FFA_R80 "," FFA_S8(88, 89, 90, 91, 92, 93, 94, 95)
#define FFA_R96 FFA_R88 "," FFA_S8(96, 97, 98, 99, 100, 101, 102, 103)
#define FFA_R104 FFA_R96 "," FFA_S8(104, 105, 106, 107, 108, 109, 110, 111)
#define FFA_R112 FFA_R104 "," FFA_S8(112, 113, 114, 115, 116, 117, 118, 119)
#define FFA_R120 FFA_R112 "," FFA_S8(120, 121, 122, 123, 124, 125, 126, 127)

#define FFA_D_8(o)                                                                                                      \
    "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), "+f"(d[o + 4]), "+f"(d[o + 5]), "+f"(d[o + 6]),         \
        "+f"(d[o + 7])
#define FFA_D8 FFA_D_8(0)
#define FFA_D12 FFA_D_8(0), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define FFA_D16 FFA_D_8(0), FFA_D_8(8)
#define FFA_D24 FFA_D16, FFA_D_8(16)
#define FFA_D32 FFA_D24, FFA_D_8(24)
#define FFA_D40 FFA_D32, FFA_D_8(32)
#define FFA_D48 FFA_D40, FFA_D_8(40)
#define FFA_D56 FFA_D48, FFA_D_8(48)
#define FFA_D64 FFA_D56, FFA_D_8(56)
#define FFA_D72 FFA_D64, FFA_D_8(64)
#define FFA_D80 FFA_D72, FFA_D_8(72)
#define FFA_D88 FFA_D80, FFA_D_8(80)
#define FFA_D96 FFA_D88, FFA_D_8(88)
#define FFA_D128 FFA_D96, FFA_D_8(96), FFA_D_8(104), FFA_D_8(112), FFA_D_8(120)

// N columns; COUNT = N / 2 registers, the last eight from LAST on; I0, I1, ...: COUNT, COUNT + 1, ...
#define FFA_WGMMA_TYPED(TYPE, NAME, N, COUNT, LAST, I0, I1, I2, I3, I4, I5, I6)                                         \
    template <bool kStridedA, bool kStridedB> struct Wgmma<TYPE, N, kStridedA, kStridedB> {                            \
        static FFA_DEVICE void ss(float (&d)[COUNT], uint64 a, uint64 b, int accumulate) {                             \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2 ", 0;\n"                                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" FFA_R##LAST "}, %" #I0   \
                         ", %" #I1 ", p, 1, 1, %" #I3 ", %" #I4 ";\n}"                                                 \
                         : FFA_D##COUNT                                                                                \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(kStridedA ? 1 : 0), "n"(kStridedB ? 1 : 0));           \
        }                                                                                                              \
        static FFA_DEVICE void rs(float (&d)[COUNT], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint64 b,             \
                                  int accumulate) {                                                                    \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5 ", 0;\n"                                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" FFA_R##LAST "}, {%" #I0  \
                         ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1, %" #I6 ";\n}"                            \
                         : FFA_D##COUNT                                                                                \
                         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(kStridedB ? 1 : 0));       \
        }                                                                                                              \
    };
#define FFA_WGMMA(N, COUNT, LAST, I0, I1, I2, I3, I4, I5, I6)                                                          \
    FFA_WGMMA_TYPED(DType::bf16, "bf16", N, COUNT, LAST, I0, I1, I2, I3, I4, I5, I6)                                   \
    FFA_WGMMA_TYPED(DType::fp16, "f16", N, COUNT, LAST, I0, I1, I2, I3, I4, I5, I6)

FFA_WGMMA(16, 8, 0, 8, 9, 10, 11, 12, 13, 14)
FFA_WGMMA(24, 12, 4, 12, 13, 14, 15, 16, 17, 18)
FFA_WGMMA(32, 16, 8, 16, 17, 18, 19, 20, 21, 22)
FFA_WGMMA(48, 24, 16, 24, 25, 26, 27, 28, 29, 30)
FFA_WGMMA(64, 32, 24, 32, 33, 34, 35, 36, 37, 38)
FFA_WGMMA(80, 40, 32, 40, 41, 42, 43, 44, 45, 46)
FFA_WGMMA(96, 48, 40, 48, 49, 50, 51, 52, 53, 54)
FFA_WGMMA(112, 56, 48, 56, 57, 58, 59, 60, 61, 62)
FFA_WGMMA(128, 64, 56, 64, 65, 66, 67, 68, 69, 70)
FFA_WGMMA(144, 72, 64, 72, 73, 74, 75, 76, 77, 78)
FFA_WGMMA(160, 80, 72, 80, 81, 82, 83, 84, 85, 86)
FFA_WGMMA(176, 88, 80, 88, 89, 90, 91, 92, 93, 94)
FFA_WGMMA(192, 96, 88, 96, 97, 98, 99, 100, 101, 102)
FFA_WGMMA(256, 128, 120, 128, 129, 130, 131, 132, 133, 134)

}  // namespace ptx

#include "descriptor.cuh"

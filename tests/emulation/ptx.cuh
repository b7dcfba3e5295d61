// What csrc/cuda/ffa/ptx.cuh wraps, on machine.h: the same names and, by the PTX manual, the same meaning.
#pragma once

#include <array>

#include "machine.h"

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

#define FFA_DEVICE inline

enum class DType { bf16, fp16 };

namespace ptx {

// As tests/emulation/emulator.py packs it.
struct alignas(64) TensorMap {
    unsigned char* base;
    uint64 sizes[4], strides[4];  // innermost first; strides in bytes
    uint32 box[4], element_bytes, swizzle;
    uint8 rest[32];
};
static_assert(sizeof(TensorMap) == 128);

constexpr float negative_infinity = -__builtin_inff();

inline uint32 smem_address(const void* pointer) {
    const auto offset = static_cast<const unsigned char*>(pointer) - machine::shared_memory;
    if (offset < 0 || offset >= machine::kSharedBytes) throw std::runtime_error("not an address in shared memory");
    return static_cast<uint32>(offset);
}
inline int lane_index() { return threadIdx.x & 31; }
inline int warp_uniform(int value) {
    const int first = __shfl_sync(0xffffffffu, value, 0);
    if (first != value) throw std::runtime_error("warp_uniform of a value that differs between lanes");
    return value;
}
inline bool elect_one() { return lane_index() == 0; }
template <int> void register_increase() {}
template <int> void register_decrease() {}

// ---- barriers ------------------------------------------------------------------------------------------------------

inline void named_barrier_sync(uint32 id, uint32 threads) { machine::sync(machine::block->barriers[id], threads); }
inline void named_barrier_arrive(uint32 id, uint32 threads) { machine::arrive(machine::block->barriers[id], threads); }

// In the eight bytes of a barrier: bytes still to come, arrivals of a phase and those still to come, phases so far.
struct Mbarrier {
    int32_t bytes;
    uint8 expected, pending;
    uint16 phase;
};
static_assert(sizeof(Mbarrier) == 8);
inline Mbarrier& state_of(uint64* barrier) { return *reinterpret_cast<Mbarrier*>(barrier); }
inline void complete_phase(Mbarrier& state) {
    if (state.pending || state.bytes) return;
    state.pending = state.expected;
    ++state.phase;
}
inline void mbarrier_init(uint64* barrier, uint32 arrivals) {
    state_of(barrier) = {0, static_cast<uint8>(arrivals), static_cast<uint8>(arrivals), 0};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive_expect_bytes(uint64* barrier, uint32 bytes) {
    Mbarrier& state = state_of(barrier);
    if (state.pending == 0) throw std::runtime_error("one arrival too many at an mbarrier");
    state.bytes += static_cast<int32_t>(bytes);
    --state.pending;
    complete_phase(state);
}
inline void mbarrier_arrive(uint64* barrier) { mbarrier_arrive_expect_bytes(barrier, 0); }
inline void complete_bytes(uint64* barrier, uint32 bytes) {
    Mbarrier& state = state_of(barrier);
    state.bytes -= static_cast<int32_t>(bytes);
    complete_phase(state);
}
inline bool mbarrier_try_wait(uint64* barrier, uint32 parity) { return (state_of(barrier).phase & 1) != parity; }
inline void mbarrier_wait(uint64* barrier, uint32 parity) {
    machine::wait_until("an mbarrier", [=] { return mbarrier_try_wait(barrier, parity); });
}

inline void fence_proxy_async() {}

// ---- bulk copies ---------------------------------------------------------------------------------------------------

constexpr uint64 kEvictNormal = 0, kEvictFirst = 0, kEvictLast = 0;

inline uint32 swizzled(uint32 address, uint32 width) {
    return width ? address ^ (((address >> 7) & (width / 16 - 1)) << 4) : address;
}
inline void tma_prefetch_map(const TensorMap&) {}

// Calls visit(shared address, global address or null where the tensor ends) for each element of a box.
template <class Visit> void visit_box(const TensorMap& map, uint32 address, const int (&corner)[4], Visit visit) {
    uint32 offset = 0;
    for (uint32 i3 = 0; i3 < map.box[3]; ++i3) {
        for (uint32 i2 = 0; i2 < map.box[2]; ++i2) {
            for (uint32 i1 = 0; i1 < map.box[1]; ++i1) {
                for (uint32 i0 = 0; i0 < map.box[0]; ++i0, offset += map.element_bytes) {
                    const uint32 at[4] = {i0, i1, i2, i3};
                    bool inside = true;
                    int64 global = 0;
                    for (int axis = 0; axis < 4; ++axis) {
                        const int64 index = static_cast<int64>(corner[axis]) + at[axis];
                        inside = inside && index >= 0 && index < static_cast<int64>(map.sizes[axis]);
                        global += index * static_cast<int64>(map.strides[axis]);
                    }
                    visit(machine::shared_memory + swizzled(address + offset, map.swizzle),
                          inside ? map.base + global : nullptr);
                }
            }
        }
    }
}

inline void tma_load_4d(void* smem, const TensorMap& map, uint64* barrier, int c0, int c1, int c2, int c3, uint64 = 0) {
    const uint32 address = smem_address(smem);
    if (address % (map.swizzle == 128 ? 1024 : map.swizzle == 64 ? 512 : 256)) {
        throw std::runtime_error("a tile's address is not aligned to its swizzle");
    }
    const TensorMap source = map;
    machine::block->copies.push_back([=] {
        const int corner[4] = {c0, c1, c2, c3};
        uint32 bytes = 0;
        visit_box(source, address, corner, [&](unsigned char* to, const unsigned char* from) {
            from ? std::memcpy(to, from, source.element_bytes) : std::memset(to, 0, source.element_bytes);
            bytes += source.element_bytes;
        });
        complete_bytes(barrier, bytes);
    });
}

inline void start_store(std::function<void()> copy) {
    auto group = machine::self->open_stores;
    ++*group;
    machine::block->copies.push_back([=] {
        copy();
        --*group;
    });
}
inline void tma_store_4d(const TensorMap& map, const void* smem, int c0, int c1, int c2, int c3) {
    const uint32 address = smem_address(smem);
    const TensorMap copy = map;
    start_store([=] {
        const int corner[4] = {c0, c1, c2, c3};
        visit_box(copy, address, corner, [&](const unsigned char* from, unsigned char* to) {
            if (to) std::memcpy(to, from, copy.element_bytes);
        });
    });
}
inline void bulk_load(void* smem, const void* global, uint64* barrier, uint32 bytes) {
    if (bytes % 16 || smem_address(smem) % 16 || reinterpret_cast<uint64>(global) % 16) {
        throw std::runtime_error("a bulk copy that is not aligned to 16 bytes");
    }
    machine::block->copies.push_back([=] {
        std::memcpy(smem, global, bytes);
        complete_bytes(barrier, bytes);
    });
}
inline void bulk_reduce_add_f32(float* global, const void* smem, uint32 bytes) {
    if (bytes % 16 || smem_address(smem) % 16 || reinterpret_cast<uint64>(global) % 16) {
        throw std::runtime_error("a bulk sum that is not aligned to 16 bytes");
    }
    const float* from = static_cast<const float*>(smem);
    start_store([=] {
        for (uint32 i = 0; i < bytes / 4; ++i) global[i] += from[i];
    });
}
inline void store_global_v4(void* global, uint32 x, uint32 y, uint32 z, uint32 w) {
    if (reinterpret_cast<uint64>(global) % 16) throw std::runtime_error("a vector access that is not aligned");
    const uint32 values[4] = {x, y, z, w};
    std::memcpy(global, values, 16);
}
inline void reduce_add_global_v4(float* global, float x, float y, float z, float w) {
    if (reinterpret_cast<uint64>(global) % 16) throw std::runtime_error("a vector access that is not aligned");
    global[0] += x, global[1] += y, global[2] += z, global[3] += w;
}
inline void reduce_add_global(float* global, float x, bool wanted) {
    if (wanted) *global += x;
}
inline void bulk_commit() {
    machine::self->stores.push_back(machine::self->open_stores);
    machine::self->open_stores = std::make_shared<int>(0);
}
template <int kPending> void bulk_wait_read() {
    auto& stores = machine::self->stores;
    machine::wait_until("its bulk stores", [&stores] {
        while (!stores.empty() && *stores.front() == 0) stores.pop_front();
        return stores.size() <= kPending;
    });
}
template <int kPending> void bulk_wait() { bulk_wait_read<kPending>(); }

// ---- matrix fragments in shared memory -----------------------------------------------------------------------------

template <bool kTransposed> void stmatrix(uint32 address, uint32 r0, uint32 r1, uint32 r2, uint32 r3) {
    const unsigned half = machine::warp_exchange(r0, r1, r2, r3);
    const int matrix = lane_index() / 8, row = lane_index() % 8;
    if (address % 16) throw std::runtime_error("a matrix row that is not aligned to 16 bytes");
    for (int column = 0; column < 8; ++column) {
        const int holder = kTransposed ? 4 * column + row / 2 : 4 * row + column / 2;
        const auto word = static_cast<uint32>(machine::self->warp->value[half][holder][matrix]);
        const auto element = static_cast<uint16>((kTransposed ? row : column) % 2 ? word >> 16 : word);
        std::memcpy(machine::shared_memory + address + 2 * column, &element, 2);
    }
}
inline void stmatrix_x4(uint32 address, uint32 r0, uint32 r1, uint32 r2, uint32 r3) {
    stmatrix<false>(address, r0, r1, r2, r3);
}
inline void stmatrix_x4_transposed(uint32 address, uint32 r0, uint32 r1, uint32 r2, uint32 r3) {
    stmatrix<true>(address, r0, r1, r2, r3);
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------

inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float tanh_approx(float x) { return std::tanh(x); }
inline float reciprocal_approx(float x) { return 1 / x; }
inline float divide_approx(float x, float by) { return x / by; }
inline float sqrt_approx(float x) { return std::sqrt(x); }
inline float rsqrt_approx(float x) { return 1 / std::sqrt(x); }
inline float max_nan(float x, float y) { return x > y || x != x ? x : y; }
inline float min_nan(float x, float y) { return x < y || x != x ? x : y; }
inline uint32 shift_left_saturating(uint32 value, uint32 amount) { return amount < 32 ? value << amount : 0; }
inline uint32 bit_mask(uint32 first, uint32 count) {
    const uint32 ones = count < 32 ? (1u << count) - 1 : 0xffffffffu;
    return first < 32 ? ones << first : 0;
}

template <DType kType> uint16 to_16_bits(float x) {
    uint16 bits;
    if constexpr (kType == DType::bf16) {
        uint32 word;
        std::memcpy(&word, &x, 4);
        if (x != x) return 0x7fff;
        bits = static_cast<uint16>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
    } else {
        const _Float16 half = static_cast<_Float16>(x);
        std::memcpy(&bits, &half, 2);
    }
    return bits;
}
template <DType kType> float from_16_bits(uint16 bits) {
    if constexpr (kType == DType::bf16) {
        return __uint_as_float(static_cast<uint32>(bits) << 16);
    } else {
        _Float16 half;
        std::memcpy(&half, &bits, 2);
        return half;
    }
}
template <DType kType> uint32 pack_pair(float low, float high) {
    return to_16_bits<kType>(low) | static_cast<uint32>(to_16_bits<kType>(high)) << 16;
}
template <DType kType> void unpack_pair(uint32 pair, float& low, float& high) {
    low = from_16_bits<kType>(static_cast<uint16>(pair));
    high = from_16_bits<kType>(static_cast<uint16>(pair >> 16));
}

// ---- warpgroup matrix products -------------------------------------------------------------------------------------

inline void wgmma_fence() { machine::warp_exchange(); }
inline void wgmma_commit() {
    machine::self->committed.push_back(machine::self->uncommitted);
    machine::self->uncommitted = 0;
}
template <int kPending> void wgmma_wait() {
    machine::warp_exchange();  // every lane's registers are there
    machine::Thread& me = *machine::self;
    while (me.committed.size() > kPending) {
        for (int i = 0; i < me.committed.front(); ++i) {
            me.products.front()();
            me.products.pop_front();
        }
        me.committed.pop_front();
    }
    machine::warp_exchange();  // no lane's registers are replaced before all have read them
}
template <class T, int kCount> void fence_registers(T (&)[kCount]) {}

}  // namespace ptx

#include "descriptor.cuh"

namespace ptx {

// Element (outer, inner) of an operand, `inner` on the contraction axis.
template <DType kType, bool kStrided> float operand_element(uint64 descriptor, int outer, int inner) {
    const uint32 start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
    const uint32 stride = (descriptor >> 32 & 0x3fff) << 4, width = 256u >> (descriptor >> 62);
    uint32 address = start;
    if (kStrided) {
        const uint32 columns = width / 2;
        address += outer / columns * leading + inner / 8 * stride + inner % 8 * width + outer % columns * 2;
    } else {
        address += outer / 8 * stride + outer % 8 * width + inner * 2;
    }
    uint16 bits;
    std::memcpy(&bits, machine::shared_memory + swizzled(address, width), 2);
    return from_16_bits<kType>(bits);
}

template <DType kType, int kN, bool kStridedA = false, bool kStridedB = false> struct Wgmma {
    static void ss(float (&d)[kN / 2], uint64 a, uint64 b, int accumulate) {
        const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        float* const to = d;
        push([=] {
            multiply(to, b, accumulate, [=](int half, int inner) {
                return operand_element<kType, kStridedA>(a, row + 8 * half, inner);
            });
        });
    }
    static void rs(float (&d)[kN / 2], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint64 b, int accumulate) {
        machine::Warp* const warp = machine::self->warp;
        if (warp->a_registers.empty()) warp->a_registers.resize(machine::kPendingProducts);
        const unsigned number = machine::self->issued % machine::kPendingProducts;
        warp->a_registers[number][threadIdx.x % 32] = {a0, a1, a2, a3};
        const int quad = threadIdx.x % 32 / 4 * 4;
        float* const to = d;
        push([=] {
            multiply(to, b, accumulate, [=](int half, int inner) {
                float low, high;
                const auto& holder = warp->a_registers[number][quad + inner % 8 / 2];
                unpack_pair<kType>(holder[half + inner / 8 * 2], low, high);
                return inner % 2 ? high : low;
            });
        });
    }

  private:
    static void push(std::function<void()> run) {
        machine::self->products.push_back(std::move(run));
        ++machine::self->issued;
        ++machine::self->uncommitted;
        if (machine::self->products.size() > machine::kPendingProducts) throw std::runtime_error("too many products");
    }
    template <class A> static void multiply(float* d, uint64 b, int accumulate, A a) {
        float left[2][16];
        for (int half = 0; half < 2; ++half) {
            for (int inner = 0; inner < 16; ++inner) left[half][inner] = a(half, inner);
        }
        for (int j = 0; j < kN / 8; ++j) {
            for (int c = 0; c < 2; ++c) {
                const int column = 8 * j + threadIdx.x % 4 * 2 + c;
                float sum[2] = {};
                for (int inner = 0; inner < 16; ++inner) {
                    const float right = operand_element<kType, kStridedB>(b, column, inner);
                    sum[0] += left[0][inner] * right;
                    sum[1] += left[1][inner] * right;
                }
                for (int half = 0; half < 2; ++half) {
                    float& to = d[4 * j + 2 * half + c];
                    to = (accumulate ? to : 0.0f) + sum[half];
                }
            }
        }
    }
};

}  // namespace ptx

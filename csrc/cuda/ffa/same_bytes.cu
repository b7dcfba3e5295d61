// Whether tensors hold what copies of them hold: clears a flag, which may be the host's, where a byte differs.
#include "ptx.cuh"

constexpr int kThreads = 256, kPairs = 16;

struct BytePair {
    const unsigned char* tensor;
    const unsigned char* copy;
    int64 bytes;
};
struct SameParams {
    BytePair pairs[kPairs];
    int* flag;
    int64 count;  // of pairs
};
static_assert(sizeof(SameParams) == 400, "the host packs what the kernel reads");

extern "C" __global__ void __launch_bounds__(kThreads)
    ffa_same_bytes(const __grid_constant__ SameParams params) {
    const int64 first = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x;
    const int64 step = static_cast<int64>(gridDim.x) * kThreads;
    bool differ = false;
    for (int which = 0; which < params.count; ++which) {
        const BytePair& pair = params.pairs[which];
        const uint64 addresses = reinterpret_cast<uint64>(pair.tensor) | reinterpret_cast<uint64>(pair.copy);
        const int64 vectors = addresses % 16 ? 0 : pair.bytes / 16;
        for (int64 i = first; i < vectors; i += step) {
            const uint4 a = reinterpret_cast<const uint4*>(pair.tensor)[i];
            const uint4 b = reinterpret_cast<const uint4*>(pair.copy)[i];
            differ |= a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w;
        }
        for (int64 i = 16 * vectors + first; i < pair.bytes; i += step) differ |= pair.tensor[i] != pair.copy[i];
    }
    if (differ) *params.flag = 0;
}

// A kernel source of csrc/cuda/ffa (KERNEL_SOURCE) with a C function to run each kernel of it, by name.
#include "ptx.cuh"

#include KERNEL_SOURCE


template <class Params>
const char* emulate(void (*kernel)(const Params), const void* params, unsigned grid, unsigned threads,
                    unsigned resident, unsigned seed) {
    static std::string message;
    try {
        const Params& given = *static_cast<const Params*>(params);
        machine::run_grid(grid, threads, resident, seed, [&given, kernel] { kernel(given); });
    } catch (const std::exception& error) {
        message = error.what();
        return message.c_str();
    }
    return nullptr;
}

#define EMULATE(name)                                                                                               \
    extern "C" const char* emulate_##name(const void* params, unsigned grid, unsigned threads, unsigned resident, \
                                          unsigned seed) {                                                        \
        return emulate(name, params, grid, threads, resident, seed);                                              \
    }
KERNELS

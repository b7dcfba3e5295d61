// Operands of warpgroup matrix products in shared memory (PTX ISA, "Matrix descriptor format"); included by ptx.cuh.
#pragma once

namespace ptx {

// Shared-memory operand of wgmma.  A tile is stored as panels of kSwizzle bytes per row (what a tensor map with the
// same swizzle writes): panel p holds the columns [p * kSwizzle / 2, (p + 1) * kSwizzle / 2) of all rows.  Panels must
// be aligned to 8 * kSwizzle bytes.
//
// The contiguous axis is the columns.  `contraction_is_contiguous`: the product sums over the columns ("K-major"), as
// for Q and K in Q K^T; otherwise over the rows ("MN-major"), as for V in P V.
template <int kSwizzle> struct Descriptor {
    static_assert(kSwizzle == 128 || kSwizzle == 64 || kSwizzle == 32, "swizzle width in bytes");
    static constexpr uint64 kLayout = kSwizzle == 128 ? 1 : kSwizzle == 64 ? 2 : 3;

    static FFA_DEVICE uint64 contraction_is_contiguous(const void* smem) {
        return encode(smem_address(smem), 16, 8 * kSwizzle);
    }
    // panel_bytes: from one panel to the next (rows of the tile * kSwizzle).
    static FFA_DEVICE uint64 contraction_is_strided(const void* smem, uint32 panel_bytes) {
        return encode(smem_address(smem), panel_bytes, 8 * kSwizzle);
    }
    // The same operand `bytes` (a multiple of 16) further on.
    static FFA_DEVICE uint64 advance(uint64 descriptor, uint32 bytes) { return descriptor + (bytes >> 4); }

  private:
    static FFA_DEVICE uint64 encode(uint32 address, uint32 leading_bytes, uint32 stride_bytes) {
        return static_cast<uint64>((address & 0x3ffff) >> 4) | (static_cast<uint64>(leading_bytes >> 4) << 16) |
               (static_cast<uint64>(stride_bytes >> 4) << 32) | (kLayout << 62);
    }
};

}  // namespace ptx

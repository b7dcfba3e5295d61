// Row intervals and bit tiles -> mask bits -> predicates.
//
// A thread that holds a fragment of scores S (rows are queries) owns, of each row, the columns 8 (c / 2) + 2 (lane % 4)
// + c % 2 for c = 0, 1, ...  In this numbering "key < x" is still "c < something", so an interval of keys is an interval
// of c: two shifts and a LOP3 per interval and row give the bits of all columns that the thread owns, and R2P turns
// them into predicates.
#pragma once

#include "bit_tiles.cuh"

// Of the columns that a lane owns, how many lie before column `column` of the tile (which may be outside of the tile).
FFA_DEVICE uint32 owned_columns_before(int column) {
    const int beyond = max(column - 2 * (ptx::lane_index() & 3), 0);
    return 2 * (beyond >> 3) + min(beyond & 7, 2);
}

// Of 32 keys from a multiple of 8 columns on, those that a lane owns: 8 bits.
FFA_DEVICE uint32 owned_of_keys(uint32 keys) {
    const uint32 pairs = keys >> (2 * (ptx::lane_index() & 3)) & 0x03030303u;
    return (pairs | pairs >> 6 | pairs >> 12 | pairs >> 18) & 0xffu;
}

// Bits of c in [begin, end) that fall into word kWord.
FFA_DEVICE uint32 bits_between(uint32 begin, uint32 end, int word) {
    const int base = 32 * word;
    const uint32 from_begin = ptx::shift_left_saturating(0xffffffffu, max(static_cast<int>(begin) - base, 0));
    const uint32 from_end = ptx::shift_left_saturating(0xffffffffu, max(static_cast<int>(end) - base, 0));
    return from_begin & ~from_end;
}

// Which of the columns that a thread owns may be attended to, for the two rows of its fragment.
template <int kColumns> struct FragmentMask {
    static constexpr int kOwned = kColumns / 4;
    static constexpr int kWords = (kOwned + 31) / 32;
    uint32 bits[2][kWords];

    FFA_DEVICE void clear() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int w = 0; w < kWords; ++w) bits[h][w] = 0;
        }
    }

    // Of fragment row h the keys [start, end) inside of [key_begin, key_limit); column 0 is key_begin.
    FFA_DEVICE void add_interval(int h, int start, int end, int key_begin, int key_limit) {
        const uint32 first = owned_columns_before(start - key_begin);
        const uint32 last = owned_columns_before(min(end, key_limit) - key_begin);
#pragma unroll
        for (int w = 0; w < kWords; ++w) bits[h][w] |= bits_between(first, last, w);
    }

    // starts, ends: the interval tables, [intervals][stride]; row[h]: the table's column of fragment row h.
    FFA_DEVICE void add_intervals(const int* starts, const int* ends, const int (&row)[2], int intervals, int stride,
                                  int key_begin, int key_limit) {
        for (int r = 0; r < intervals; ++r, starts += stride, ends += stride) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                add_interval(h, __ldg(starts + row[h]), __ldg(ends + row[h]), key_begin, key_limit);
            }
        }
    }

    // Adds those of bit tiles; arguments as for add_intervals.
    FFA_DEVICE void add_bit_tiles(const BitTileParams& tiles, int mask, const int (&row)[2], int key_begin, int key_limit) {
        const uint32 end = owned_columns_before(key_limit - key_begin);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            BitRow keys(tiles, mask, row[h], key_begin);
#pragma unroll
            for (int i = 0; i < (kColumns + 31) / 32; ++i) {
                bits[h][i / 4] |= owned_of_keys(keys.next()) << (8 * (i % 4)) & bits_between(0, end, i / 4);
            }
        }
    }

    // Elements outside of the mask become `outside`.
    FFA_DEVICE void apply(float (&scores)[kColumns / 2], float outside = ptx::negative_infinity) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int c = 0; c < kOwned; ++c) {
                float& score = scores[4 * (c / 2) + 2 * h + c % 2];
                score = (bits[h][c / 32] & (1u << (c % 32))) ? score : outside;
            }
        }
    }
};

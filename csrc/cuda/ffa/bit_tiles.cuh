// Bit tiles (magi_flex/bit_tiles.py): the rows of a mask that do not fit into a few intervals, one bit a pair.
//
// Option: FFA_BIT_TILES (whether the mask may have them).
#pragma once

#include "ptx.cuh"

constexpr bool kBitTiles = FFA_BIT_TILES;

struct BitTileParams {
    const int* row_ptr;  // [masks, bands + 1], positions in cols and slots; a band is q_tile rows
    const int* cols;     // key tiles, ascending within a band
    const int* slots;    // their bits; below 0: every pair attends
    const uint32* bits;  // [*, q_tile, words]
    int q_tile, words;   // of a tile's row, 32 keys each
    int bands, unused;
};

// The keys of one row from some key on, 32 at a time.
class BitRow {
  public:
    // mask: counted over mask batch entries and mask heads.
    FFA_DEVICE BitRow(const BitTileParams& tiles, int mask, int row, int key)
        : tiles(tiles), word(key / 32), shift(key % 32) {
        const int band = row / tiles.q_tile;
        const int* const ptr = tiles.row_ptr + static_cast<int64>(mask) * (tiles.bands + 1) + band;
        row_in_tile = row - band * tiles.q_tile;
        at = __ldg(ptr);
        end = __ldg(ptr + 1);
        // The first listed tile that does not lie before the key.
        const int col = word / tiles.words;
        for (int high = end; at < high;) {
            const int middle = (at + high) / 2;
            if (__ldg(tiles.cols + middle) < col) {
                at = middle + 1;
            } else {
                high = middle;
            }
        }
        current = read();
    }

    // Bit i is key + i; then `key` is 32 further on.
    FFA_DEVICE uint32 next() {
        ++word;
        const uint32 following = read();
        const uint32 keys = static_cast<uint32>((static_cast<uint64>(following) << 32 | current) >> shift);
        current = following;
        return keys;
    }

  private:
    const BitTileParams& tiles;
    int word, shift, row_in_tile, at, end;
    uint32 current;

    FFA_DEVICE uint32 read() {
        const int col = word / tiles.words;
        if (at < end && __ldg(tiles.cols + at) < col) ++at;  // words ascend, and so does col, by one
        if (at == end || __ldg(tiles.cols + at) != col) return 0;
        const int slot = __ldg(tiles.slots + at);
        if (slot < 0) return 0xffffffffu;
        const int64 row = static_cast<int64>(slot) * tiles.q_tile + row_in_tile;
        return __ldg(tiles.bits + row * tiles.words + word % tiles.words);
    }
};

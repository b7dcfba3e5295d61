// Row tiles as work items of the kernels that hold query rows (forward, gradient of q), from a schedule
// (magi_flex/kernels/ffa_schedule.py).  Rows of a tile are (position, head) pairs.
//
// Options: FFA_PACK (query heads in a row tile), FFA_NARROW_TILE, FFA_COUNTED (the arrays have room for more row tiles than
// there are, as plans that are built on the device have).
#pragma once

#include "ptx.cuh"

using namespace ptx;

constexpr int kPack = FFA_PACK;
constexpr int kNarrowTile = FFA_NARROW_TILE;  // keys of the short step that an item may begin with; 0: there is none
constexpr bool kCounted = FFA_COUNTED;
static_assert(64 % kPack == 0, "a warpgroup holds whole positions");

// What a consumer must know about a key tile.
struct KeyTile {
    int begin, limit, masked;
};

// A row tile of one head group.  Items are numbered section by section; a section is all row tiles for a few replicas
// ((batch, head group) pairs that share the mask), whose keys and values fit into L2 together.
struct Item {
    int row_begin, row_end, mask, key_tiles;
    int batch, head, kv_head;
    int2 short_step;
    int4 runs;

    FFA_DEVICE bool has_short_step() const { return kNarrowTile > 0 && short_step.y > short_step.x; }
    FFA_DEVICE bool has_keys() const { return key_tiles > 0 || has_short_step(); }
};

template <class Params> FFA_DEVICE int count_row_tiles(const Params& params) {
    return kCounted ? __ldg(params.row_tile_count) : params.row_tiles;
}

template <class Params> FFA_DEVICE Item load_item(const Params& params, int index) {
    const int section_items = count_row_tiles(params) * params.section;
    const int section = index / section_items;
    const int in_section = index - section * section_items;
    const int width = min(params.section, params.replicas - section * params.section);
    const int tile = in_section / width;
    const int replica = section * params.section + in_section - tile * width;
    const int4 rows = __ldg(params.tile_rows + tile);
    Item item;
    item.runs = __ldg(params.tile_runs + tile);
    item.short_step = __ldg(params.tile_heads + tile);
    item.row_begin = rows.x;
    item.row_end = rows.y;
    item.mask = rows.z;
    item.key_tiles = rows.w;
    const int mask_batch = rows.z / params.mask_heads;
    const int replica_batch = replica / params.replica_heads;
    item.batch = params.mask_batch == 1 ? replica_batch : mask_batch;
    item.head = params.mask_heads == 1 ? (replica - replica_batch * params.replica_heads) * kPack
                                       : rows.z - mask_batch * params.mask_heads;
    item.kv_head = item.head / params.group;
    return item;
}

// Position in a ring of buffers.
template <int kSize> struct Ring {
    int stage = 0;
    uint32 parity = 0;
    FFA_DEVICE void advance() {
        if (++stage == kSize) {
            stage = 0;
            parity ^= 1;
        }
    }
};

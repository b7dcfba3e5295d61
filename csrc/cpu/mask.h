// Which keys a tile of query rows visits, and the mask inside such a tile, both straight from row intervals (and bit
// tiles): O(rows * intervals) work and memory a tile, nothing is queries x keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "microkernel.h"
#include "simd.h"

namespace magi {

constexpr int kQueryTile = 192;  // a whole number of panels at 4, 8 and 16 lanes
constexpr int kKeyTile = 128;
constexpr int kWords = kKeyTile / 32;
static_assert(kQueryTile % kPanel == 0 && kKeyTile % 32 == 0);

// Part of the C interface.  Strides are in elements and 0 where the mask is shared.
struct Mask {
  const int32_t* starts;  // [B, H, slots, Q]; a row's intervals are sorted, the empty ones last as (kv_len, 0)
  const int32_t* ends;
  int64_t batch_stride, head_stride;
  int64_t slots;
  const int32_t* row_ptr;  // [B, H, T + 1], or null: no bit tiles
  int64_t row_ptr_batch_stride, row_ptr_head_stride;
  const int32_t* cols;
  const int32_t* slot;   // index of the tile in bits, -1: full
  const uint32_t* bits;  // [P, q_tile, kv_tile / 32]
  int64_t q_tile, kv_tile;
};

struct KeyTile {
  int64_t begin, end;
  bool full;  // every row attends to every key
};

// The mask of one panel inside one key tile: only keys [lo, hi) of the tile matter; `full`: all of these attend.
struct PanelMask {
  int lo, hi;
  bool full;
  VecU words[kWords][kPanelVecs];  // bit j of word w: key 32 w + j of the tile, one lane a query
};

class RowTileMask {
 public:
  // Rows [begin, end) of one head; at most kQueryTile.  Tiles begin at multiples of `align`, which divides kKeyTile.
  void reset(const Mask& mask, int64_t batch, int64_t head, int64_t begin, int64_t end, int64_t q_len, int64_t kv_len,
             int align) {
    align_ = align;
    rows_ = int(end - begin);
    kv_len_ = kv_len;
    slots_ = int(mask.slots);
    mask_ = &mask;
    starts_.assign(size_t(slots_) * kQueryTile, int32_t(kv_len));
    ends_.assign(size_t(slots_) * kQueryTile, 0);
    const int64_t base = batch * mask.batch_stride + head * mask.head_stride + begin;
    for (int r = 0; r < slots_; ++r) {
      std::copy_n(mask.starts + base + r * q_len, rows_, starts_.begin() + r * kQueryTile);
      std::copy_n(mask.ends + base + r * q_len, rows_, ends_.begin() + r * kQueryTile);
    }
    begin_ = begin;
    row_ptr_ = mask.row_ptr == nullptr
                   ? nullptr
                   : mask.row_ptr + batch * mask.row_ptr_batch_stride + head * mask.row_ptr_head_stride;
    rewind();
    find_tiles();
  }

  // Before a second pass over the tiles.
  void rewind() { std::fill(std::begin(first_slot_), std::end(first_slot_), 0); }

  // Ascending, disjoint; keys in no tile attend to nothing here.
  const std::vector<KeyTile>& tiles() const { return tiles_; }

  // Call with ascending tiles: slots that lie before a tile are not looked at again.
  void panel(int panel, int vecs, const KeyTile& tile, PanelMask* out) {
    const int length = int(tile.end - tile.begin);
    out->lo = 0;
    out->hi = length;
    out->full = tile.full;
    if (tile.full) return;
    for (int j = 0; j < vecs; ++j) interval_words(panel * kPanelVecs + j, tile, out, j);
    if (row_ptr_ != nullptr) bit_tile_words(panel, tile, out);
    summarise(panel, vecs, length, out);
  }

 private:
  struct Edge {
    int32_t key;
    int32_t rows;       // how many rows' intervals begin or end here
    int32_t full_rows;  // the same, without bit tiles that are not full
    bool operator<(const Edge& other) const { return key < other.key; }
  };

  void add(int32_t begin, int32_t end, int32_t rows, int32_t full_rows) {
    // Equal neighbours (documents) become one edge; a sorted list needs no sort.
    const auto push = [](std::vector<Edge>& edges, Edge edge) {
      if (!edges.empty() && edges.back().key == edge.key) {
        edges.back().rows += edge.rows;
        edges.back().full_rows += edge.full_rows;
      } else {
        edges.push_back(edge);
      }
    };
    push(opens_, {begin, rows, full_rows});
    push(closes_, {end, rows, full_rows});
  }

  void find_tiles() {
    opens_.clear();
    closes_.clear();
    tiles_.clear();
    for (int r = 0; r < slots_; ++r) {
      for (int i = 0; i < rows_; ++i) {
        const int32_t begin = starts_[r * kQueryTile + i], end = ends_[r * kQueryTile + i];
        if (begin < end) add(begin, end, 1, 1);
      }
    }
    if (row_ptr_ != nullptr) {
      for (int64_t t = begin_ / mask_->q_tile; t * mask_->q_tile < begin_ + rows_; ++t) {
        const int64_t first = std::max(begin_, t * mask_->q_tile);
        const int64_t last = std::min(begin_ + rows_, (t + 1) * mask_->q_tile);
        for (int32_t n = row_ptr_[t]; n < row_ptr_[t + 1]; ++n) {
          const int64_t key = mask_->cols[n] * mask_->kv_tile;
          const int32_t rows = int32_t(last - first);
          add(int32_t(key), int32_t(std::min(key + mask_->kv_tile, kv_len_)), rows, mask_->slot[n] < 0 ? rows : 0);
        }
      }
    }
    for (auto* edges : {&opens_, &closes_}) {
      if (!std::is_sorted(edges->begin(), edges->end())) std::sort(edges->begin(), edges->end());
    }
    sweep();
  }

  // Sweep over the keys: covered runs are cut into tiles from where they begin; a tile may bridge short gaps.
  void sweep() {
    size_t open = 0, close = 0;
    int32_t rows = 0, full_rows = 0;
    int64_t full_begin = -1;  // of the current run of keys to which all rows attend
    const auto full_until = [&](int64_t key) {
      if (full_begin >= 0) mark_full(full_begin, key);
      full_begin = -1;
    };
    full_runs_.clear();
    covered_.clear();
    while (close < closes_.size()) {
      const int32_t open_key = open < opens_.size() ? opens_[open].key : INT32_MAX;
      const int32_t key = std::min(open_key, closes_[close].key);
      const int32_t rows_before = rows;
      for (; open < opens_.size() && opens_[open].key == key; ++open) {
        rows += opens_[open].rows;
        full_rows += opens_[open].full_rows;
      }
      for (; close < closes_.size() && closes_[close].key == key; ++close) {
        rows -= closes_[close].rows;
        full_rows -= closes_[close].full_rows;
      }
      if (rows_before == 0 && rows > 0) covered_.push_back({key, 0});
      if (rows_before > 0 && rows == 0) covered_.back().second = key;
      if (full_rows == rows_) {
        if (full_begin < 0) full_begin = key;
      } else {
        full_until(key);
      }
    }
    cut();
  }

  void mark_full(int64_t begin, int64_t end) { full_runs_.push_back({begin, end}); }

  void cut() {
    size_t run = 0, full = 0;
    int64_t key = covered_.empty() ? 0 : covered_[0].first / align_ * align_;
    while (run < covered_.size()) {
      KeyTile tile{key, key, false};
      const int64_t limit = key + kKeyTile;
      while (run < covered_.size() && covered_[run].first < limit) {
        tile.end = std::min(covered_[run].second, limit);
        if (covered_[run].second > limit) break;
        ++run;
      }
      while (full < full_runs_.size() && full_runs_[full].second < tile.end) ++full;
      tile.full = full < full_runs_.size() && full_runs_[full].first <= tile.begin;
      tiles_.push_back(tile);
      if (run < covered_.size()) key = std::max(limit, covered_[run].first / align_ * align_);
    }
  }

  // Bits [x, 32) of a word; all of them for x <= 0, none for x >= 32.
  static VecU from_bit(VecI x) {
    const VecU bits = (VecU{} - 1u) << bits_as<VecU>(x & 31);
    return bits_as<VecU>((bits_as<VecI>(bits) & (x < 32)) | (x < 0));
  }

  void interval_words(int column, const KeyTile& tile, PanelMask* out, int j) {
    for (auto& word : out->words) word[j] = VecU{};
    for (int r = first_slot_[column]; r < slots_; ++r) {
      const int at = r * kQueryTile + column * kLanes;
      const int32_t *starts = &starts_[at], *ends = &ends_[at];
      if (*std::max_element(ends, ends + kLanes) <= tile.begin) {
        // All of a row's later slots may still matter; this one does not for this tile or any later one.
        if (r == first_slot_[column]) ++first_slot_[column];
        continue;
      }
      if (*std::min_element(starts, starts + kLanes) >= tile.end) break;
      const VecI start = load_as<VecI>(starts) - int32_t(tile.begin);
      const VecI end = load_as<VecI>(ends) - int32_t(tile.begin);
      for (int w = 0; w < kWords; ++w) out->words[w][j] |= from_bit(start - 32 * w) & ~from_bit(end - 32 * w);
    }
  }

  void bit_tile_words(int panel, const KeyTile& tile, PanelMask* out) {
    const int64_t words_per_row = mask_->kv_tile / 32;
    const int first = panel * kPanel, last = std::min(first + kPanel, rows_);
    for (int lane = first; lane < last; ++lane) {
      const int64_t row = begin_ + lane, t = row / mask_->q_tile;
      const int32_t* end = mask_->cols + row_ptr_[t + 1];
      const int32_t* col = std::lower_bound(mask_->cols + row_ptr_[t], end, int32_t(tile.begin / mask_->kv_tile));
      for (; col < end && *col * mask_->kv_tile < tile.end; ++col) {
        const int32_t slot = mask_->slot[col - mask_->cols];
        const uint32_t* bits =
            slot < 0 ? nullptr : mask_->bits + (slot * mask_->q_tile + row % mask_->q_tile) * words_per_row;
        for (int w = 0; w < kWords; ++w) {
          const int64_t shift = tile.begin + 32 * w - *col * mask_->kv_tile;  // of our word inside the bit tile
          if (shift <= -32 || shift >= mask_->kv_tile) continue;
          out->words[w][(lane - first) / kLanes][(lane - first) % kLanes] |= word_at(bits, shift, words_per_row);
        }
      }
    }
  }

  // 32 bits from bit `shift` on of a row of a bit tile (null: all ones); bits outside of the row are 0.
  static uint32_t word_at(const uint32_t* bits, int64_t shift, int64_t words) {
    const int64_t index = shift >> 5;  // rounds down
    const int rest = int(shift & 31);
    const auto at = [&](int64_t i) { return i < 0 || i >= words ? 0u : bits == nullptr ? ~0u : bits[i]; };
    return rest == 0 ? at(index) : at(index) >> rest | at(index + 1) << (32 - rest);
  }

  void summarise(int panel, int vecs, int length, PanelMask* out) const {
    out->lo = length;
    out->hi = 0;
    uint32_t all_words[kWords];
    const int lanes = std::min(vecs * kLanes, rows_ - panel * kPanel);
    for (int w = 0; w < kWords; ++w) {
      uint32_t any = 0, all = ~0u;
      for (int lane = 0; lane < lanes; ++lane) {
        const uint32_t word = out->words[w][lane / kLanes][lane % kLanes];
        any |= word;
        all &= word;
      }
      if (32 * w + 32 > length) any &= 32 * w >= length ? 0u : ~0u >> (32 * w + 32 - length);
      all_words[w] = all;
      if (any == 0) continue;
      if (out->lo == length) out->lo = 32 * w + __builtin_ctz(any);
      out->hi = 32 * w + 32 - __builtin_clz(any);
    }
    out->full = true;
    for (int key = out->lo; key < out->hi && out->full;) {  // word by word
      const int w = key / 32, end = std::min(out->hi, 32 * w + 32);
      const uint32_t wanted = (~0u << (key - 32 * w)) & (~0u >> (32 * w + 32 - end));
      out->full = (all_words[w] & wanted) == wanted;
      key = end;
    }
  }

  const Mask* mask_ = nullptr;
  const int32_t* row_ptr_ = nullptr;
  int64_t begin_ = 0, kv_len_ = 0;
  int rows_ = 0, slots_ = 0, align_ = 1;
  int first_slot_[kQueryTile / kLanes] = {};
  std::vector<int32_t> starts_, ends_;  // [slots, kQueryTile]; rows beyond the tile's are empty
  std::vector<Edge> opens_, closes_;
  std::vector<std::pair<int64_t, int64_t>> covered_, full_runs_;
  std::vector<KeyTile> tiles_;
};

// The smallest range of keys that holds all that rows [begin, end) attend to; (kv_len, 0) if they attend to nothing.
inline std::pair<int64_t, int64_t> key_range(const Mask& mask, int64_t batch, int64_t head, int64_t begin, int64_t end,
                                             int64_t q_len, int64_t kv_len) {
  int64_t low = kv_len, high = 0;
  const int64_t base = batch * mask.batch_stride + head * mask.head_stride;
  for (int64_t r = 0; r < mask.slots; ++r) {
    for (int64_t i = base + r * q_len + begin; i < base + r * q_len + end; ++i) {
      if (mask.starts[i] >= mask.ends[i]) continue;
      low = std::min<int64_t>(low, mask.starts[i]);
      high = std::max<int64_t>(high, mask.ends[i]);
    }
  }
  if (mask.row_ptr != nullptr) {
    const int32_t* row_ptr = mask.row_ptr + batch * mask.row_ptr_batch_stride + head * mask.row_ptr_head_stride;
    for (int64_t t = begin / mask.q_tile; t * mask.q_tile < end; ++t) {
      if (row_ptr[t] == row_ptr[t + 1]) continue;
      low = std::min(low, mask.cols[row_ptr[t]] * mask.kv_tile);
      high = std::max(high, std::min((mask.cols[row_ptr[t + 1] - 1] + 1) * mask.kv_tile, kv_len));
    }
  }
  return {low, high};
}

// Scores of keys [lo, hi) of the tile, a row a key: minus infinity where the mask is unset.
inline void apply_mask(const PanelMask& mask, int vecs, float* scores, int row) {
  for (int key = mask.lo; key < mask.hi; ++key, scores += row) {
    for (int j = 0; j < vecs; ++j) {
      const VecI sign = bits_as<VecI>(mask.words[key / 32][j] << (31 - key % 32));
      const VecF score = load(scores + j * kLanes);
      store(scores + j * kLanes, sign < 0 ? score : splat(-kInfinity));
    }
  }
}

}  // namespace magi

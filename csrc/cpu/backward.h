// Backward: probabilities are computed again from the saved lse; key tiles inside row tiles, as in the forward.
//
//     dS = P * (dO V^T - delta) * d score,  delta = rowsum(dO * O) - d lse
//     dQ = scale dS K,  dK = scale dS^T Q,  dV = P^T dO
//
// A float32 lse near 10 makes all probabilities of its row wrong by up to 3e-7, several times the error of anything else
// here.  So for float32 inputs a row tile first computes its probabilities' sums, and divides by them; the
// probabilities of its first key tiles are kept, the others computed again.
//
// dQ of a row tile is finished where it is made.  dK and dV are summed over all query heads of a group in float32
// buffers that cover only the keys touched.  Where there are fewer (batch, key head) units than threads, the row tiles
// of a unit are split; whoever finishes a unit's last split adds the splits in order, so that results do not depend on
// scheduling.
#pragma once

#include <atomic>
#include <cmath>
#include <memory>

#include "attention.h"

namespace magi {

// Products: how the matrix products are computed (FloatBackward, AmxBackward).
template <class Products>
class Backward {
 public:
  explicit Backward(const Attention& a)
      : a_(a), steps_(a.score), factors_(factors(a, steps_)), products_(a, factors_.query), dim_(int(a.head_dim)),
        v_dim_(int(a.v_head_dim)), dq_rows_(Products::dq_rows(dim_)), dim_lanes_(round_up(dim_, kLanes)),
        v_dim_lanes_(round_up(v_dim_, kLanes)), group_(a.kv_heads == 0 ? 1 : a.q_heads / a.kv_heads),
        row_tiles_((a.q_len + kQueryTile - 1) / kQueryTile) {}

  Status run() {
    if (!products_.prepare()) return kOutOfMemory;
    const int64_t units = a_.batch * a_.kv_heads, splits = split_count(units);
    std::vector<Unit> all(units);
    std::vector<int64_t> shared_cuts;
    for (int64_t u = 0; u < units; ++u) {
      Unit& unit = all[u];
      unit.batch = u / a_.kv_heads;
      unit.kv_head = u % a_.kv_heads;
      unit.left = splits;
      unit.parts.resize(splits);
      if (u == 0 || a_.mask.batch_stride != 0 || a_.mask.head_stride != 0) shared_cuts = cuts(unit, splits);
      unit.cuts = shared_cuts;
    }
    const bool ok = parallel_items(a_.threads, units * splits, [&](int64_t item) {
      Unit& unit = all[item / splits];
      const int64_t split = splits - 1 - item % splits;
      run_split(unit, split);
      if (--unit.left == 0) finish_unit(unit);
    });
    return !ok ? kOutOfMemory : bias_ok_ ? kOk : kBiasOutOfRange;
  }

 private:
  using Worker = typename Products::Worker;
  struct FreeDeleter {
    void operator()(float* p) const { std::free(p); }
  };
  using Buffer = std::unique_ptr<float[], FreeDeleter>;
  static Buffer zeros(int64_t count) {
    Buffer buffer(static_cast<float*>(std::calloc(size_t(std::max<int64_t>(count, 1)), sizeof(float))));
    if (!buffer) throw std::bad_alloc();
    return buffer;
  }

  struct Sums {  // of dK and dV over the keys [begin, end)
    int64_t begin = 0, end = 0;
    Buffer dk, dv;
  };
  struct Unit {
    int64_t batch, kv_head;
    std::vector<int64_t> cuts;  // row tiles of split i: [cuts[i], cuts[i + 1])
    std::vector<Sums> parts;
    std::atomic<int64_t> left;
  };
  struct Buffers {
    float *q, *d_out, *out, *dq_panels, *p, *ds, *derivative, *lse, *delta, *factor;
  };
  static constexpr int kKeptTiles = 32;  // 3 MiB a thread

  int64_t split_count(int64_t units) const {
    if (units == 0 || units % a_.threads == 0 || units >= 4 * a_.threads) return 1;
    // All sums together stay within a few times the size of K and V, or 256 MiB where that is more.
    const int64_t unit_bytes = a_.kv_len * (dim_lanes_ + v_dim_lanes_) * int64_t(sizeof(float));
    const int64_t most = std::max<int64_t>({4, (int64_t{256} << 20) / std::max<int64_t>(1, unit_bytes * units)});
    const int64_t wanted = (4 * a_.threads + units - 1) / units;
    return std::max<int64_t>(1, std::min({wanted, most, row_tiles_}));
  }

  // Cuts the row tiles into splits of about equal numbers of keys visited.
  std::vector<int64_t> cuts(const Unit& unit, int64_t splits) const {
    std::vector<int64_t> result{0};
    if (splits > 1) {
      RowTileMask mask;
      std::vector<int64_t> cost(row_tiles_ + 1, 0);
      for (int64_t t = 0; t < row_tiles_; ++t) {
        cost[t + 1] = cost[t] + 1;
        const int64_t heads = a_.mask.head_stride == 0 ? 1 : group_;
        for (int64_t i = 0; i < heads; ++i) {
          reset(mask, unit.batch, unit.kv_head * group_ + i, t);
          for (const KeyTile& tile : mask.tiles()) cost[t + 1] += tile.end - tile.begin;
        }
      }
      for (int64_t i = 1; i < splits; ++i) {
        const auto at = std::lower_bound(cost.begin(), cost.end(), cost.back() / splits * i);
        result.push_back(std::max(result.back(), int64_t(at - cost.begin())));
      }
    }
    result.push_back(row_tiles_);
    return result;
  }

  void reset(RowTileMask& mask, int64_t batch, int64_t head, int64_t row_tile) const {
    const int64_t first = row_tile * kQueryTile;
    mask.reset(a_.mask, batch, head, first, std::min(first + kQueryTile, a_.q_len), a_.q_len, a_.kv_len,
               Products::kTileAlign);
  }

  void run_split(Unit& unit, int64_t split) {
    Sums& sums = unit.parts[split];
    const int64_t first = unit.cuts[split], last = unit.cuts[split + 1];
    sums.begin = a_.kv_len;
    for (int64_t i = 0; i < group_; ++i) {
      const int64_t head = unit.kv_head * group_ + i;
      const auto [begin, end] = key_range(a_.mask, unit.batch, head, first * kQueryTile,
                                          std::min(last * kQueryTile, a_.q_len), a_.q_len, a_.kv_len);
      sums.begin = std::min(sums.begin, begin);
      sums.end = std::max(sums.end, end);
      if (a_.mask.head_stride == 0) break;
    }
    sums.begin = std::min(sums.begin, sums.end) / Products::kTileAlign * Products::kTileAlign;
    const int64_t keys = round_up(sums.end - sums.begin, Products::kTileAlign);  // a tile may write beyond its end
    sums.dk = zeros(keys * dim_lanes_);
    sums.dv = zeros(keys * v_dim_lanes_);
    for (int64_t t = first; t < last; ++t) {
      for (int64_t i = 0; i < group_; ++i) row_tile(unit, sums, unit.kv_head * group_ + i, t);
    }
  }

  Buffers buffers() const {
    static thread_local Scratch scratch;
    const size_t q = size_t(kQueryTile) * dim_lanes_, v = size_t(kQueryTile) * v_dim_lanes_;
    const size_t scores = size_t(kKeyTile) * kQueryTile;
    const size_t derivative = steps_.has_derivative() ? scores : 0;
    const size_t dq = size_t(kQueryTile) * dq_rows_, kept = kept_tiles() * scores;
    scratch.reserve({q, v, v, dq, kept, scores, derivative, kQueryTile, kQueryTile, kQueryTile});
    Buffers b;
    b.q = scratch.take(q);
    b.d_out = scratch.take(v);
    b.out = scratch.take(v);
    b.dq_panels = scratch.take(dq);
    b.p = scratch.take(kept);
    b.ds = scratch.take(scores);
    b.derivative = scratch.take(derivative);
    b.lse = scratch.take(kQueryTile);
    b.delta = scratch.take(kQueryTile);
    b.factor = scratch.take(kQueryTile);
    return b;
  }

  bool normalises() const { return a_.q.type == Type::kFloat32; }

  // Key tiles whose probabilities are kept; the last place is the one that all further tiles share.
  int kept_tiles() const {
    const int64_t most = (a_.kv_len + kKeyTile - 1) / kKeyTile + 1;
    return !normalises() || steps_.has_derivative() ? 1 : int(std::min<int64_t>(kKeptTiles, most));
  }
  bool is_kept(size_t tile) const { return tile + 1 < size_t(kept_tiles()); }
  float* probabilities(const Buffers& b, size_t tile) const {
    return b.p + std::min(tile, size_t(kept_tiles() - 1)) * kKeyTile * kQueryTile;
  }

  void row_tile(const Unit& unit, Sums& sums, int64_t head, int64_t t) {
    static thread_local RowTileMask mask;
    const int64_t first = t * kQueryTile;
    const int rows = int(std::min<int64_t>(kQueryTile, a_.q_len - first));
    const Buffers b = buffers();
    reset(mask, unit.batch, head, t);
    std::fill_n(b.dq_panels, kQueryTile * dq_rows_, 0.0f);
    if (!mask.tiles().empty()) {
      Worker worker(products_);
      load_row_tile(unit.batch, head, first, rows, b);
      worker.load_queries(b.q, b.d_out, rows);
      std::fill_n(b.factor, kQueryTile, 1.0f);
      if (normalises()) {
        normalise(unit, head, first, rows, mask, worker, b);
        mask.rewind();
      }
      for (size_t i = 0; i < mask.tiles().size(); ++i) key_tile(unit, sums, head, first, rows, mask, i, worker, b);
    }
    for (int p = 0; p < panel_count(rows); ++p) {
      panel_to_rows(b.dq_panels + p * kPanel * dq_rows_, std::min(kPanel, rows - p * kPanel), kPanel, dim_,
                    b.q + p * kPanel * dim_, dim_);
    }
    store_rows(a_.dq, unit.batch, head, first, first + rows, dim_, b.q, dim_, a_.scale);
  }

  void load_row_tile(int64_t batch, int64_t head, int64_t first, int rows, const Buffers& b) const {
    load_rows(a_.q, batch, head, first, first + rows, dim_, b.q, dim_lanes_);
    load_rows(a_.d_out, batch, head, first, first + rows, v_dim_, b.d_out, v_dim_lanes_);
    load_rows(a_.out, batch, head, first, first + rows, v_dim_, b.out, v_dim_lanes_);
    row_dots(rows, b);
    const int64_t at = (batch * a_.q_heads + head) * a_.q_len + first;
    for (int i = 0; i < kQueryTile; ++i) {
      // An empty row, like a lane beyond the rows, gets probabilities 0 and takes part in nothing, whatever its dO is.
      const bool live = i < rows && a_.lse[at + i] != -kInfinity;
      b.lse[i] = live ? a_.lse[at + i] : kInfinity;
      if (live && a_.d_lse != nullptr) b.delta[i] -= a_.d_lse[at + i] * kLog2E;  // lse is in the log2 domain
      if (live) continue;
      b.delta[i] = 0.0f;
      if (i < rows) std::fill_n(b.d_out + i * v_dim_lanes_, v_dim_lanes_, 0.0f);
    }
  }

  // delta = rowsum(dO * O), summed in the order in which the matrix product sums dO V^T: in a row with one key, where O
  // is V, the two cancel exactly.
  void row_dots(int rows, const Buffers& b) const {
    constexpr int kTogether = 8;  // sums under way at a time
    std::fill_n(b.delta, kQueryTile, 0.0f);
    for (int first = 0; first < rows; first += kTogether) {
      const int count = std::min(kTogether, rows - first);
      for (int begin = 0; begin < v_dim_; begin += kSumPart) {
        float sum[kTogether] = {};
        for (int e = begin; e < std::min(begin + kSumPart, v_dim_); ++e) {
          for (int i = 0; i < count; ++i) {
            const int at = (first + i) * v_dim_lanes_ + e;
            sum[i] = std::fma(b.d_out[at], b.out[at], sum[i]);
          }
        }
        for (int i = 0; i < count; ++i) b.delta[first + i] = begin == 0 ? sum[i] : b.delta[first + i] + sum[i];
      }
    }
  }

  // Probabilities of all keys, and the factor that makes each row's sum 1.
  void normalise(const Unit& unit, int64_t head, int64_t first, int rows, RowTileMask& mask, Worker& worker,
                 const Buffers& b) {
    alignas(64) float sum[kQueryTile] = {};
    for (size_t i = 0; i < mask.tiles().size(); ++i) {
      const KeyTile& tile = mask.tiles()[i];
      worker.load_keys(unit.batch, unit.kv_head, tile);
      for (int p = 0; p < panel_count(rows); ++p) {
        const PanelPlace place = panel_place(unit.batch, head, first, rows, p);
        PanelMask panel_mask;
        mask.panel(p, place.vecs, tile, &panel_mask);
        if (panel_mask.lo >= panel_mask.hi) continue;
        compute_probabilities(place, p, tile, panel_mask, worker, b, probabilities(b, i));
        for (int j = 0; j < place.vecs; ++j) {
          const int lane = p * kPanel + j * kLanes;
          VecF total{};
          for (int key = panel_mask.lo; key < panel_mask.hi; ++key) {
            total += load(probabilities(b, i) + key * kQueryTile + lane);
          }
          store(sum + lane, load(sum + lane) + total);
        }
      }
    }
    for (int i = 0; i < rows; ++i) {
      // More than rounding: lse is of more keys than these (partial results that are merged later), and stands.
      const float rounding = 0x1p-22f * std::clamp(std::abs(b.lse[i]), 1.0f, 0x1p16f);
      if (std::abs(sum[i] - 1.0f) < rounding) b.factor[i] = 1.0f / sum[i];
    }
  }

  void compute_probabilities(const PanelPlace& place, int p, const KeyTile& tile, const PanelMask& mask, Worker& worker,
                             const Buffers& b, float* probability) {
    worker.scores(p, place.vecs, mask.lo, mask.hi, probability);
    const ptrdiff_t at = ptrdiff_t{mask.lo} * kQueryTile + p * kPanel;
    probability += at;
    float* derivative = steps_.has_derivative() ? b.derivative + at : nullptr;
    if (!steps_.identity() && !steps_.apply(a_.scale, place, tile.begin, mask, probability, derivative, kQueryTile)) {
      bias_ok_ = false;
    }
    if (!mask.full) apply_mask(mask, place.vecs, probability, kQueryTile);
    for (int j = 0; j < place.vecs; ++j) {
      const VecF lse = load(b.lse + p * kPanel + j * kLanes);
      for (int key = 0; key < mask.hi - mask.lo; ++key) {
        float* to = probability + key * kQueryTile + j * kLanes;
        store(to, exp2_affine(load(to), factors_.score, lse));
      }
    }
  }

  void key_tile(const Unit& unit, Sums& sums, int64_t head, int64_t first, int rows, RowTileMask& mask, size_t index,
                Worker& worker, const Buffers& b) {
    const KeyTile& tile = mask.tiles()[index];
    worker.load_keys(unit.batch, unit.kv_head, tile);
    float* probability = probabilities(b, index);
    PanelMask masks[kQueryTile / kPanel];
    for (int p = 0; p < panel_count(rows); ++p) {
      const PanelPlace place = panel_place(unit.batch, head, first, rows, p);
      mask.panel(p, place.vecs, tile, &masks[p]);
      if (masks[p].lo >= masks[p].hi) continue;
      if (!is_kept(index)) compute_probabilities(place, p, tile, masks[p], worker, b, probability);
      worker.d_probabilities(p, place.vecs, masks[p].lo, masks[p].hi, b.ds);
      to_d_scores(place, p, masks[p], b, probability);
      worker.add_dq(p, place.vecs, masks[p].lo, masks[p].hi, b.ds, b.dq_panels + p * kPanel * dq_rows_);
    }
    worker.add_keys(masks, int(tile.end - tile.begin), probability, b.ds,
                    sums.dk.get() + (tile.begin - sums.begin) * dim_lanes_,
                    sums.dv.get() + (tile.begin - sums.begin) * v_dim_lanes_);
  }

  // From P and dP (in ds) to the normalised P and dS.
  void to_d_scores(const PanelPlace& place, int p, const PanelMask& mask, const Buffers& b, float* probability) const {
    for (int j = 0; j < place.vecs; ++j) {
      const int lane = p * kPanel + j * kLanes;
      const VecF delta = load(b.delta + lane), factor = load(b.factor + lane);
      for (int key = mask.lo; key < mask.hi; ++key) {
        const int i = key * kQueryTile + lane;
        const VecF x = load(probability + i) * factor;
        store(probability + i, x);
        VecF d = x * (load(b.ds + i) - delta);
        if (steps_.has_derivative()) d *= load(b.derivative + i);
        store(b.ds + i, d);
      }
    }
  }

  void finish_unit(Unit& unit) const {
    constexpr int64_t kKeys = 64;
    std::vector<float> sum(size_t(kKeys) * std::max(dim_lanes_, v_dim_lanes_));
    const auto write = [&](Buffer Sums::*part, int width, int dim, const Tensor4& to, float factor) {
      for (int64_t begin = 0; begin < a_.kv_len; begin += kKeys) {
        const int64_t end = std::min(begin + kKeys, a_.kv_len);
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (const Sums& sums : unit.parts) {
          const int64_t lo = std::max(begin, sums.begin), hi = std::min(end, sums.end);
          const float* from = (sums.*part).get() + (lo - sums.begin) * width;
          for (int64_t i = (lo - begin) * width; i < (hi - begin) * width; ++i) sum[i] += *from++;
        }
        store_rows(to, unit.batch, unit.kv_head, begin, end, dim, sum.data(), width, factor);
      }
    };
    write(&Sums::dk, dim_lanes_, dim_, a_.dk, a_.scale);
    write(&Sums::dv, v_dim_lanes_, v_dim_, a_.dv, 1.0f);
    unit.parts.clear();
  }

  const Attention& a_;
  const ScoreSteps steps_;
  const Factors factors_;
  Products products_;
  const int dim_, v_dim_, dq_rows_, dim_lanes_, v_dim_lanes_;  // *_lanes_: rounded up to whole vectors
  const int64_t group_, row_tiles_;
  std::atomic<bool> bias_ok_{true};
};

}  // namespace magi

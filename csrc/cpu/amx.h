// Matrix products of bfloat16 on AMX tiles (x86 since Sapphire Rapids), or on an emulation of the tiles in plain C++
// (MAGI_EMULATE_AMX), which lets every machine test the packing and the loops around them.
//
// A tile is 16 rows of 64 bytes.  One step: C[16, 16] += A[16, 32] B[32, 16], float32 sums of bfloat16 products.  B holds
// pairs of depths side by side: row r, 32-bit column n = (B[2 r, n], B[2 r + 1, n]).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(MAGI_EMULATE_AMX) || (defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__))
#define MAGI_HAS_AMX 1
#endif

#if defined(MAGI_HAS_AMX)

#if !defined(MAGI_EMULATE_AMX)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace magi {

constexpr int kTileRows = 16;   // of A and C; columns of B and C
constexpr int kTileDepth = 32;  // bfloat16 numbers in a row of A

#if defined(MAGI_EMULATE_AMX)

struct EmulatedTile {
  alignas(64) unsigned char bytes[kTileRows * 64];
};
inline EmulatedTile* emulated_tiles() {
  static thread_local EmulatedTile tiles[8];
  return tiles;
}
inline void emulated_load(int t, const void* from, ptrdiff_t stride) {
  for (int r = 0; r < kTileRows; ++r) {
    std::memcpy(emulated_tiles()[t].bytes + r * 64, static_cast<const char*>(from) + r * stride, 64);
  }
}
inline void emulated_store(int t, void* to, ptrdiff_t stride) {
  for (int r = 0; r < kTileRows; ++r) {
    std::memcpy(static_cast<char*>(to) + r * stride, emulated_tiles()[t].bytes + r * 64, 64);
  }
}
inline void emulated_multiply(int c, int a, int b) {
  const auto widened = [](int t, int at) {
    uint16_t half;
    std::memcpy(&half, emulated_tiles()[t].bytes + 2 * at, 2);
    const uint32_t bits = uint32_t{half} << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  };
  for (int m = 0; m < kTileRows; ++m) {
    for (int n = 0; n < kTileRows; ++n) {
      float sum;
      std::memcpy(&sum, emulated_tiles()[c].bytes + (m * 16 + n) * 4, 4);
      for (int k = 0; k < kTileDepth; ++k) {
        sum += widened(a, m * 32 + k) * widened(b, k / 2 * 32 + 2 * n + k % 2);
      }
      std::memcpy(emulated_tiles()[c].bytes + (m * 16 + n) * 4, &sum, 4);
    }
  }
}
#define MAGI_TILE_ZERO(t) std::memset(emulated_tiles()[t].bytes, 0, sizeof(EmulatedTile))
#define MAGI_TILE_LOAD(t, from, stride) emulated_load(t, from, stride)
#define MAGI_TILE_STORE(t, to, stride) emulated_store(t, to, stride)
#define MAGI_TILE_MULTIPLY(c, a, b) emulated_multiply(c, a, b)

struct TileScope {};
inline bool amx_allowed() { return true; }

#else

#define MAGI_TILE_ZERO(t) _tile_zero(t)
#define MAGI_TILE_LOAD(t, from, stride) _tile_loadd(t, from, stride)
#define MAGI_TILE_STORE(t, to, stride) _tile_stored(t, to, stride)
#define MAGI_TILE_MULTIPLY(c, a, b) _tile_dpbf16ps(c, a, b)

// Eight full tiles while it lives; then the configuration that another library may count on.
class TileScope {
 public:
  TileScope() {
    _tile_storeconfig(&before_);
    Config full{};
    full.palette = 1;
    for (int t = 0; t < 8; ++t) {
      full.row_bytes[t] = 64;
      full.rows[t] = kTileRows;
    }
    _tile_loadconfig(&full);
  }
  ~TileScope() {
    if (before_.palette == 0) {
      _tile_release();
    } else {
      _tile_loadconfig(&before_);
    }
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Config) == 64);
  Config before_;
};

// Linux gives the tiles' state to a process that asks for it.
inline bool amx_allowed() {
  static const bool allowed = [] {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return allowed;
}

#endif

struct TilesA {  // tile (i, k): data + i * row_step + k * depth_step, rows `row` elements apart
  const uint16_t* data;
  ptrdiff_t row, row_step, depth_step;
};
struct TilesB {  // tile (k, j): data + k * depth_step + j * 32, rows `row` elements apart
  const uint16_t* data;
  ptrdiff_t row, depth_step;
};

// C tiles (i, j) for i < kRows, j < kCols: tiles 0 to 3 hold C, 4 and 5 A, 6 and 7 B.
template <int kRows, int kCols, bool kAccumulate>
inline void amx_block(int depth, const TilesA& a, const TilesB& b, float* c, ptrdiff_t c_row) {
  const ptrdiff_t stride = c_row * ptrdiff_t{4};
  float* lower = c + kTileRows * c_row;
  if constexpr (kAccumulate) {
    MAGI_TILE_LOAD(0, c, stride);
    if constexpr (kCols > 1) MAGI_TILE_LOAD(1, c + 16, stride);
    if constexpr (kRows > 1) MAGI_TILE_LOAD(2, lower, stride);
    if constexpr (kRows > 1 && kCols > 1) MAGI_TILE_LOAD(3, lower + 16, stride);
  } else {
    MAGI_TILE_ZERO(0);
    if constexpr (kCols > 1) MAGI_TILE_ZERO(1);
    if constexpr (kRows > 1) MAGI_TILE_ZERO(2);
    if constexpr (kRows > 1 && kCols > 1) MAGI_TILE_ZERO(3);
  }
  for (int k = 0; k < depth; ++k) {
    const uint16_t* left = a.data + k * a.depth_step;
    const uint16_t* right = b.data + k * b.depth_step;
    MAGI_TILE_LOAD(4, left, a.row * 2);
    MAGI_TILE_LOAD(6, right, b.row * 2);
    MAGI_TILE_MULTIPLY(0, 4, 6);
    if constexpr (kCols > 1) {
      MAGI_TILE_LOAD(7, right + 32, b.row * 2);
      MAGI_TILE_MULTIPLY(1, 4, 7);
    }
    if constexpr (kRows > 1) {
      MAGI_TILE_LOAD(5, left + a.row_step, a.row * 2);
      MAGI_TILE_MULTIPLY(2, 5, 6);
      if constexpr (kCols > 1) MAGI_TILE_MULTIPLY(3, 5, 7);
    }
  }
  MAGI_TILE_STORE(0, c, stride);
  if constexpr (kCols > 1) MAGI_TILE_STORE(1, c + 16, stride);
  if constexpr (kRows > 1) MAGI_TILE_STORE(2, lower, stride);
  if constexpr (kRows > 1 && kCols > 1) MAGI_TILE_STORE(3, lower + 16, stride);
}

// rows, cols, depth in tiles.
template <bool kAccumulate>
inline void amx_multiply(int rows, int cols, int depth, TilesA a, TilesB b, float* c, ptrdiff_t c_row) {
  for (int j = 0; j < cols; j += 2) {
    const TilesB right{b.data + j * 32, b.row, b.depth_step};
    for (int i = 0; i < rows; i += 2) {
      const TilesA left{a.data + i * a.row_step, a.row, a.row_step, a.depth_step};
      float* to = c + i * kTileRows * c_row + j * kTileRows;
      if (i + 1 < rows && j + 1 < cols) {
        amx_block<2, 2, kAccumulate>(depth, left, right, to, c_row);
      } else if (i + 1 < rows) {
        amx_block<2, 1, kAccumulate>(depth, left, right, to, c_row);
      } else if (j + 1 < cols) {
        amx_block<1, 2, kAccumulate>(depth, left, right, to, c_row);
      } else {
        amx_block<1, 1, kAccumulate>(depth, left, right, to, c_row);
      }
    }
  }
}

}  // namespace magi

#endif  // MAGI_HAS_AMX

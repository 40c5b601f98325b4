// Vectors of LANES numbers. They are compiled once for each instruction set.

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));
typedef int32_t Places __attribute__((vector_size(LANES * sizeof(float))));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector v) { *reinterpret_cast<Vector*>(to) = v; }

// Transpose LANES vectors: each of log2(LANES) rounds interleaves the first half with the second.
inline void transpose(Vector* v) {
  Places low, high;
  for (int i = 0; i < LANES; ++i) {
    low[i] = i / 2 + i % 2 * LANES;
    high[i] = low[i] + LANES / 2;
  }
  for (int round = 1; round < LANES; round *= 2) {
    Vector mixed[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; ++i) {
      mixed[2 * i] = __builtin_shuffle(v[i], v[i + LANES / 2], low);
      mixed[2 * i + 1] = __builtin_shuffle(v[i], v[i + LANES / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) v[i] = mixed[i];
  }
}

// Vectors of LANES numbers. They are compiled once for each instruction set.

typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef float Unaligned __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));
typedef int32_t Places __attribute__((vector_size(LANES * sizeof(float))));

inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, Vector v) { *reinterpret_cast<Unaligned*>(to) = v; }

// Return the numbers at place(0), ..., place(LANES - 1) of those of a and then those of b.
template <typename V, typename Place, int... LANE>
ALWAYS_INLINE V shuffle(V a, V b, Place place, std::integer_sequence<int, LANE...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, place(LANE)...);
#else
  return __builtin_shuffle(a, b, Places{place(LANE)...});
#endif
}

template <typename V, typename Place>
ALWAYS_INLINE V shuffle(V a, V b, Place place) {
  return shuffle(a, b, place, std::make_integer_sequence<int, LANES>());
}

// Return every second number of those of a and then those of b, from the first or the second one on.
ALWAYS_INLINE Vector even(Vector a, Vector b) {
  return shuffle(a, b, [](int lane) { return 2 * lane; });
}

ALWAYS_INLINE Vector odd(Vector a, Vector b) {
  return shuffle(a, b, [](int lane) { return 2 * lane + 1; });
}

// Transpose LANES vectors: each of log2(LANES) rounds interleaves the first half with the second.
inline void transpose(Vector* v) {
  const auto low = [](int i) { return i / 2 + i % 2 * LANES; };
  const auto high = [](int i) { return i / 2 + i % 2 * LANES + LANES / 2; };
  for (int round = 1; round < LANES; round *= 2) {
    Vector mixed[LANES];
    UNROLLED(8) for (int i = 0; i < LANES / 2; ++i) {
      mixed[2 * i] = shuffle(v[i], v[i + LANES / 2], low);
      mixed[2 * i + 1] = shuffle(v[i], v[i + LANES / 2], high);
    }
    UNROLLED(16) for (int i = 0; i < LANES; ++i) v[i] = mixed[i];
  }
}

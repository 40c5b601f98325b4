// Pairs of numbers that are rounded to bfloat16, as in bfloat16.h. They are compiled once for each
// instruction set.

typedef uint32_t Bits __attribute__((vector_size(LANES * sizeof(float))));
constexpr uint32_t UPPER_HALF = 0xffff0000, QUIET = 0x400000;

// Return the numbers rounded to their upper halves, ties to even. NaN stays NaN.
ALWAYS_INLINE Vector rounded(Vector x) {
  const Bits bits = (Bits)x;
  const Bits nearest = bits + 0x7fff + (bits >> 16 & 1);
  return (Vector)((x == x ? nearest : bits | QUIET) & UPPER_HALF);
}

// Return the pairs of numbers of two vectors.
ALWAYS_INLINE Vector pairs_of(Vector first, Vector second) {
  return (Vector)((Bits)rounded(first) >> 16 | (Bits)rounded(second));
}

// Return the numbers in the lower or the upper halves of pairs.
ALWAYS_INLINE Vector lower(Bits pairs) { return (Vector)(pairs << 16); }
ALWAYS_INLINE Vector upper(Bits pairs) { return (Vector)(pairs & UPPER_HALF); }

// The innermost loops of packed.cpp. They are compiled once for each instruction set.

// Return the next LANES integers.
template <int BITS>
inline Places integers(const uint8_t* from) {
  if constexpr (BITS == 8) {
    typedef uint8_t Bytes __attribute__((vector_size(LANES)));
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Places);
  } else {
    // Each lane gets the word of its integer, and shifts it.
    constexpr int SIZE = LANES * BITS / 8, IN_WORD = 32 / BITS;
    uint32_t words[2] = {};
    std::memcpy(words, from, SIZE);
    Places shifts;
    for (int i = 0; i < LANES; ++i) shifts[i] = i % IN_WORD * BITS;
    const auto of_word = [](int i) { return i / IN_WORD * LANES; };
    const Places first = Places{} + int32_t(words[0]), second = Places{} + int32_t(words[1]);
    const Places word = SIZE > 4 ? shuffle(first, second, of_word) : first;
    return word >> shifts & ((1 << BITS) - 1);
  }
}

// Write W[row][first], ..., W[row][first + count - 1] in pieces of `size` numbers that are `pitch`
// apart. All of these are multiples of LANES.
template <int BITS>
void unpack_row(
    const Matrix& w, int64_t row, int64_t first, int64_t count, int64_t size, int64_t pitch,
    float* to) {
  const Blocks blocks(w, row);
  const uint8_t* from = w.integers + row * w.row_bytes + first * BITS / 8;
  int64_t block = first / w.block;
  const float* end_of_piece = to + size;
  for (int64_t i = first, end = first + count; i < end; ++block) {
    const int64_t next = std::min((block + 1) * w.block, end);
    const float scale = blocks.scale(block), zero = blocks.zero(block);
    for (; i < next; i += LANES, to += LANES, from += LANES * BITS / 8) {
      if (to == end_of_piece) {
        to += pitch - size;
        end_of_piece += pitch;
      }
      store(to, (__builtin_convertvector(integers<BITS>(from), Vector) - zero) * scale);
    }
  }
}

// Write W[row][first + step], one vector of rows for each step: to[step pitch + row]. Beyond the last
// row, that row is repeated. Beyond the last step, up to a whole word of integers is written.
template <int BITS>
void unpack_vector_of_rows(
    const Matrix& w, int64_t row, int64_t first, int64_t count, int64_t pitch, float* to) {
  constexpr int IN_WORD = 32 / BITS;
  const uint8_t* from[LANES];
  std::vector<Blocks> blocks;
  for (int lane = 0; lane < LANES; ++lane) {
    const int64_t of_lane = std::min(row + lane, w.rows - 1);
    blocks.emplace_back(w, of_lane);
    from[lane] = w.integers + of_lane * w.row_bytes + first * BITS / 8;
  }
  int64_t block = first / w.block, byte = 0;
  for (int64_t i = first, end = first + count; i < end; ++block) {
    const int64_t next = std::min((block + 1) * w.block, end);
    Vector scale, zero;
    for (int lane = 0; lane < LANES; ++lane) {
      scale[lane] = blocks[lane].scale(block);
      zero[lane] = blocks[lane].zero(block);
    }
    for (; i < next; i += IN_WORD, byte += 4) {
      Places words;
      for (int lane = 0; lane < LANES; ++lane) {
        int32_t word;
        std::memcpy(&word, from[lane] + byte, sizeof word);
        words[lane] = word;
      }
      UNROLLED(16) for (int j = 0; j < IN_WORD; ++j, to += pitch) {
        const Places levels = words >> (j * BITS) & ((1 << BITS) - 1);
        store(to, (__builtin_convertvector(levels, Vector) - zero) * scale);
      }
    }
  }
}

// The same for several vectors of rows.
template <int BITS>
void unpack_rows(
    const Matrix& w, int64_t row, int64_t rows, int64_t first, int64_t count, float* to) {
  for (int64_t i = 0; i < rows; i += LANES) {
    unpack_vector_of_rows<BITS>(w, row + i, first, count, rows, to + i);
  }
}

// Add the products of n numbers with the same number of each row. The rows are `pitch` apart.
void add_products_of_few(
    const float* numbers, int64_t n, const float* left, int64_t rows, int64_t pitch, float* sums) {
  for (int64_t row = 0; row < rows; ++row, left += pitch) {
    Vector sum = {}, more = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
      sum += load(numbers + i) * load(left + i);
      more += load(numbers + i + LANES) * load(left + i + LANES);
    }
    sum += more;
    float total = 0;
    for (; i < n; ++i) total += numbers[i] * left[i];
    for (int lane = 0; lane < LANES; ++lane) total += sum[lane];
    sums[row] += total;
  }
}

// Add factors[row pitch] numbers[i] to sums[row][i]. n is a multiple of LANES.
void add_multiples(
    const float* numbers, int64_t n, const float* factors, int64_t rows, int64_t pitch,
    float* sums) {
  for (int64_t row = 0; row < rows; ++row, sums += n) {
    const float factor = factors[row * pitch];
    for (int64_t i = 0; i < n; i += LANES) {
      store(sums + i, load(sums + i) + load(numbers + i) * factor);
    }
  }
}

template <int BITS>
constexpr Functions FUNCTIONS{
    unpack_row<BITS>, unpack_rows<BITS>, add_products_of_few, add_multiples};

const Functions& functions_of_bits(int64_t bits) {
  if (bits == 2) return FUNCTIONS<2>;
  return bits == 4 ? FUNCTIONS<4> : FUNCTIONS<8>;
}

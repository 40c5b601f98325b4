#include "buffer.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int64_t MAX_KEPT = 4 << 20;  // numbers in all
constexpr int64_t MAX_EXCESS = 4;      // times as many numbers as a buffer needs
[[maybe_unused]] constexpr int64_t LEAST = 1 << 14;

// A buffer starts at a line of the cache. Else each vector of a whole line would be read from two lines.
constexpr std::align_val_t LINE{64};  // bytes

float* allocate(int64_t size) {
  return static_cast<float*>(::operator new(size_t(size) * sizeof(float), LINE));
}

void release(float* data) { ::operator delete(data, LINE); }

struct Block {
  float* data;
  int64_t size;
  std::thread::id user;  // the thread of its last buffer
};

// The blocks that no buffer has.
class Kept {
 public:
  // Return the smallest block of `size` to MAX_EXCESS x `size` numbers that this thread used last, since
  // its processor may have it in its caches; if there is none, the smallest of the other threads; if
  // there is none either, {nullptr, 0}.
  Block take(int64_t size) {
    const std::thread::id user = std::this_thread::get_id();
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto cost = [user](const Block& block) { return std::pair(block.user != user, block.size); };
    size_t best = blocks_.size();
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const bool fits = blocks_[i].size >= size && blocks_[i].size / MAX_EXCESS <= size;
      if (fits && (best == blocks_.size() || cost(blocks_[i]) < cost(blocks_[best]))) best = i;
    }
    if (best == blocks_.size()) return {};
    const Block found = blocks_[best];
    blocks_.erase(blocks_.begin() + int64_t(best));
    total_ -= found.size;
    return found;
  }

  // Keep a block, and return whether there is room for it.
  bool keep(const Block& block) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (block.size > MAX_KEPT) return false;
    while (total_ + block.size > MAX_KEPT) {  // blocks of sizes that nobody asks for are the oldest
      total_ -= blocks_.front().size;
      release(blocks_.front().data);
      blocks_.erase(blocks_.begin());
    }
    try {
      blocks_.push_back(block);
    } catch (...) {
      return false;
    }
    total_ += block.size;
    return true;
  }

 private:
  std::mutex mutex_;
  std::vector<Block> blocks_;
  int64_t total_ = 0;
};

Kept& kept() {
  static Kept& blocks = *new Kept;  // threads may use it until the process ends
  return blocks;
}

}  // namespace

Buffer::Buffer(int64_t size) {
#ifdef SANITIZED  // AddressSanitizer sees only what lies outside of a block; NaN shows what is not written
  data_ = allocate(size);
  std::fill_n(data_, size, std::nanf(""));
#else
  size = size < LEAST ? LEAST : size;
  const Block block = kept().take(size);
  data_ = block.data ? block.data : allocate(size);
  size_ = block.data ? block.size : size;
#endif
}

Buffer::~Buffer() {
  if (data_ && (!size_ || !kept().keep({data_, size_, std::this_thread::get_id()}))) release(data_);
}

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

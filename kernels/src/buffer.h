// Memory for intermediate numbers.
#pragma once

#include <cstdint>

// Numbers that are not set. Their memory is kept for the next buffer: memory that is fresh from the
// system costs more than the numbers that a kernel writes to it.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size);  // may throw std::bad_alloc
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  float* data() const { return data_; }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

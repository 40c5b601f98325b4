// Memory for intermediate numbers.
#pragma once

#include <cstdint>

// An array of floats that are not set. Its memory is kept for the next buffers of the process: memory
// that is fresh from the system costs more time than the numbers that a kernel writes to it.
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

// Runs one of the tests: operators_test NAME [share of the random trials]
//
// The operators around these loops, which read tensors and attributes of onnxruntime, are compared with
// the operators of ONNX in tests/kernels.
#include <cstring>

#include "buffer.h"
#include "check.h"

namespace {

// Buffers start at a line of the cache.
void test_buffer(double) {
  for (int64_t size = 1; size < 100; ++size) {
    const Buffer one(size), other(size);
    for (const Buffer* buffer : {&one, &other}) {
      require(reinterpret_cast<uintptr_t>(buffer->data()) % 64 == 0, "a buffer is not aligned");
    }
  }
}

// The compiler's library finds the same instruction set.
void test_instruction_set(double) {
#if defined(HAS_TARGETS) && !defined(_WIN32)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f");
  require((instruction_set() >= InstructionSet::AVX2) == has_avx2, "AVX2");
  require((instruction_set() == InstructionSet::AVX512) == has_avx512, "AVX-512");
#endif
  std::printf("%d instruction sets\n", int(instruction_sets().size()));
}

constexpr struct {
  const char* name;
  void (*run)(double share);
} TESTS[] = {
    {"elementwise", test_elementwise}, {"scan", test_scan},
    {"max_pool", test_max_pool},       {"depthwise", test_depthwise},
    {"dense", test_dense},             {"batch_norm", test_batch_norm},
    {"rows", test_rows},               {"gather", test_gather},
    {"product", test_product},         {"packed", test_packed},
    {"low_rank", test_low_rank},       {"buffer", test_buffer},
    {"instruction_set", test_instruction_set},
};

}  // namespace

int main(int count, char** arguments) {
  const double share = count > 2 ? std::atof(arguments[2]) : 1;
  for (const auto& [name, run] : TESTS) {
    if (count > 1 && std::strcmp(arguments[1], name) == 0) {
      run(share);
      return 0;
    }
  }
  std::printf("There is no such test. The tests are:\n");
  for (const auto& [name, run] : TESTS) std::printf("%s\n", name);
  return 2;
}

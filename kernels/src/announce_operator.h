// y0, y1, ... = Announce(x0, x1, ...): the outputs are copies of the inputs. When all of them are written,
// the operator makes announcement `number` on the board `key`.
//
// The inputs may lie anywhere, and other nodes may read them later. No node reads the outputs, so another
// thread may change them while the graph runs, if they lie where the board expects them.
#pragma once

#include <cstring>

#include "announcements.h"
#include "operator.h"

namespace {

template <typename T>
struct Announce {
  int64_t key = 0, number = 0;
  size_t count = 0;

  ort::Status* read(const ort::KernelInfo* info) {
    size_t outputs = 0;
    RETURN_IF_FAILED(api->call(ort::GET_INPUT_COUNT, info, &count));
    RETURN_IF_FAILED(api->call(ort::GET_OUTPUT_COUNT, info, &outputs));
    if (outputs != count) return api->error("Announce needs an output for each input.");
    RETURN_IF_FAILED(get_integer(info, "key", key));
    return get_integer(info, "number", number);
  }

  ort::Status* compute(ort::KernelContext* context) const {
    std::vector<const void*> places;
    for (size_t i = 0; i < count; ++i) {
      Tensor x;
      void* y = nullptr;
      RETURN_IF_FAILED(get_input(context, i, x));
      RETURN_IF_FAILED(get_output(context, i, x.shape, y));
      if (const size_t bytes = x.elements() * sizeof(T)) std::memcpy(y, x.data, bytes);
      places.push_back(y);
    }
    return announcements::make(key, number, places)
               ? nullptr
               : api->error("Announce needs an open board that has its number.");
  }
};

}  // namespace

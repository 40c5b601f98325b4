// Announce(x, ...) makes announcement `number` on the board `key` when all of its inputs are computed, and
// returns the number.
#pragma once

#include "announcements.h"
#include "operator.h"

namespace {

struct Announce {
  int64_t key = 0, number = 0;

  ort::Status* read(const ort::KernelInfo* info) {
    RETURN_IF_FAILED(get_integer(info, "key", key));
    return get_integer(info, "number", number);
  }

  ort::Status* compute(ort::KernelContext* context) const {
    void* result = nullptr;
    RETURN_IF_FAILED(get_output(context, 0, {}, result));
    *static_cast<float*>(result) = float(number);
    return announcements::make(key, number)
               ? nullptr
               : api->error("Announce needs an open board that has its number.");
  }
};

}  // namespace

// Each product of a number of one table and a number of the other is computed:
//
//     sums[row][column] = sum over steps of frame[offset of step + offset of row] panel[step][column]
//
// The frame holds the images with zeros around them.
#include <cstring>
#include <numeric>
#include <utility>

#include "buffer.h"
#include "dense.h"
#include "rows.h"

namespace dense {

namespace {

constexpr int64_t ROWS_PER_TASK = 1024;  // about so many, for which the panel is packed once
constexpr int64_t STEPS_AT_ONCE = 256;   // a panel of so many rows stays in the second cache
constexpr int64_t MAX_SUMS = 1 << 16;    // of a task, which stay in the second cache
constexpr int64_t TASKS_OF_WEIGHTS = 16;  // at least, if there are as many images

using tiles::divide_up;
using tiles::Functions;
using tiles::round_up;
using tiles::Step;

// How a direction is divided into tasks.
struct Tasks {
  int64_t column_blocks, image_groups, row_groups;
  int64_t columns_per_block, images_per_group, rows_per_group;  // rows: of results, or channels

  int64_t count() const { return column_blocks * image_groups * row_groups; }
};

// How one axis of the result reads a frame.
struct ResultAxis {
  struct Tap {
    int64_t tap, offset;
  };

  // The elements of the result that the same taps reach: `first`, and each after `stride` more.
  // Their places in the frame lie `distance` apart.
  struct Phase {
    int64_t first, stride, place, distance;
    std::vector<Tap> taps;

    int64_t place_of(int64_t element) const { return place + (element - first) / stride * distance; }

    // The first element of the phase that is not before another one.
    int64_t first_from(int64_t element) const {
      return first + round_up(std::max<int64_t>(element - first, 0), stride);
    }
  };

  int64_t source, result;  // sizes
  int64_t ahead, frame;    // the zeros before the source, and the size of the frame
  std::vector<Phase> phases;

  static ResultAxis forward(const Axis& axis) {
    const int64_t extent = (axis.kernel - 1) * axis.dilation + 1;
    Phase phase{0, 1, 0, axis.stride, {}};
    for (int64_t tap = 0; tap < axis.kernel; ++tap) phase.taps.push_back({tap, tap * axis.dilation});
    return {axis.pixels, axis.windows, axis.pad, (axis.windows - 1) * axis.stride + extent, {phase}};
  }

  static ResultAxis transposed(const Axis& axis) {
    const int64_t stride = axis.stride;
    const int64_t reach = (axis.kernel - 1) * axis.dilation / stride;
    const int64_t size = (axis.pixels - 1 + axis.pad) / stride + 1 + reach;
    ResultAxis result{axis.windows, axis.pixels, reach, size, {}};
    for (int64_t remainder = 0; remainder < stride; ++remainder) {
      const int64_t first = ((remainder - axis.pad) % stride + stride) % stride;
      Phase phase{first, stride, (first + axis.pad) / stride, 1, {}};
      for (int64_t tap = 0; tap < axis.kernel; ++tap) {
        const int64_t distance = tap * axis.dilation;
        if (distance % stride == remainder) phase.taps.push_back({tap, reach - distance / stride});
      }
      result.phases.push_back(std::move(phase));
    }
    return result;
  }
};

// The channels, or images, that are the first and second numbers of pairs.
enum class Pairs { NONE, OF_CHANNELS, OF_IMAGES };

// Some channels of some images with zeros around them: some rows of each frame. Two channels or images
// whose numbers are pairs are one.
class Frame {
 public:
  int64_t pitch, plane, image;  // the distances of rows, channels and images

  Frame(
      const Functions& functions, Pairs pairs, const std::array<ResultAxis, 2>& axes,
      const Range& frame_rows, const float* source, int64_t channels, const Range& read_channels,
      const Range& images) {
    const int64_t of_channels = pairs == Pairs::OF_CHANNELS ? 2 : 1;
    const int64_t of_images = pairs == Pairs::OF_IMAGES ? 2 : 1;
    const auto& [rows, columns] = axes;
    const int64_t pixels = rows.source * columns.source;
    const bool is_whole = rows.frame <= rows.source && columns.frame <= columns.source;
    source += (images.first * channels + read_channels.first) * pixels;
    if (pairs == Pairs::NONE && !rows.ahead && !columns.ahead && is_whole) {  // it needs no zeros
      pitch = columns.source;
      plane = pixels;
      image = channels * pixels;
      elements_ = source + frame_rows.first * pitch;
      return;
    }
    pitch = columns.frame;
    plane = frame_rows.size() * pitch;
    image = divide_up(read_channels.size(), of_channels) * plane;
    const int64_t size = divide_up(images.size(), of_images) * image;
    copy_ = Buffer(size);
    std::memset(copy_.data(), 0, size_t(size) * sizeof(float));
    elements_ = copy_.data();
    const int64_t first = std::max<int64_t>(frame_rows.first - rows.ahead, 0);
    const int64_t end = std::min(frame_rows.end - rows.ahead, rows.source);
    const int64_t count = std::min(columns.source, columns.frame - columns.ahead);
    const int64_t skipped = (first + rows.ahead - frame_rows.first) * pitch + columns.ahead;
    float* to = copy_.data() + skipped;
    const int64_t distance = pairs == Pairs::OF_CHANNELS ? pixels : channels * pixels;  // in a pair
    for (int64_t i = 0; i < images.size(); i += of_images, source += of_images * channels * pixels) {
      const float* from = source + first * columns.source;
      for (int64_t channel = 0; channel < read_channels.size(); channel += of_channels, to += plane) {
        if (pairs == Pairs::NONE) {
          convolution::copy_rows(from, columns.source, to, pitch, end - first, count);
        } else {
          const bool is_whole_pair = channel + of_channels <= read_channels.size() && i + of_images <= images.size();
          const float* second = is_whole_pair ? from + distance : nullptr;
          if (count == pitch && count == columns.source) {  // as one row
            functions.pair_rows(from, second, 0, to, 0, 1, (end - first) * count);
          } else {
            functions.pair_rows(from, second, columns.source, to, pitch, end - first, count);
          }
        }
        from += of_channels * pixels;
      }
    }
  }

  const float* elements() const { return elements_; }

 private:
  Buffer copy_;
  const float* elements_;
};

// The rows of a panel: the number of a step and a column is from[numbers[step] + column pitch].
struct Factors {
  const float *from, *end;
  int64_t pitch, columns;
};

// The width of a panel, and the functions that compute with it.
struct Panel {
  const Functions& functions;
  int64_t width;
  Buffer elements;

  Panel(const Work& work, int64_t panel_width) : functions(work.functions()), width(panel_width) {}

  void pack(const Factors& factors, const int64_t* numbers, int64_t steps) {
    if (!elements.data()) elements = Buffer(std::max(steps, STEPS_AT_ONCE) * width);
    functions.pack(
        factors.from, factors.end, numbers, steps, factors.pitch, factors.columns, width,
        elements.data());
  }

  // The same for steps in groups of a size, two of which are one group of pairs. The last group may be
  // alone.
  void pack_pairs(const Factors& factors, const int64_t* numbers, int64_t steps, int64_t of_group) {
    if (!elements.data()) elements = Buffer(2 * std::max(steps, STEPS_AT_ONCE) * width);
    pack(factors, numbers, steps);
    float* const to = elements.data();
    const int64_t size = of_group * width, pairs = steps / (2 * of_group);
    functions.pair_rows(to, to + size, 2 * size, to, size, pairs, size);
    if (steps > 2 * pairs * of_group) {
      functions.pair_rows(to + 2 * pairs * size, nullptr, 0, to + pairs * size, 0, 1, size);
    }
  }

  // Fill up the last tile with copies of a row.
  void pad(std::vector<int64_t>& rows) const { functions.pad(rows, width); }

  // The elements of the sums of so many rows: `unpack` reads more.
  int64_t sums(size_t padded_rows) const {
    return (int64_t(padded_rows) + functions.lanes) * width;
  }
};

// Copy rows of some columns, whose places in the result lie `stride` apart.
void spread_rows(
    const float* from, const std::vector<int64_t>& places, int64_t columns, int64_t stride,
    float* result) {
  for (size_t i = 0; i < places.size(); i += size_t(columns), from += columns) {
    float* to = result + places[i];
    for (int64_t column = 0; column < columns; ++column) to[column * stride] = from[column];
  }
}

// Images that are computed from images: y of x, or dx of dy.
class Images final : public Algorithm {
 public:
  Images(const Work& w, bool is_transposed)
      : work(w),
        source(is_transposed ? w.dy : w.x),
        source_channels(is_transposed ? w.filters : w.channels),
        result_channels(is_transposed ? w.channels : w.filters),
        step_pitch((is_transposed ? w.channels : 1) * w.taps()),
        column_pitch((is_transposed ? 1 : w.channels) * w.taps()),
        axes{axis_of(w.axes[0], is_transposed), axis_of(w.axes[1], is_transposed)},
        tasks(divide()) {}

  std::vector<int64_t> tasks_of_stages() const override { return {tasks.count()}; }

  void run(size_t, int64_t task) override {
    const auto& [rows, columns] = axes;
    const int64_t block = task % tasks.column_blocks * tasks.columns_per_block;
    task /= tasks.column_blocks;
    const Range strip = Range::of(task % tasks.row_groups, tasks.rows_per_group, rows.result);
    const Range images = Range::of(task / tasks.row_groups, tasks.images_per_group, work.images);
    const Range read = frame_rows(strip);
    Panel panel(work, tasks.columns_per_block);
    const Frame frame(
        panel.functions, work.has_pairs ? Pairs::OF_CHANNELS : Pairs::NONE, axes, read, source,
        source_channels, {0, source_channels}, images);
    const int64_t taps = work.taps(), in_step = work.has_pairs ? 2 : 1;
    const int64_t steps_at_once = std::clamp<int64_t>(
        STEPS_AT_ONCE / taps, 1, divide_up(source_channels, in_step));
    const int64_t channels_at_once = in_step * steps_at_once;

    std::vector<Phase> phases;
    size_t padded_rows = 0;
    for (const ResultAxis::Phase& of_rows : rows.phases) {
      for (const ResultAxis::Phase& of_columns : columns.phases) {
        Phase phase;
        list_results(frame, images, strip, read.first, of_rows, of_columns, phase);
        if (phase.places.empty()) continue;
        list_steps(frame, steps_at_once, panel.width, of_rows, of_columns, phase);
        panel.pad(phase.rows);
        phase.first_row = padded_rows;
        phase.columns = divide_up(columns.result - of_columns.first, of_columns.stride);
        phase.stride = of_columns.stride;
        padded_rows += phase.rows.size();
        phases.push_back(std::move(phase));
      }
    }
    const Buffer sums(panel.sums(padded_rows));
    std::vector<int64_t> numbers;
    for (int64_t channel = 0; channel < channels_at_once; ++channel) {
      for (int64_t tap = 0; tap < taps; ++tap) numbers.push_back(channel * step_pitch + tap);
    }
    const int64_t in_block = std::min(panel.width, result_channels - block);
    Factors factors{work.w + block * column_pitch, work.w + work.filters * work.channels * taps,
                    column_pitch, in_block};
    const float* elements = frame.elements();
    for (int64_t channel = 0; channel < source_channels; channel += channels_at_once) {
      const int64_t channels = std::min(channels_at_once, source_channels - channel);
      const int64_t steps = divide_up(channels, in_step);
      if (work.has_pairs) panel.pack_pairs(factors, numbers.data(), channels * taps, taps);
      else panel.pack(factors, numbers.data(), channels * taps);
      for (const Phase& phase : phases) {
        panel.functions.add_products(
            elements, phase.rows, phase.steps.data(), steps * phase.steps_per_channel,
            panel.elements.data(), panel.width, channel == 0,
            sums.data() + int64_t(phase.first_row) * panel.width);
      }
      elements += steps * frame.plane;
      factors.from += channels * step_pitch;
    }
    const int64_t size = rows.result * columns.result;
    float* to = work.result + (images.first * result_channels + block) * size;
    const float* bias = work.bias ? work.bias + block : nullptr;
    for (const Phase& phase : phases) {
      const int64_t count = int64_t(phase.places.size());
      const float* of_phase = sums.data() + int64_t(phase.first_row) * panel.width;
      const auto unpack = [&](const int64_t* places, int64_t pitch, float* first) {
        panel.functions.unpack(of_phase, places, count, bias, in_block, panel.width, pitch, first);
      };
      if (phase.stride == 1) {
        unpack(phase.places.data(), size, to);
        continue;
      }
      // Vector instructions write the elements side by side; then each is copied to its place.
      const Buffer apart(count * in_block);
      std::vector<int64_t> places(phase.places.size());
      std::iota(places.begin(), places.end(), 0);
      unpack(places.data(), count, apart.data());
      for (int64_t channel = 0; channel < in_block; ++channel) {
        spread_rows(
            apart.data() + channel * count, phase.places, phase.columns, phase.stride,
            to + channel * size);
      }
    }
  }

 private:
  // The elements of the result that the same taps reach.
  struct Phase {
    std::vector<int64_t> rows, places;  // the elements' places in the frame, and in the result
    std::vector<Step> steps;            // of some channels
    int64_t steps_per_channel;
    size_t first_row;  // of the sums
    int64_t columns, stride;  // the elements in a row of the result, and their distance
  };

  const Work work;
  const float* source;
  const int64_t source_channels, result_channels;
  const int64_t step_pitch, column_pitch;  // of the weights: of channels of the source and of the result
  const std::array<ResultAxis, 2> axes;
  const Tasks tasks;

  static ResultAxis axis_of(const Axis& axis, bool is_transposed) {
    return is_transposed ? ResultAxis::transposed(axis) : ResultAxis::forward(axis);
  }

  Tasks divide() const {
    const auto& [rows, columns] = axes;
    Tasks tasks;
    tasks.columns_per_block = work.functions().width_for(result_channels);
    tasks.rows_per_group = std::clamp<int64_t>(ROWS_PER_TASK / columns.result, 1, rows.result);
    const int64_t elements = rows.result * columns.result;
    tasks.images_per_group = std::clamp<int64_t>(ROWS_PER_TASK / elements, 1, work.images);
    tasks.column_blocks = divide_up(result_channels, tasks.columns_per_block);
    tasks.row_groups = divide_up(rows.result, tasks.rows_per_group);
    tasks.image_groups = divide_up(work.images, tasks.images_per_group);
    return tasks;
  }

  // The rows of the frame that rows of the result read.
  Range frame_rows(const Range& strip) const {
    Range read{axes[0].frame, 0};
    for (const ResultAxis::Phase& phase : axes[0].phases) {
      for (int64_t row = phase.first_from(strip.first); row < strip.end; row += phase.stride) {
        for (const ResultAxis::Tap& tap : phase.taps) {
          read.first = std::min(read.first, phase.place_of(row) + tap.offset);
          read.end = std::max(read.end, phase.place_of(row) + tap.offset + 1);
        }
      }
    }
    return read.end ? read : Range{0, 0};
  }

  void list_results(
      const Frame& frame, const Range& images, const Range& strip, int64_t first_row,
      const ResultAxis::Phase& of_rows, const ResultAxis::Phase& of_columns, Phase& phase) const {
    const auto& [rows, columns] = axes;
    for (int64_t image = 0; image < images.size(); ++image) {
      for (int64_t row = of_rows.first_from(strip.first); row < strip.end; row += of_rows.stride) {
        const int64_t offset =
            image * frame.image + (of_rows.place_of(row) - first_row) * frame.pitch;
        const int64_t place = (image * result_channels * rows.result + row) * columns.result;
        for (int64_t i = of_columns.first; i < columns.result; i += of_columns.stride) {
          phase.rows.push_back(offset + of_columns.place_of(i));
          phase.places.push_back(place + i);
        }
      }
    }
  }

  void list_steps(
      const Frame& frame, int64_t channels, int64_t width, const ResultAxis::Phase& of_rows,
      const ResultAxis::Phase& of_columns, Phase& phase) const {
    for (int64_t channel = 0; channel < channels; ++channel) {
      for (const ResultAxis::Tap& row : of_rows.taps) {
        for (const ResultAxis::Tap& column : of_columns.taps) {
          const int64_t tap = row.tap * work.axes[1].kernel + column.tap;
          phase.steps.push_back(
              {channel * frame.plane + row.offset * frame.pitch + column.offset,
               (channel * work.taps() + tap) * width});
        }
      }
    }
    phase.steps_per_channel = int64_t(of_rows.taps.size() * of_columns.taps.size());
  }
};

// The gradient of weights, dw of x and dy: first the sums over each group of images, then over all.
class WeightSums final : public Algorithm {
 public:
  explicit WeightSums(const Work& w) : work(w), tasks(divide()) {
    const Panel panel(work, tasks.columns_per_block);
    std::vector<int64_t> rows(size_t(tasks.rows_per_group * work.taps()));
    panel.pad(rows);
    elements_of_task = panel.sums(rows.size());
    elements = Buffer(tasks.count() * elements_of_task);
  }

  std::vector<int64_t> tasks_of_stages() const override {
    return {tasks.count(), tasks.column_blocks * tasks.row_groups};
  }

  void run(size_t stage, int64_t task) override { stage ? write(task) : add(task); }

 private:
  const Work work;
  const Tasks tasks;
  Buffer elements;
  int64_t elements_of_task;

  Tasks divide() const {
    Tasks tasks;
    tasks.columns_per_block = work.functions().width_for(work.filters);
    tasks.column_blocks = divide_up(work.filters, tasks.columns_per_block);
    const int64_t most = MAX_SUMS / (tasks.columns_per_block * work.taps());
    tasks.rows_per_group = std::clamp<int64_t>(most, 1, work.channels);
    tasks.row_groups = divide_up(work.channels, tasks.rows_per_group);
    const int64_t groups = divide_up(TASKS_OF_WEIGHTS, tasks.column_blocks * tasks.row_groups);
    tasks.images_per_group = divide_up(work.images, std::min(groups, work.images));
    if (work.has_pairs) tasks.images_per_group = round_up(tasks.images_per_group, 2);
    tasks.image_groups = divide_up(work.images, tasks.images_per_group);
    return tasks;
  }

  // Compute the sums of one task.
  void add(int64_t task) {
    const std::array<ResultAxis, 2> axes{
        ResultAxis::forward(work.axes[0]), ResultAxis::forward(work.axes[1])};
    const ResultAxis::Phase &of_rows = axes[0].phases[0], &of_columns = axes[1].phases[0];
    const int64_t windows = axes[0].result * axes[1].result;
    float* sums = elements.data() + task * elements_of_task;
    const int64_t block = task % tasks.column_blocks * tasks.columns_per_block;
    task /= tasks.column_blocks;
    const Range channels = Range::of(task % tasks.row_groups, tasks.rows_per_group, work.channels);
    const Range images = Range::of(task / tasks.row_groups, tasks.images_per_group, work.images);
    // Many steps lie behind each other, so that a tile is rarely written.
    const int64_t in_step = work.has_pairs ? 2 : 1;
    const int64_t images_at_once =
        in_step * std::clamp<int64_t>(STEPS_AT_ONCE / windows, 1, divide_up(images.size(), in_step));

    Panel panel(work, tasks.columns_per_block);
    std::vector<int64_t> rows, numbers;
    std::vector<Step> steps;
    const int64_t in_block = std::min(panel.width, work.filters - block);
    for (int64_t first = images.first; first < images.end; first += images_at_once) {
      const Range now{first, std::min(first + images_at_once, images.end)};
      const Frame frame(
          panel.functions, work.has_pairs ? Pairs::OF_IMAGES : Pairs::NONE, axes,
          {0, axes[0].frame}, work.x, work.channels, channels, now);
      if (rows.empty()) {
        for (int64_t channel = 0; channel < channels.size(); ++channel) {
          for (const ResultAxis::Tap& row : of_rows.taps) {
            for (const ResultAxis::Tap& column : of_columns.taps) {
              rows.push_back(channel * frame.plane + row.offset * frame.pitch + column.offset);
            }
          }
        }
        panel.pad(rows);
        for (int64_t image = 0; image < now.size(); ++image) {
          for (int64_t window = 0; window < windows; ++window) {
            const int64_t row = of_rows.place_of(window / axes[1].result);
            const int64_t column = of_columns.place_of(window % axes[1].result);
            const int64_t place = int64_t(steps.size()) % STEPS_AT_ONCE * panel.width;
            if (image % in_step == 0) {
              steps.push_back({image / in_step * frame.image + row * frame.pitch + column, place});
            }
            numbers.push_back(image * work.filters * windows + window);
          }
        }
      }
      const Factors factors{work.dy + (first * work.filters + block) * windows,
                            work.dy + work.images * work.filters * windows, windows, in_block};
      const int64_t count = divide_up(now.size(), in_step) * windows;
      for (int64_t step = 0; step < count; step += STEPS_AT_ONCE) {
        const int64_t n = std::min(STEPS_AT_ONCE, count - step);
        if (!work.has_pairs) {
          panel.pack(factors, numbers.data() + step, n);
        } else if (n == count) {
          panel.pack_pairs(factors, numbers.data(), now.size() * windows, windows);
        } else {  // a part of one image, or of two
          std::vector<int64_t> of_part;
          for (int64_t image = 0; image < now.size(); ++image) {
            const auto first_number = numbers.begin() + image * windows + step;
            of_part.insert(of_part.end(), first_number, first_number + n);
          }
          panel.pack_pairs(factors, of_part.data(), int64_t(of_part.size()), n);
        }
        panel.functions.add_products(
            frame.elements(), rows, steps.data() + step, n, panel.elements.data(), panel.width,
            first == images.first && step == 0, sums);
      }
    }
  }

  // Add the sums of all groups of images, and write a part of dw.
  void write(int64_t task) {
    const Panel panel(work, tasks.columns_per_block);
    const int64_t parts = tasks.column_blocks * tasks.row_groups;
    const int64_t written = elements_of_task - panel.sums(0);
    float* sums = elements.data() + task * elements_of_task;
    for (int64_t group = 1; group < tasks.image_groups; ++group) {
      const float* more = sums + group * parts * elements_of_task;
      for (int64_t i = 0; i < written; ++i) sums[i] += more[i];
    }
    const int64_t block = task % tasks.column_blocks * tasks.columns_per_block;
    const Range channels =
        Range::of(task / tasks.column_blocks, tasks.rows_per_group, work.channels);
    const int64_t taps = work.taps(), pitch = work.channels * taps;
    std::vector<int64_t> places;
    for (int64_t row = channels.first * taps; row < channels.end * taps; ++row) places.push_back(row);
    panel.functions.unpack(
        sums, places.data(), int64_t(places.size()), nullptr,
        std::min(panel.width, work.filters - block), panel.width, pitch, work.result + block * pitch);
  }
};

}  // namespace

std::unique_ptr<Algorithm> direct(const Work& work, Direction direction) {
  if (direction == Direction::WEIGHTS) return std::make_unique<WeightSums>(work);
  return std::make_unique<Images>(work, direction == Direction::TRANSPOSED);
}

}  // namespace dense

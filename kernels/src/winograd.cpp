// Convolutions by fewer products (Lavin and Gray 2016, "Fast algorithms for convolutional neural
// networks": Winograd's F(2 x 2, 3 x 3), and along one axis F(2, 3) and F(2, 5)).
//
// Windows are computed in tiles of 2 x 2, each from its pixels d and the filter g:
//
//     y = A^T ((G g G^T) * (B^T d B)) A         * of elements, summed over the channels
//
// which takes 16 products where windows of 3 x 3 taps have 36. The gradient of the pixels is such a
// convolution, too; that of the filter is
//
//     dg = G^T ((A dy A^T) * (B^T d B)) G       summed over the tiles
#include <cstring>

#include "buffer.h"
#include "dense.h"
#include "rows.h"
#include "vectorized.h"
#include "winograd_schemes.h"

namespace dense {

namespace {

constexpr int64_t MAX_TILES = 96;  // of a task, about: whole rows of tiles
constexpr int64_t MIN_TILES = 24;
constexpr int64_t TASKS = 8;                  // at least, if each has MIN_TILES
constexpr int64_t MAX_TRANSFORMED = 1 << 19;  // pixels of a task, which stay in the second cache
constexpr int64_t MAX_SUMS = 1 << 22;         // of filters, over all groups of tiles
constexpr int64_t MAX_CHANNELS_OF_SUMS = 72;  // of a task, whose sums stay in the second cache
constexpr int64_t CHANNELS_AT_ONCE = 64;      // that a task of the first stage transforms

using tiles::divide_up;
using tiles::Functions;
using tiles::round_up;
using tiles::Step;
using winograd::OfFilters;
using winograd::OfPixels;
using winograd::OfSums;
using winograd::Transposed;

// Return the distance between element k and element k + 1 of so many transformed tiles or filters: an
// odd number of cache lines. Elements 4 kB apart would have the same places in the first cache.
inline int64_t distance_of(int64_t numbers) { return 16 * (divide_up(numbers, 16) | 1); }

// The loops of winograd_loops.h.
struct Transforms {
  int lanes;
  int64_t elements, taps;  // of a transformed tile or filter, and of a filter
  struct {
    int64_t windows, pixels;  // of a tile
  } axes[2];
  void (*pixels)(
      const float* frame, int64_t plane, int64_t pitch, int64_t tiles, float* to,
      int64_t distance);
  void (*adjacent_pixels)(
      const float* frame, int64_t plane, int64_t pitch, int64_t tiles, float* to,
      int64_t distance);
  void (*pixel_pairs)(
      const float* frame, const float* second, int64_t plane, int64_t pitch, int64_t tiles, float* to,
      int64_t distance);
  void (*filters)(
      const float* from, int64_t channels, int64_t width, bool are_flipped, float* to,
      int64_t distance);
  void (*sums)(
      const float* sums, int64_t distance, const int64_t* places, int64_t tiles, int64_t width,
      float* to);
  void (*gradients)(
      const float* from, const int64_t* places, int64_t tiles, int64_t width, float* to,
      int64_t distance);
  void (*gradient_pairs)(
      const float* from, const int64_t* places, int64_t tiles, int64_t width, float* to,
      int64_t distance);
  void (*filter_sums)(
      const float* sums, int64_t distance, int64_t channels, int64_t width, float* to);

  // The rows and columns of tiles behind the last one whose pixels it reads, too.
  int64_t rows_behind() const { return (axes[0].pixels - 1) / axes[0].windows; }
  int64_t columns_behind() const { return (axes[1].pixels - 1) / axes[1].windows; }
};

#define LOOPS "winograd_loops.h"
#include "each_instruction_set.h"

// Return the transforms for filters of so many taps; none if there are none.
const Transforms* transforms_of(
    [[maybe_unused]] InstructionSet instructions, [[maybe_unused]] const Axes& axes) {
#ifdef HAS_LOOPS
  const int64_t rows = axes[0].kernel, columns = axes[1].kernel;
  return OF_INSTRUCTION_SET(instructions, transforms_of)(rows, columns);
#else
  return nullptr;
#endif
}

// Which products are added in one step: those of two channels, or of two tiles.
enum class Pairs { NONE, OF_CHANNELS, OF_TILES };

// The tiles of all images, row by row.
struct Tiles {
  int64_t height, width;  // in windows
  int64_t images, windows_of_rows, windows_of_columns;

  int64_t windows() const { return height * width; }
  int64_t rows_of_image() const { return divide_up(windows_of_rows, height); }
  int64_t rows() const { return images * rows_of_image(); }
  int64_t columns() const { return divide_up(windows_of_columns, width); }
  int64_t count(const Range& rows) const { return rows.size() * columns(); }

  // The rows of tiles for a task: about `most` tiles, but fewer if there would be too few groups of
  // rows. They are whole images, if an image has fewer.
  int64_t rows_at_once(int64_t groups, int64_t most) const {
    const int64_t of_group = divide_up(rows() * columns(), groups);
    const int64_t count = std::min(std::clamp(of_group, MIN_TILES, MAX_TILES), most);
    const int64_t rows_of_count = std::max<int64_t>(count / columns(), 1);
    if (rows_of_count < rows_of_image()) return rows_of_count;
    return std::min(rows_of_count / rows_of_image(), images) * rows_of_image();
  }
};

// The windows in some rows of tiles.
struct Windows {
  std::vector<int64_t> places;    // in images of so many channels
  std::vector<int64_t> of_tiles;  // the number of each tile's windows, places.size() if it has fewer

  Windows(const Tiles& tiles, const Range& rows, int64_t channels) {
    const int64_t height = tiles.windows_of_rows, width = tiles.windows_of_columns;
    constexpr int64_t none = -1;
    of_tiles.assign(size_t(tiles.windows() * tiles.count(rows)), none);
    for (int64_t row = rows.first; row < rows.end; ++row) {
      const int64_t image = row / tiles.rows_of_image();
      int64_t* numbers =
          of_tiles.data() + tiles.windows() * (row - rows.first) * tiles.columns();
      for (int64_t i = 0; i < tiles.height; ++i) {
        const int64_t y = row % tiles.rows_of_image() * tiles.height + i;
        for (int64_t x = 0; y < height && x < width; ++x) {
          numbers[tiles.windows() * (x / tiles.width) + i * tiles.width + x % tiles.width] =
              int64_t(places.size());
          places.push_back((image * channels * height + y) * width + x);
        }
      }
    }
    std::replace(of_tiles.begin(), of_tiles.end(), none, int64_t(places.size()));
  }
};

// Pixels in tiles that overlap.
//
// Some rows of tiles are transformed at once, as if they were one row: behind the last tile of each
// row, and behind the last row of each image, lie tiles that nobody reads.
struct Pixels {
  const Transforms& transforms;
  const Functions& functions;
  Tiles tiles;
  const float* source;
  int64_t channels, rows, columns, rows_ahead, columns_ahead;  // ahead: zeros before the first pixel

  // The tiles of so many rows, if those that nobody reads are counted.
  int64_t slots(int64_t tile_rows) const {
    const int64_t in_image = tiles.rows_of_image();
    const int64_t images = tile_rows % in_image ? tile_rows / in_image + 2 : tile_rows / in_image;
    const int64_t rows_in_all = tile_rows + images * transforms.rows_behind();
    return round_up(rows_in_all * slots_of_row(), 2 * transforms.lanes);  // for pairs of tiles
  }

  // The places of the tiles that are read.
  std::vector<int64_t> places(const Range& tile_rows) const {
    std::vector<int64_t> found;
    for (const Part& part : parts_of(tile_rows)) {
      for (int64_t row = 0; row < part.tile_rows; ++row) {
        const int64_t first = (part.first_line + row) * slots_of_row();
        for (int64_t i = 0; i < tiles.columns(); ++i) found.push_back(first + i);
      }
    }
    return found;
  }

  // Write element k of the tile at a place, of a channel, to to[k distance + channel pitch + place]. Two
  // channels that are pairs are one; pairs of tiles have half of their place.
  void transform(
      Pairs pairs, const Range& tile_rows, const Range& of_channels, float* to, int64_t pitch,
      int64_t distance) const {
    const std::vector<Part> parts = parts_of(tile_rows);
    const int64_t width = slots_of_row() * tiles.width;
    const int64_t copied = std::min(columns, width - columns_ahead);
    const int64_t count = parts.back().first_line + parts.back().tile_rows;  // of lines
    const int64_t plane = round_up(count * width, 2 * tiles.width * transforms.lanes) +
                          transforms.rows_behind() * width + transforms.axes[1].pixels;
    const int64_t in_step = pairs == Pairs::OF_CHANNELS ? 2 : 1;
    std::vector<float> frames(size_t(in_step * tiles.height * plane));
    float* const first_frame = frames.data();
    float* const second_frame = first_frame + tiles.height * plane;
    const auto copy = [&](int64_t channel, float* frame) {
      for (const Part& part : parts) {
        const float* from = source + (part.image * channels + channel) * rows * columns;
        for (int64_t i = 0; i < tiles.height; ++i) {
          // line l of the part is row `tiles.height l - before` of the image
          const int64_t before = part.before - i;
          const int64_t first = divide_up(std::max<int64_t>(before, 0), tiles.height);
          const int64_t end = std::min(
              divide_up(rows + before, tiles.height), part.tile_rows + transforms.rows_behind());
          if (end <= first) continue;
          convolution::copy_rows(
              from + (tiles.height * first - before) * columns, tiles.height * columns,
              frame + i * plane + (part.first_line + first) * width + columns_ahead, width,
              end - first, copied);
        }
      }
    };
    const int64_t slots = count * slots_of_row();
    for (int64_t channel = of_channels.first; channel < of_channels.end; channel += in_step, to += pitch) {
      copy(channel, first_frame);
      if (pairs == Pairs::OF_CHANNELS) {
        if (channel + 1 < of_channels.end) copy(channel + 1, second_frame);
        else std::fill(frames.begin() + tiles.height * plane, frames.end(), 0.0f);
        transforms.pixel_pairs(first_frame, second_frame, plane, width, slots, to, distance);
      } else {
        const auto of_one = pairs == Pairs::NONE ? transforms.pixels : transforms.adjacent_pixels;
        of_one(first_frame, plane, width, slots, to, distance);
      }
    }
  }

 private:
  // Rows of tiles of one image.
  struct Part {
    int64_t image, tile_rows;
    int64_t before;  // the rows of zeros before the first pixel; negative: of pixels that are left out
    int64_t first_line;
  };

  int64_t slots_of_row() const { return tiles.columns() + transforms.columns_behind(); }

  std::vector<Part> parts_of(const Range& tile_rows) const {
    std::vector<Part> parts;
    const int64_t in_image = tiles.rows_of_image();
    for (int64_t row = tile_rows.first, line = 0; row < tile_rows.end;) {
      const int64_t of_image = row % in_image;
      const int64_t count = std::min(in_image - of_image, tile_rows.end - row);
      parts.push_back({row / in_image, count, rows_ahead - tiles.height * of_image, line});
      line += count + transforms.rows_behind();
      row += count;
    }
    return parts;
  }
};

// Return the pixels of x or, to compute dx, those of dy.
Pixels pixels_of(const Work& work, bool is_transposed) {
  const auto& [rows, columns] = work.axes;
  const Transforms& transforms = *transforms_of(work.instructions, work.axes);
  const int64_t height = transforms.axes[0].windows, width = transforms.axes[1].windows;
  if (is_transposed) {
    return {transforms, work.functions(), {height, width, work.images, rows.pixels, columns.pixels},
            work.dy, work.filters, rows.windows, columns.windows,
            rows.kernel - 1 - rows.pad, columns.kernel - 1 - columns.pad};
  }
  return {transforms, work.functions(), {height, width, work.images, rows.windows, columns.windows},
          work.x, work.channels, rows.pixels, columns.pixels, rows.pad, columns.pad};
}

// Images that are computed from images: y of x, or dx of dy.
class Images final : public Algorithm {
 public:
  Images(const Work& work, bool is_transposed)
      : work_(work),
        is_transposed_(is_transposed),
        channels_(is_transposed ? work.filters : work.channels),
        results_(is_transposed ? work.channels : work.filters),
        functions_(work.functions()),
        width_(functions_.width_for(results_)),
        pixels_(pixels_of(work, is_transposed)),
        elements_(pixels_.transforms.elements),
        taps_(pixels_.transforms.taps) {
    const Tiles& tiles = pixels_.tiles;
    const int64_t blocks = divide_up(results_, width_);
    rows_at_once_ = tiles.rows_at_once(
        divide_up(TASKS, blocks), MAX_TRANSFORMED / (elements_ * channels_));
    row_groups_ = divide_up(tiles.rows(), rows_at_once_);
    blocks_at_once_ = divide_up(blocks, std::clamp<int64_t>(TASKS / row_groups_, 1, blocks));
    block_groups_ = divide_up(blocks, blocks_at_once_);
    if (are_filters_shared()) shared_filters_ = Buffer(blocks * filters_of_block());
    if (are_pixels_shared()) shared_pixels_ = Buffer(row_groups_ * transformed_size());
  }

  std::vector<int64_t> tasks_of_stages() const override {
    const int64_t of_pixels = are_pixels_shared() ? row_groups_ * channel_groups() : 0;
    return {filter_tasks() + of_pixels, row_groups_ * block_groups_};
  }

  void run(size_t stage, int64_t task) override {
    if (stage == 1) {
      multiply(task);
    } else if (task < filter_tasks()) {
      const int64_t block = task / channel_groups();
      transform_filters(
          block, Range::of(task % channel_groups(), CHANNELS_AT_ONCE, channels_),
          shared_filters_.data() + block * filters_of_block());
    } else {
      task -= filter_tasks();
      const int64_t group = task / channel_groups();
      transform_pixels(
          group, Range::of(task % channel_groups(), CHANNELS_AT_ONCE, channels_),
          shared_pixels_.data() + group * transformed_size());
    }
  }

 private:
  const Work work_;
  const bool is_transposed_;
  const int64_t channels_, results_;  // of the source, and of the result
  const Functions& functions_;
  const int64_t width_;  // of a block of the result's channels
  const Pixels pixels_;
  const int64_t elements_, taps_;  // of a transformed tile or filter, and of a filter
  int64_t rows_at_once_, row_groups_;      // of tiles
  int64_t blocks_at_once_, block_groups_;  // of the result's channels
  // Transformed filters, (blocks, elements, channels, width), and pixels: those that several tasks read.
  Buffer shared_filters_, shared_pixels_;

  bool are_filters_shared() const { return row_groups_ > 1; }
  bool are_pixels_shared() const { return block_groups_ > 1; }
  int64_t channel_groups() const { return divide_up(channels_, CHANNELS_AT_ONCE); }
  int64_t filter_tasks() const {
    return are_filters_shared() ? divide_up(results_, width_) * channel_groups() : 0;
  }

  Range tile_rows(int64_t group) const {
    return Range::of(group, rows_at_once_, pixels_.tiles.rows());
  }

  int64_t pitch() const { return pixels_.slots(rows_at_once_); }
  // The channels whose products a step adds: one, or a pair.
  int64_t in_step() const { return work_.has_pairs ? 2 : 1; }
  int64_t steps() const { return divide_up(channels_, in_step()); }
  int64_t pixel_distance() const { return distance_of(steps() * pitch()); }
  int64_t transformed_size() const { return elements_ * pixel_distance(); }
  int64_t filter_distance() const { return distance_of(steps() * width_); }
  int64_t filters_of_block() const { return elements_ * filter_distance(); }

  // Write the transformed filters of some channels: a part of those of a block.
  void transform_filters(int64_t block, const Range& channels, float* to) const {
    const int64_t step_pitch = is_transposed_ ? work_.channels * taps_ : taps_;
    const int64_t column_pitch = is_transposed_ ? taps_ : work_.channels * taps_;
    std::vector<int64_t> numbers;
    for (int64_t channel = 0; channel < channels.size(); ++channel) {
      for (int64_t tap = 0; tap < taps_; ++tap) numbers.push_back(channel * step_pitch + tap);
    }
    const Buffer taps(channels.size() * taps_ * width_);
    functions_.pack(
        work_.w + channels.first * step_pitch + block * width_ * column_pitch,
        work_.w + work_.filters * work_.channels * taps_, numbers.data(), int64_t(numbers.size()),
        column_pitch, std::min(width_, results_ - block * width_), width_, taps.data());
    to += channels.first / in_step() * width_;
    if (!work_.has_pairs) {
      pixels_.transforms.filters(
          taps.data(), channels.size(), width_, is_transposed_, to, filter_distance());
      return;
    }
    const int64_t distance = distance_of(channels.size() * width_), pairs = channels.size() / 2;
    const Buffer apart(elements_ * distance);
    pixels_.transforms.filters(
        taps.data(), channels.size(), width_, is_transposed_, apart.data(), distance);
    for (int64_t k = 0; k < elements_; ++k, to += filter_distance()) {
      const float* first = apart.data() + k * distance;
      functions_.pair_rows(first, first + width_, 2 * width_, to, width_, pairs, width_);
      if (channels.size() % 2) {
        functions_.pair_rows(first + 2 * pairs * width_, nullptr, 0, to + pairs * width_, 0, 1, width_);
      }
    }
  }

  void transform_pixels(int64_t group, const Range& channels, float* to) const {
    to += channels.first / in_step() * pitch();
    pixels_.transform(
        work_.has_pairs ? Pairs::OF_CHANNELS : Pairs::NONE, tile_rows(group), channels, to, pitch(),
        pixel_distance());
  }

  // Return the transformed pixels of a group of tiles: those that are shared, or a task's own.
  const float* transformed_pixels(int64_t group, Buffer& own) const {
    if (are_pixels_shared()) return shared_pixels_.data() + group * transformed_size();
    own = Buffer(transformed_size());
    transform_pixels(group, {0, channels_}, own.data());
    return own.data();
  }

  // Return the transformed filters of a block: those that are shared, or a task's own.
  const float* transformed_filters(int64_t block, Buffer& own) const {
    if (are_filters_shared()) return shared_filters_.data() + block * filters_of_block();
    if (!own.data()) own = Buffer(filters_of_block());
    for (int64_t group = 0; group < channel_groups(); ++group) {
      transform_filters(block, Range::of(group, CHANNELS_AT_ONCE, channels_), own.data());
    }
    return own.data();
  }

  void multiply(int64_t task) const {
    const int64_t group = task / block_groups_, blocks = divide_up(results_, width_);
    const Range of_blocks = Range::of(task % block_groups_, blocks_at_once_, blocks);
    Buffer own_pixels, own_filters;
    const float* pixels = transformed_pixels(group, own_pixels);
    const int64_t count = pixels_.tiles.count(tile_rows(group));
    std::vector<int64_t> rows = pixels_.places(tile_rows(group));
    functions_.pad(rows, width_);
    std::vector<Step> of_channels;
    for (int64_t step = 0; step < steps(); ++step) of_channels.push_back({step * pitch(), step * width_});
    const Windows windows(pixels_.tiles, tile_rows(group), results_);
    const int64_t distance = distance_of(int64_t(rows.size()) * width_);
    const int64_t places = int64_t(windows.places.size());
    const Buffer sums(elements_ * distance);
    const Buffer results((places + 1 + functions_.lanes) * width_);
    const int64_t size = pixels_.tiles.windows_of_rows * pixels_.tiles.windows_of_columns;
    for (int64_t block = of_blocks.first; block < of_blocks.end; ++block) {
      const float* filters = transformed_filters(block, own_filters);
      for (int64_t k = 0; k < elements_; ++k) {
        functions_.add_products(
            pixels + k * pixel_distance(), rows, of_channels.data(), steps(),
            filters + k * filter_distance(), width_, true, sums.data() + k * distance);
      }
      pixels_.transforms.sums(
          sums.data(), distance, windows.of_tiles.data(), count, width_, results.data());
      const int64_t first = block * width_;
      functions_.unpack(
          results.data(), windows.places.data(), places, work_.bias ? work_.bias + first : nullptr,
          std::min(width_, results_ - first), width_, size, work_.result + first * size);
    }
  }
};

// The gradient of filters: first the sums over each group of tiles, then over all.
class Filters final : public Algorithm {
 public:
  explicit Filters(const Work& work)
      : work_(work),
        functions_(work.functions()),
        width_(functions_.width_for(work.filters)),
        blocks_(divide_up(work.filters, width_)),
        pixels_(pixels_of(work, false)),
        elements_(pixels_.transforms.elements),
        taps_(pixels_.transforms.taps) {
    const Tiles& tiles = pixels_.tiles;
    channels_at_once_ = divide_up(work.channels, divide_up(work.channels, MAX_CHANNELS_OF_SUMS));
    channel_groups_ = divide_up(work.channels, channels_at_once_);
    std::vector<int64_t> rows(static_cast<size_t>(channels_at_once_));
    functions_.pad(rows, width_);
    distance_ = distance_of(int64_t(rows.size()) * width_);
    rows_at_once_ = tiles.rows_at_once(divide_up(TASKS, channel_groups_), MAX_TILES);
    const int64_t chunks = divide_up(tiles.rows(), rows_at_once_);
    const int64_t most = std::max<int64_t>(MAX_SUMS / (channel_groups_ * sums_of_task()), 1);
    const int64_t groups = std::min({divide_up(2 * TASKS, channel_groups_), chunks, most});
    rows_per_group_ = divide_up(chunks, groups) * rows_at_once_;
    row_groups_ = divide_up(tiles.rows(), rows_per_group_);
    if (row_groups_ > 1) sums_ = Buffer(row_groups_ * channel_groups_ * sums_of_task());
  }

  std::vector<int64_t> tasks_of_stages() const override {
    if (row_groups_ == 1) return {channel_groups_};
    return {row_groups_ * channel_groups_, blocks_ * channel_groups_};
  }

  void run(size_t stage, int64_t task) override {
    if (row_groups_ == 1) {
      const Buffer sums(sums_of_task());
      add(0, task, sums.data());
      for (int64_t block = 0; block < blocks_; ++block) write(block, task, sums.data());
    } else if (stage == 0) {
      add(task / channel_groups_, task % channel_groups_, sums_.data() + task * sums_of_task());
    } else {
      const int64_t group = task % channel_groups_;
      write(task / channel_groups_, group, sums_.data() + group * sums_of_task());
    }
  }

 private:
  const Work work_;
  const Functions& functions_;
  const int64_t width_, blocks_;  // of filters
  const Pixels pixels_;
  const int64_t elements_, taps_;  // of a transformed tile or filter, and of a filter
  int64_t channels_at_once_, channel_groups_;
  int64_t rows_at_once_, rows_per_group_, row_groups_;  // of tiles
  int64_t distance_;                                    // of the elements of sums
  Buffer sums_;  // of several groups: (row groups, channel groups, blocks, elements, channels, width)

  int64_t sums_of_task() const { return blocks_ * elements_ * distance_; }

  // The steps of some rows of tiles, and the windows of their tiles.
  struct Steps {
    std::vector<Step> steps;
    std::vector<int64_t> windows;

    void add(int64_t place, int64_t width) { steps.push_back({place, int64_t(steps.size()) * width}); }
  };

  Steps steps_of(const Range& tile_rows, const Windows& windows) const {
    const std::vector<int64_t> places = pixels_.places(tile_rows);
    Steps found;
    if (!work_.has_pairs) {
      for (int64_t place : places) found.add(place, width_);
      found.windows = windows.of_tiles;
      return found;
    }
    // A pair are the tiles at an even place and behind it, even if nobody reads one of them.
    const size_t in_tile = size_t(pixels_.tiles.windows());
    for (size_t tile = 0; tile < places.size(); ++tile) {
      const int64_t pair = places[tile] / 2;
      if (found.steps.empty() || found.steps.back().frame != pair) {
        found.add(pair, width_);
        found.windows.resize(found.windows.size() + 2 * in_tile, int64_t(windows.places.size()));
      }
      const auto first = windows.of_tiles.begin() + int64_t(tile * in_tile);
      std::copy_n(first, in_tile, found.windows.end() - int64_t((places[tile] % 2 ? 1 : 2) * in_tile));
    }
    return found;
  }

  // Compute the sums over a group of tiles.
  void add(int64_t row_group, int64_t channel_group, float* sums) const {
    const Tiles& tiles = pixels_.tiles;
    const Range channels =
        Range::of(channel_group, channels_at_once_, work_.channels);
    const Range group = Range::of(row_group, rows_per_group_, tiles.rows());
    const int64_t most = rows_at_once_ * tiles.columns(), pitch = pixels_.slots(rows_at_once_);
    const int64_t of_pixels = distance_of(channels.size() * pitch);
    const int64_t of_gradients = distance_of(most * width_);
    const Buffer pixels(elements_ * of_pixels), gradients(elements_ * of_gradients);
    const Buffer dy((tiles.windows() * most + 1) * width_);
    std::vector<int64_t> rows;
    for (int64_t channel = 0; channel < channels.size(); ++channel) rows.push_back(channel * pitch);
    functions_.pad(rows, width_);
    const int64_t size = tiles.windows_of_rows * tiles.windows_of_columns;
    for (int64_t row = group.first; row < group.end; row += rows_at_once_) {
      const Range now{row, std::min(row + rows_at_once_, group.end)};
      pixels_.transform(
          work_.has_pairs ? Pairs::OF_TILES : Pairs::NONE, now, channels, pixels.data(), pitch, of_pixels);
      const Windows windows(tiles, now, work_.filters);
      const Steps of_tiles = steps_of(now, windows);
      const int64_t steps = int64_t(of_tiles.steps.size());
      const int64_t count = int64_t(windows.places.size());
      std::memset(dy.data() + count * width_, 0, size_t(width_) * sizeof(float));
      for (int64_t block = 0; block < blocks_; ++block) {
        functions_.pack(
            work_.dy + block * width_ * size, work_.dy + work_.images * work_.filters * size,
            windows.places.data(), count, size, std::min(width_, work_.filters - block * width_),
            width_, dy.data());
        const auto transform = work_.has_pairs ? pixels_.transforms.gradient_pairs : pixels_.transforms.gradients;
        transform(
            dy.data(), of_tiles.windows.data(), work_.has_pairs ? 2 * steps : steps, width_,
            gradients.data(), of_gradients);
        for (int64_t k = 0; k < elements_; ++k) {
          functions_.add_products(
              pixels.data() + k * of_pixels, rows, of_tiles.steps.data(), steps,
              gradients.data() + k * of_gradients, width_, row == group.first,
              sums + (block * elements_ + k) * distance_);
        }
      }
    }
  }

  // Write the gradient of a block of filters; `sums` are those of the first group of tiles.
  void write(int64_t block, int64_t channel_group, float* sums) const {
    const Range channels = Range::of(channel_group, channels_at_once_, work_.channels);
    sums += block * elements_ * distance_;
    for (int64_t rows = 1; rows < row_groups_; ++rows) {
      const float* more = sums + rows * channel_groups_ * sums_of_task();
      for (int64_t i = 0; i < elements_ * distance_; ++i) sums[i] += more[i];
    }
    const Buffer taps((channels.size() * taps_ + functions_.lanes) * width_);
    pixels_.transforms.filter_sums(sums, distance_, channels.size(), width_, taps.data());
    std::vector<int64_t> places;
    for (int64_t i = channels.first * taps_; i < channels.end * taps_; ++i) places.push_back(i);
    const int64_t pitch = work_.channels * taps_, first = block * width_;
    functions_.unpack(
        taps.data(), places.data(), int64_t(places.size()), nullptr,
        std::min(width_, work_.filters - first), width_, pitch, work_.result + first * pitch);
  }
};

}  // namespace

bool has_winograd(const Axes& axes) {
  const InstructionSet instructions = instruction_set();
  if (instructions == InstructionSet::NONE || !transforms_of(instructions, axes)) return false;
  return std::all_of(axes.begin(), axes.end(), [](const Axis& axis) {
    return axis.stride == 1 && axis.dilation == 1 && axis.pad < axis.kernel;
  });
}

std::unique_ptr<Algorithm> winograd(const Work& work, Direction direction) {
  if (direction == Direction::WEIGHTS) return std::make_unique<Filters>(work);
  return std::make_unique<Images>(work, direction == Direction::TRANSPOSED);
}

}  // namespace dense

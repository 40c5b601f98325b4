#include "announcements.h"

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <utility>

namespace announcements {
namespace {

struct Board {
  const std::vector<Places> expected;
  std::vector<bool> made;
  bool given_up = false;
  std::mutex lock;
  std::condition_variable changed;

  explicit Board(std::vector<Places> places) : expected(std::move(places)), made(expected.size()) {}
};

std::mutex lock_of_boards;
std::map<int64_t, std::shared_ptr<Board>> boards;

std::shared_ptr<Board> find(int64_t key) {
  const std::lock_guard<std::mutex> guard(lock_of_boards);
  const auto found = boards.find(key);
  return found == boards.end() ? nullptr : found->second;
}

bool has(const std::shared_ptr<Board>& board, int64_t number) {
  return board && number >= 0 && number < int64_t(board->made.size());
}

}  // namespace

int64_t open(std::vector<Places> expected) {
  // A file that somebody wrote cannot contain the key.
  std::random_device random;
  const auto board = std::make_shared<Board>(std::move(expected));
  const std::lock_guard<std::mutex> guard(lock_of_boards);
  for (;;) {
    const int64_t key = int64_t((uint64_t(random()) << 32 | random()) >> 1);
    if (boards.emplace(key, board).second) return key;
  }
}

void close(int64_t key) {
  const std::lock_guard<std::mutex> guard(lock_of_boards);
  boards.erase(key);
}

void clear(int64_t key) {
  const auto board = find(key);
  if (!board) return;
  const std::lock_guard<std::mutex> guard(board->lock);
  board->made.assign(board->made.size(), false);
  board->given_up = false;
}

bool make(int64_t key, int64_t number, const Places& places) {
  const auto board = find(key);
  if (!has(board, number)) return false;
  {
    const std::lock_guard<std::mutex> guard(board->lock);
    if (places == board->expected[size_t(number)]) {
      board->made[size_t(number)] = true;
    } else {
      board->given_up = true;
    }
  }
  board->changed.notify_all();
  return true;
}

bool wait(int64_t key, int64_t number) {
  const auto board = find(key);
  if (!has(board, number)) return false;
  std::unique_lock<std::mutex> guard(board->lock);
  board->changed.wait(guard, [&] { return board->made[size_t(number)] || board->given_up; });
  return board->made[size_t(number)];
}

void give_up(int64_t key) {
  const auto board = find(key);
  if (!board) return;
  {
    const std::lock_guard<std::mutex> guard(board->lock);
    board->given_up = true;
  }
  board->changed.notify_all();
}

}  // namespace announcements

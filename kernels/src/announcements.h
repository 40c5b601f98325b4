// Boards on which the run of a graph announces that some of its outputs are complete, so that another
// thread can work with them while the run goes on.
#pragma once

#include <cstdint>
#include <vector>

namespace announcements {

using Places = std::vector<const void*>;  // the addresses of an announcement's outputs

// Return the key of a new board. It has one announcement for each element of `expected`: the places
// where the waiting thread finds its outputs.
int64_t open(std::vector<Places> expected);

// Delete a board. No thread waits at it any more.
void close(int64_t key);

// Take all announcements back, before the next run.
void clear(int64_t key);

// Announce outputs. False if the board does not exist, or has no such number. If the outputs are not
// where the board expects them, the run is given up: they may be there only when it has ended.
bool make(int64_t key, int64_t number, const Places& places);

// Wait for an announcement. False if the run was given up before it.
bool wait(int64_t key, int64_t number);

// Let the threads that wait go on: the missing announcements will not be made.
void give_up(int64_t key);

}  // namespace announcements

// Boards on which the run of a graph announces that it has come to a point, so that another thread can
// work with what the run has computed, while it goes on.
#pragma once

#include <cstdint>

namespace announcements {

// Return the key of a new board for announcements 0 to count - 1.
int64_t open(int64_t count);

// Delete a board. No thread waits at it any more.
void close(int64_t key);

// Take all announcements back, before the next run.
void clear(int64_t key);

// Announce `number`. False if the board does not exist, or has no such number.
bool make(int64_t key, int64_t number);

// Wait for an announcement. False if the run was given up before it.
bool wait(int64_t key, int64_t number);

// Let the threads that wait go on: the missing announcements will not be made.
void give_up(int64_t key);

}  // namespace announcements

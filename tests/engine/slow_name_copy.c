// SPDX-License-Identifier: Apache-2.0
// Preloaded, it makes a race in torch's gloo backend likely: a thread that copies the name "ALLREDUCE" pauses first.
// Nothing that a program computes changes.
#include <stddef.h>
#include <unistd.h>

static const char NAME[] = "ALLREDUCE";
enum { LENGTH = sizeof NAME - 1, PAUSE_US = 30 };

void *memcpy(void *restrict to, const void *restrict from, size_t count) {
    char *target = to;
    const char *source = from;
    size_t same = 0;
    if (count == LENGTH)
        while (same < LENGTH && source[same] == NAME[same]) same++;
    if (same == LENGTH) usleep(PAUSE_US);
    while (count--) *target++ = *source++;
    return to;
}

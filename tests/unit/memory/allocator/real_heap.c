/* Lets the real malloc do a sequence of events and prints where its heap began and what was resident after each.

   real_heap EVENTS [OPTION VALUE]...     events are lines "id bytes": > 0 allocate, < 0 free, 0 malloc_trim(0);
                                          options are those of mallopt */
#include <fcntl.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 100000 };
static void *blocks[MOST];
static long ids[MOST], sizes[MOST], resident[MOST];

static long private_pages(int statm) {
    char text[256];
    long total, pages, shared;
    text[pread(statm, text, sizeof text - 1, 0)] = 0;
    sscanf(text, "%ld %ld %ld", &total, &pages, &shared);
    return pages - shared;
}

int main(int argc, char **argv) {
    int count = 0, statm = open("/proc/self/statm", O_RDONLY);
    FILE *file = fopen(argv[1], "r");
    while (fscanf(file, "%ld %ld", &ids[count], &sizes[count]) == 2) count++;
    for (int i = 2; i + 1 < argc; i += 2) mallopt(atoi(argv[i]), atol(argv[i + 1]));
    memset(resident, 1, sizeof resident);
    memset(blocks, 1, sizeof blocks);
    long start = (long)malloc(24) - 16 + 32, base = private_pages(statm);
    for (int i = 0; i < count; i++) {
        if (sizes[i] > 0) {
            if (posix_memalign(&blocks[ids[i]], 64, sizes[i])) return 1;
            memset(blocks[ids[i]], 1, sizes[i]);
        } else if (sizes[i] < 0) {
            free(blocks[ids[i]]);
        } else {
            malloc_trim(0);
        }
        resident[i] = (private_pages(statm) - base) * getpagesize();
    }
    printf("%ld", start);
    for (int i = 0; i < count; i++) printf(" %ld", resident[i]);
    return 0;
}

/* Preloaded into the programs of a throw-away fleet: shifts the real-time clock and slows writes down to the disk, by
   two numbers in a file that the drill maps too. Monotonic clocks are left alone, as in a real clock jump. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *control; /* nanoseconds the clock is ahead; microseconds that a sync takes longer */
static int (*real_clock)(clockid_t, struct timespec *);
static int (*real_fsync)(int);
static int (*real_fdatasync)(int);

__attribute__((constructor)) static void start(void) {
  const char *path = getenv("PENSTOCK_FAULT_FILE");
  int file = path ? open(path, O_RDONLY) : -1;
  if (file >= 0) {
    void *mapped = mmap(NULL, 16, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) control = mapped;
    close(file);
  }
}

static int64_t now(clockid_t id, struct timespec *at) {
  if (!real_clock) real_clock = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real_clock(id, at);
  if (failed || !control || (id != CLOCK_REALTIME && id != CLOCK_REALTIME_COARSE)) return failed;
  int64_t nanos = at->tv_sec * 1000000000LL + at->tv_nsec + control[0];
  at->tv_sec = nanos / 1000000000LL;
  at->tv_nsec = nanos % 1000000000LL;
  return 0;
}

int clock_gettime(clockid_t id, struct timespec *at) { return (int)now(id, at); }

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
  struct timespec precise;
  (void)zone;
  now(CLOCK_REALTIME, &precise);
  at->tv_sec = precise.tv_sec;
  at->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *at) {
  struct timespec precise;
  now(CLOCK_REALTIME, &precise);
  if (at) *at = precise.tv_sec;
  return precise.tv_sec;
}

static void slow(void) {
  if (control && control[1] > 0) usleep((useconds_t)control[1]);
}

int fsync(int file) {
  if (!real_fsync) real_fsync = dlsym(RTLD_NEXT, "fsync");
  slow();
  return real_fsync(file);
}

int fdatasync(int file) {
  if (!real_fdatasync) real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
  slow();
  return real_fdatasync(file);
}

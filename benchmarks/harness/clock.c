/* Preloaded into processes, it moves the wall clock of those whose command line has one of the words of CLOCK_OF,
   which has commas between them, by the seconds that the file CLOCK_FILE holds. Their monotonic clock stays. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int read_text(const char *path, char *text, int size) {
  int file = open(path, O_RDONLY | O_CLOEXEC), count = file < 0 ? 0 : read(file, text, size - 1);
  if (file >= 0) close(file);
  text[count > 0 ? count : 0] = 0;
  return count > 0 ? count : 0;
}

static int is_meant(void) {
  static int known = -1;
  char line[2048], words[1024] = "", *rest = words, *word;
  if (known >= 0) return known;
  for (int at = read_text("/proc/self/cmdline", line, sizeof line) - 1; at-- > 0;)
    if (!line[at]) line[at] = ' ';
  if (getenv("CLOCK_OF")) strncpy(words, getenv("CLOCK_OF"), sizeof words - 1);
  for (known = 0; (word = strsep(&rest, ","));) known |= *word && strstr(line, word);
  return known;
}

static long offset(int (*clock)(clockid_t, struct timespec *)) {
  static __thread long looked = -1, seconds;
  struct timespec now;
  char text[64];
  const char *path = getenv("CLOCK_FILE");
  if (!path || !is_meant()) return 0;
  clock(CLOCK_MONOTONIC, &now);
  long tick = now.tv_sec * 10 + now.tv_nsec / 100000000;
  if (tick != looked) {
    looked = tick;
    if (read_text(path, text, sizeof text)) seconds = atol(text);
  }
  return seconds;
}

int clock_gettime(clockid_t id, struct timespec *time) {
  static int (*own)(clockid_t, struct timespec *);
  if (!own) own = dlsym(RTLD_NEXT, "clock_gettime");
  int status = own(id, time);
  if (id == CLOCK_REALTIME) time->tv_sec += offset(own);
  return status;
}

int gettimeofday(struct timeval *time, void *zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  time->tv_sec = now.tv_sec;
  time->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *given) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (given) *given = now.tv_sec;
  return now.tv_sec;
}

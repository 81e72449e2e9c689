/* A stand-in for NVIDIA's libnvidia-ml.so.1, for machines without a GPU: eight of them.

   It reads commands from the file that NVML_COMMANDS names, one a line, each once and in order, while somebody waits
   for an event: "xid GPU CODE", "dbe GPU", "clock GPU", "lost GPU", "links GPU COUNT", which sets a counter of errors,
   "unload", after which the driver answers nothing until the next initialisation, and "fail CODE", after which all fails
   with that code until "mend". The last GPU knows neither fields nor events but Xids. Signatures and numbers are those
   of nvml.h. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GPUS 8
enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, TIMEOUT = 10, LOST = 15 };
enum { DOUBLE_BIT = 2, XID = 8, CLOCK = 16 };

typedef struct { int index, lost, watched, replays; } Gpu;
typedef struct { Gpu *device; unsigned long long type, data; unsigned instance, compute; } Event;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned char cluster[16]; unsigned status, clique, state; } Fabric;
typedef struct {
  unsigned id, scope;
  long long at, latency;
  int type, result;
  union { unsigned small; unsigned long long large; } value;
} Field;

static Gpu gpus[GPUS];
static int up, failing;
static long at;

static int words(char *word, int *first, int *second) {
  FILE *file = fopen(getenv("NVML_COMMANDS"), "r");
  int found = 0;
  if (!file) return 0;
  fseek(file, at, SEEK_SET);
  char line[80];
  if (fgets(line, sizeof line, file) && strchr(line, '\n')) {
    found = sscanf(line, "%15s %d %d", word, first, second);
    at = ftell(file);
  }
  fclose(file);
  return found;
}

int nvmlInitWithFlags(unsigned flags) {
  char word[16] = "";
  int first, second;
  if (failing && (words(word, &first, &second) < 1 || strcmp(word, "mend"))) return failing;
  failing = 0;
  for (int i = 0; i < GPUS; i++) gpus[i].index = i;
  up = 1;
  return OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
static int answers(void) { return failing ? failing : up ? OK : UNINITIALIZED; }
int nvmlShutdown(void) { return answers(); }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "an error of the stand-in"; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = GPUS, answers(); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **found) {
  if (index >= GPUS) return INVALID;
  return *found = &gpus[index], OK;
}
int nvmlDeviceGetIndex(Gpu *gpu, unsigned *index) { return *index = gpu->index, OK; }
int nvmlDeviceGetUUID(Gpu *gpu, char *uuid, unsigned length) {
  snprintf(uuid, length, "GPU-0000000%d-0000-0000-0000-000000000000", gpu->index);
  return OK;
}
int nvmlDeviceGetGpuFabricInfo(Gpu *gpu, Fabric *found) {
  *found = (Fabric){.cluster = {1, 2, 3}, .status = OK, .clique = 5, .state = 3};
  return OK;
}
int nvmlDeviceGetPciInfo_v3(Gpu *gpu, Pci *pci) {
  memset(pci, 0, sizeof *pci);
  snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", 0x1b + 16 * gpu->index);
  return OK;
}

static int there(Gpu *gpu) { return answers() ? answers() : gpu->lost ? LOST : OK; }

int nvmlDeviceGetTemperature(Gpu *gpu, int sensor, unsigned *found) { return *found = 40 + gpu->index, there(gpu); }
int nvmlDeviceGetPowerUsage(Gpu *gpu, unsigned *found) { return *found = 350500, there(gpu); }
int nvmlDeviceGetMemoryInfo(Gpu *gpu, Memory *found) {
  *found = (Memory){80ull << 30, 60ull << 30, 20ull << 30};
  return there(gpu);
}
int nvmlDeviceGetTotalEccErrors(Gpu *gpu, int kind, int counter, unsigned long long *found) {
  return *found = kind ? 1 : 7, there(gpu);
}
int nvmlDeviceGetRemappedRows(Gpu *gpu, unsigned *corrected, unsigned *rows, unsigned *pending, unsigned *failed) {
  return *corrected = 0, *rows = 2, *pending = 1, *failed = 0, there(gpu);
}
int nvmlDeviceGetPcieReplayCounter(Gpu *gpu, unsigned *found) { return NOT_SUPPORTED; }
int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *gpu, unsigned long long *found) { return *found = 4, there(gpu); }

int nvmlDeviceGetFieldValues(Gpu *gpu, int count, Field *fields) {
  if (gpu->index == GPUS - 1) return NOT_SUPPORTED;
  for (Field *field = fields; field < fields + count; field++) {
    int retired = field->id == 29 || field->id == 30;
    field->result = gpu->index == 6 && retired ? NOT_SUPPORTED : OK;
    field->type = retired ? 1 : 3;
    if (retired) field->value.small = field->id - 26; /* 3 of a single bit, 4 of two */
    else field->value.large = field->id == 52 ? gpu->replays : field->id == 59 ? ~0ull : 5; /* 59: not known */
  }
  return there(gpu);
}

int nvmlEventSetCreate(void **set) { return *set = &at, answers(); }
int nvmlEventSetFree(void *set) { return OK; }
int nvmlDeviceGetSupportedEventTypes(Gpu *gpu, unsigned long long *types) {
  return *types = gpu->index == GPUS - 1 ? XID : XID | DOUBLE_BIT | CLOCK, OK;
}
int nvmlDeviceRegisterEvents(Gpu *gpu, unsigned long long types, void *set) { return gpu->watched = types, OK; }

static int command(Event *event) {
  char word[16] = "";
  int gpu = 0, code = 0;
  if (words(word, &gpu, &code) < 1) return TIMEOUT;
  memset(event, 0, sizeof *event);
  if (!strcmp(word, "unload")) return up = 0, UNINITIALIZED;
  if (!strcmp(word, "fail")) return failing = gpu;
  event->device = &gpus[gpu];
  if (!strcmp(word, "lost")) return gpus[gpu].lost = 1, LOST;
  if (!strcmp(word, "links")) return gpus[gpu].replays = code, TIMEOUT;
  event->type = !strcmp(word, "xid") ? XID : !strcmp(word, "clock") ? CLOCK : DOUBLE_BIT;
  event->data = code;
  return gpus[gpu].watched & event->type ? OK : TIMEOUT;
}

int nvmlEventSetWait_v2(void *set, Event *event, unsigned timeout_ms) {
  for (unsigned waited = 0; !answers() && waited <= timeout_ms; waited += 5) {
    int found = command(event);
    if (found != TIMEOUT) return found;
    for (int i = 0; i < GPUS; i++)
      if (gpus[i].lost) return LOST;
    usleep(5000);
  }
  return answers() ? answers() : TIMEOUT;
}

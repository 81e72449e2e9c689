/* A stand-in for NVIDIA's libnvidia-ml.so.1, for machines without a GPU: eight of them.

   It reads commands from the file that NVML_COMMANDS names, one a line, each once and in order, while somebody waits
   for an event: "xid GPU CODE", "dbe GPU", "lost GPU", and "unload", after which the driver answers nothing until the
   next initialisation. Signatures and numbers are those of nvml.h. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GPUS 8
enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, TIMEOUT = 10, LOST = 15 };
enum { DOUBLE_BIT = 2, XID = 8 };

typedef struct { int index, lost, watched; } Gpu;
typedef struct { Gpu *device; unsigned long long type, data; unsigned instance, compute; } Event;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned long long total, free, used; } Memory;

static Gpu gpus[GPUS];
static int up;
static long at;

int nvmlInitWithFlags(unsigned flags) {
  for (int i = 0; i < GPUS; i++) gpus[i].index = i;
  up = 1;
  return OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return up ? OK : UNINITIALIZED; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "an error of the stand-in"; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = GPUS, up ? OK : UNINITIALIZED; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **found) {
  if (index >= GPUS) return INVALID;
  return *found = &gpus[index], OK;
}
int nvmlDeviceGetIndex(Gpu *gpu, unsigned *index) { return *index = gpu->index, OK; }
int nvmlDeviceGetUUID(Gpu *gpu, char *uuid, unsigned length) {
  snprintf(uuid, length, "GPU-0000000%d-0000-0000-0000-000000000000", gpu->index);
  return OK;
}
int nvmlDeviceGetPciInfo_v3(Gpu *gpu, Pci *pci) {
  memset(pci, 0, sizeof *pci);
  snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", 0x1b + 16 * gpu->index);
  return OK;
}

static int there(Gpu *gpu) { return !up ? UNINITIALIZED : gpu->lost ? LOST : OK; }

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

int nvmlEventSetCreate(void **set) { return *set = &at, up ? OK : UNINITIALIZED; }
int nvmlEventSetFree(void *set) { return OK; }
int nvmlDeviceGetSupportedEventTypes(Gpu *gpu, unsigned long long *types) {
  return *types = gpu->index == GPUS - 1 ? XID : XID | DOUBLE_BIT, OK;
}
int nvmlDeviceRegisterEvents(Gpu *gpu, unsigned long long types, void *set) { return gpu->watched = types, OK; }

static int command(Event *event) {
  char word[16] = "";
  int gpu = 0, code = 0, found = 0;
  FILE *file = fopen(getenv("NVML_COMMANDS"), "r");
  if (!file) return TIMEOUT;
  fseek(file, at, SEEK_SET);
  char line[80];
  if (fgets(line, sizeof line, file) && strchr(line, '\n')) {
    found = sscanf(line, "%15s %d %d", word, &gpu, &code);
    at = ftell(file);
  }
  fclose(file);
  if (found < 1) return TIMEOUT;
  memset(event, 0, sizeof *event);
  event->device = &gpus[gpu];
  if (!strcmp(word, "unload")) return up = 0, UNINITIALIZED;
  if (!strcmp(word, "lost")) return gpus[gpu].lost = 1, LOST;
  event->type = strcmp(word, "xid") ? DOUBLE_BIT : XID;
  event->data = code;
  return gpus[gpu].watched & event->type ? OK : TIMEOUT;
}

int nvmlEventSetWait_v2(void *set, Event *event, unsigned timeout_ms) {
  for (unsigned waited = 0; up && waited <= timeout_ms; waited += 5) {
    int found = command(event);
    if (found != TIMEOUT) return found;
    for (int i = 0; i < GPUS; i++)
      if (gpus[i].lost) return LOST;
    usleep(5000);
  }
  return up ? TIMEOUT : UNINITIALIZED;
}

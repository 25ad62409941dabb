/* NVML for tests: three GPUs. GPU 1 has no temperature or power, and GPU 2 is lost.
   Types, codes and names are those of NVIDIA's nvml.h. */

#include <stdint.h>
#include <stdio.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, LOST = 15 };
static int gpus[3] = {0, 1, 2};

static int index_of(void *handle) { return *(int *)handle; }

int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = 3;
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  if (index > 2) return INVALID;
  *handle = &gpus[index];
  return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
  snprintf(text, size, "GPU-%c0000000-0000-0000-0000-000000000000", 'a' + index_of(handle));
  return SUCCESS;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
  snprintf(text, size, "NVIDIA Test %d", index_of(handle));
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *handle, uint64_t *memory) { /* total, free, used */
  if (index_of(handle) == 2) return LOST;
  memory[0] = 80ull << 30;
  memory[1] = 60ull << 30;
  memory[2] = 20ull << 30;
  return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) { /* gpu, memory */
  rates[0] = 97;
  rates[1] = 50;
  return SUCCESS;
}

int nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *celsius) {
  if (sensor != 0) return INVALID;
  *celsius = 64;
  return index_of(handle) == 0 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
  *milliwatts = 412500;
  return index_of(handle) == 0 ? SUCCESS : NOT_SUPPORTED;
}

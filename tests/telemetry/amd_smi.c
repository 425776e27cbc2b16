// A stand-in for AMD's driver library, under the real amdsmi package: an MI300X, an MI250 and a card that is gone.
//
// Layouts and codes are those of amdsmi.h 7.0.2. What the real one refuses is refused: calls before amdsmi_init,
// handles that it did not give out, sensors that a card does not have. Values that a card lacks are all ones.
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, INVAL = 1, NOT_SUPPORTED = 2, NOT_INIT = 32, HOTSPOT = 1 };

typedef struct { uint32_t gfx, umc, mm, reserved[13]; } activity_t;
typedef struct {
  uint64_t socket; uint32_t current, average; uint64_t gfx_mv, soc_mv, mem_mv; uint32_t limit, padding;
  uint64_t reserved[18];
} power_t;
typedef struct { uint32_t total, used, reserved[2]; } vram_t;
typedef struct {
  char name[256]; uint32_t vendor; char vendor_name[256]; uint32_t subvendor; uint64_t device; uint32_t revision;
  char serial[256]; uint32_t oam, units, padding; uint64_t target; uint32_t subsystem, reserved[21];
} asic_t;

static int started = 0, socket_of_all;
static char cards[3];
static uint64_t count = 0;

static int card(void *handle) {
  for (int n = 0; n < 3; n++)
    if (handle == &cards[n]) return n;
  return -1;
}
#define CARD(handle) \
  if (!started) return NOT_INIT; \
  int n = card(handle); \
  if (n < 0) return INVAL;

int amdsmi_init(uint64_t flags) { started = flags == 2; return started ? SUCCESS : INVAL; }

int amdsmi_get_socket_handles(uint32_t *number, void **handles) {
  if (!started) return NOT_INIT;
  if (handles) handles[0] = &socket_of_all;
  *number = 1;
  return SUCCESS;
}

int amdsmi_get_processor_handles(void *socket, uint32_t *number, void **handles) {
  if (!started) return NOT_INIT;
  if (socket != &socket_of_all) return INVAL;
  for (int n = 0; handles && n < 3; n++) handles[n] = &cards[n];
  *number = 3;
  return SUCCESS;
}

int amdsmi_get_gpu_asic_info(void *handle, asic_t *info) {
  CARD(handle)
  memset(info, 0, sizeof *info);
  strcpy(info->name, n ? "AMD Instinct MI250" : "AMD Instinct MI300X");
  strcpy(info->serial, n ? n == 1 ? "0x00000000000000BB" : "" : "0x00000000000000AA");
  info->target = n ? 0x90a : 0x942;
  return SUCCESS;
}

int amdsmi_get_gpu_activity(void *handle, activity_t *info) {
  CARD(handle)
  if (n == 2) return NOT_SUPPORTED;
  *info = (activity_t){100, n ? 0xFFFFFFFF : 13, 0xFFFF, {0}};
  return SUCCESS;
}

int amdsmi_get_power_info(void *handle, power_t *info) {
  CARD(handle)
  if (n == 2) return NOT_SUPPORTED;
  memset(info, 0xFF, sizeof *info);
  info->average = 0xFFFF;
  if (n) info->average = 320; else info->current = 394;
  return SUCCESS;
}

int amdsmi_get_energy_count(void *handle, uint64_t *accumulator, float *resolution, uint64_t *timestamp) {
  CARD(handle)
  if (n) return NOT_SUPPORTED;
  *accumulator = count += 1000000;
  *resolution = 15.25f;
  *timestamp = count;
  return SUCCESS;
}

int amdsmi_get_temp_metric(void *handle, int sensor, int metric, int64_t *value) {
  CARD(handle)
  if (n == 2 || sensor != HOTSPOT || metric != 0) return NOT_SUPPORTED;
  *value = n ? 38 : 41;
  return SUCCESS;
}

int amdsmi_get_gpu_vram_usage(void *handle, vram_t *info) {
  CARD(handle)
  if (n == 2) return NOT_SUPPORTED;
  *info = (vram_t){196592, 2048, {0}};
  return SUCCESS;
}

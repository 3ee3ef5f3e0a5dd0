/* backend_cpu.c - the CPU table, and the choice of the level it runs on. */
#include "kernels/cpu/cpu_internal.h"

#include "base/env.h"
#include "base/log.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

static bool processor_has_amx(void)
{
    const unsigned bf16 = 1u << 22, tile = 1u << 24;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & bf16) && (d & tile);
}

/* Linux saves tile registers only for a process that asked, all of its threads then. Kernels and
 * sandboxes that do not know them refuse. */
static bool system_grants_amx(void)
{
    const long request_permission = 0x1023, tile_data = 18;
    const unsigned tiles = 3u << 17;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & tiles) == tiles && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

static bool machine_has(const char *name)
{
    if (strcmp(name, "generic") == 0)
        return true;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    if (strcmp(name, "avx2") == 0)
        return avx2;
    if (strcmp(name, "avx512") == 0)
        return avx512;
    if (strcmp(name, "avx512bf16") == 0)
        return bf16;
    if (strcmp(name, "amx") == 0)
        return bf16 && processor_has_amx() && system_grants_amx();
#endif
    return false;
}

/* Best first. */
static const ith_cpu_level *const levels[] = {
#if defined(__x86_64__)
    &ith_cpu_level_amx,     &ith_cpu_level_avx512bf16, &ith_cpu_level_avx512, &ith_cpu_level_avx2,
#endif
    &ith_cpu_level_generic,
};
#define NUM_LEVELS ((int)(sizeof levels / sizeof *levels))

static pthread_once_t once = PTHREAD_ONCE_INIT;
static ith_backend table;            /* filled once */
static const ith_cpu_level *current; /* likewise, but for tests */
static bool use_reference;
static char level_text[64];

static void describe(void)
{
    const char *refused = "";
#if defined(__x86_64__)
    if (processor_has_amx() && !system_grants_amx())
        refused = " (the system does not grant AMX)";
#endif
    snprintf(level_text, sizeof level_text, "%s%s", use_reference ? "ref" : current->name, refused);
}

/* vdpbf16ps runs at twice the fused multiply-add rate on AMD (Zen 4: 226 against 116 GFLOP/s a
 * core) and at half of it on Intel (Sapphire Rapids: 86 against 174): there, bf16 is better widened
 * when packed. Decided by vendor, not by timing, so that runs repeat bit for bit. amx is taken when
 * asked for: see docs/cpu_backend.md. */
static bool is_worth(const char *name)
{
#if defined(__x86_64__)
    return strcmp(name, "amx") != 0 &&
           (strcmp(name, "avx512bf16") != 0 || !__builtin_cpu_is("intel"));
#else
    return name != NULL;
#endif
}

static const ith_cpu_level *best_level(void)
{
    for (int i = 0; i < NUM_LEVELS; i++)
        if (machine_has(levels[i]->name) && is_worth(levels[i]->name))
            return levels[i];
    return &ith_cpu_level_generic;
}

static void choose(void)
{
    const char *wanted = ith_env(ITH_ENV_CPU);
    current = best_level();
    if (wanted && strcmp(wanted, "best") != 0) {
        use_reference = strcmp(wanted, "ref") == 0;
        bool found = use_reference;
        for (int i = 0; i < NUM_LEVELS && !found; i++)
            if (strcmp(levels[i]->name, wanted) == 0 && machine_has(wanted)) {
                current = levels[i];
                found = true;
            }
        if (!found)
            ith_log(ITH_LOG_WARN, "kernels",
                    "ITH_CPU=%s is not a level of this machine (ref, generic, avx2, avx512, "
                    "avx512bf16, amx); using %s",
                    wanted, current->name);
    }
    describe();
    table = *ith_backend_ref();
    table.name = "cpu";
    if (use_reference)
        return;
    ith_cpu_fill_gemm(&table);
    ith_cpu_fill_attention(&table);
    ith_cpu_fill_rows(&table);
    ith_cpu_fill_gdn(&table);
}

const ith_backend *ith_backend_cpu(void)
{
    pthread_once(&once, choose);
    return &table;
}

const char *ith_backend_cpu_name(void)
{
    pthread_once(&once, choose);
    return level_text;
}

const ith_cpu_level *ith_cpu_level_get(void)
{
    pthread_once(&once, choose);
    return current;
}

bool ith_cpu_level_set(const char *name)
{
    pthread_once(&once, choose);
    if (!name) {
        current = best_level();
        return true;
    }
    for (int i = 0; i < NUM_LEVELS; i++)
        if (strcmp(levels[i]->name, name) == 0 && machine_has(name)) {
            current = levels[i];
            return true;
        }
    return false;
}

void ith_cpu_level_use(const ith_cpu_level *level)
{
    pthread_once(&once, choose);
    current = level;
}

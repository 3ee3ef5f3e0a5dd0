/* env.h - every environment variable the program reads, as one table (docs/env.md is generated from
 * it). */
#ifndef ITH_BASE_ENV_H
#define ITH_BASE_ENV_H

#include "base/status.h"

typedef enum {
    ITH_ENV_LOG,
    ITH_ENV_FAULT,
    ITH_ENV_THREADS,
    ITH_ENV_CPU,
    ITH_ENV_ALLOW_EXTRA_KEYS,
    ITH_ENV_NO_COLOR,
    ITH_ENV_CUDA_PLUGIN,
    ITH_ENV_MPI_PLUGIN,
    ITH_ENV_LINKS,
    ITH_ENV_MEETING_TIMEOUT,
    ITH_ENV_SHARE_GPU,
    ITH_ENV_COUNT
} ith_env_id;

typedef struct {
    const char *name, *default_text, *meaning;
} ith_env_row;

extern const ith_env_row ith_env_table[ITH_ENV_COUNT];

/* Value, or NULL when unset or empty. */
const char *ith_env(ith_env_id id);
/* true yes on t y 1, any case. */
bool ith_env_truthy(ith_env_id id);
/* Applies ITH_LOG and ITH_FAULT. */
ith_status ith_env_apply(ith_error *err);

#endif

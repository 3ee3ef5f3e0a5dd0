/* log.h - messages for people, filtered by subsystem.
 *
 * Nothing below src/cli/ prints. Messages go to a sink that src/cli/ installs (stderr, rank 0);
 * without one they vanish. ITH_LOG=comm:debug,data:info,warn sets levels per subsystem and the
 * default level. */
#ifndef ITH_BASE_LOG_H
#define ITH_BASE_LOG_H

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { ITH_LOG_DEBUG, ITH_LOG_INFO, ITH_LOG_WARN, ITH_LOG_ERROR } ith_log_level;
typedef void (*ith_log_sink)(ith_log_level level, const char *subsystem, const char *text,
                             void *arg);

void ith_log_set_sink(ith_log_sink sink, void *arg);
/* spec: comma list of LEVEL or SUBSYSTEM:LEVEL; NULL resets to info. */
ith_status ith_log_set_levels(const char *spec, ith_error *err);
bool ith_log_enabled(ith_log_level level, const char *subsystem);
void ith_log(ith_log_level level, const char *subsystem, const char *fmt, ...) ITH_PRINTF(3, 4);

#ifdef __cplusplus
}
#endif
#endif

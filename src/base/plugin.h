/* plugin.h - shared libraries opened at run time, so that one program serves machines with and
 * without their hardware. A missing plug-in, or one that lacks a library of its own, is one line
 * that says which file was looked for and what the loader answered. */
#ifndef ITH_BASE_PLUGIN_H
#define ITH_BASE_PLUGIN_H

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Opens `path` when it is not NULL; otherwise the first file called `name` that exists in: the
 * folder of the running program, ../lib/ithaca from there, /usr/local/lib/ithaca. */
ith_status ith_plugin_open(void **handle, const char *name, const char *path, ith_error *err);
void ith_plugin_close(void *handle);
/* Stores the address of a function of the plug-in in the function pointer at `function`. */
ith_status ith_plugin_symbol(void *handle, const char *symbol, void *function, ith_error *err);

#ifdef __cplusplus
}
#endif
#endif

/* plugin.c - finding and opening shared libraries at run time. */
#include "base/plugin.h"

#include "base/file.h"

#include <dlfcn.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) /* its reports name functions of libraries that are still there  \
                                   */
#define KEPT RTLD_NODELETE
#else
#define KEPT 0
#endif

/* Folder of the running program, without the last '/'. */
static void program_dir(char out[PATH_MAX])
{
    ssize_t n = readlink("/proc/self/exe", out, PATH_MAX - 1);
    out[n > 0 ? n : 0] = '\0';
    char *slash = strrchr(out, '/');
    if (slash)
        *slash = '\0';
}

/* Leaves in `path` the first place where the file is; in `tried` all places, for the error. */
static bool find(ith_buf *path, ith_buf *tried, const char *name)
{
    static const char *const places[] = {"", "/../lib/ithaca", "/usr/local/lib/ithaca"};
    char dir[PATH_MAX];
    program_dir(dir);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        bool absolute = places[i][0] == '/' && places[i][1] != '.';
        ith_buf_clear(path);
        ith_buf_printf(path, "%s%s/%s", absolute ? "" : dir, places[i], name);
        ith_buf_printf(tried, "%s%s", i ? ", " : "", path->data ? path->data : "");
        if (path->data && ith_path_exists(path->data))
            return true;
    }
    return false;
}

ith_status ith_plugin_open(void **handle, const char *name, const char *path, ith_error *err)
{
    ith_buf found = {0}, tried = {0};
    ith_status status = ITH_OK;
    if (!path && !find(&found, &tried, name)) {
        status = ith_fail(err, ITH_ERR_UNSUPPORTED, "plug-in %s is not here (looked for %s)", name,
                          tried.data ? tried.data : name);
        goto out;
    }
    const char *file = path ? path : found.data;
    void *opened = dlopen(file, RTLD_NOW | KEPT);
    if (!opened) {
        const char *why = dlerror();
        status = ith_fail(err, ITH_ERR_UNSUPPORTED, "plug-in %s: %s", file, why ? why : "refused");
        goto out;
    }
    *handle = opened;
out:
    ith_buf_deinit(&found);
    ith_buf_deinit(&tried);
    return status;
}

void ith_plugin_close(void *handle)
{
    if (handle)
        (void)dlclose(handle);
}

ith_status ith_plugin_symbol(void *handle, const char *symbol, void *function, ith_error *err)
{
    void *address = dlsym(handle, symbol);
    if (!address)
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "the plug-in has no function %s", symbol);
    memcpy(function, &address, sizeof address);
    return ITH_OK;
}

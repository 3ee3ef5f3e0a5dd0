/* cuda_libs.c - finding cuBLASLt, cuDNN and NCCL at run time. */
#include "kernels/cuda/cuda_libs.h"

#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const char *file;
    bool required;
} library;

/* In the order of opening: cuDNN compiles attention with NVRTC and finds it already loaded. */
static const library libraries[] = {
    {"libnvrtc.so.13", false},
    {"libcublasLt.so.13", true},
    {"libcudnn.so.9", true},
};
enum { NUM_LIBRARIES = sizeof libraries / sizeof *libraries };

/* Opens the file in the first folder matching `pattern`, which ends in '/'. */
static void *open_matching(const char *pattern, const char *file)
{
    ith_buf path = {0};
    glob_t found = {0};
    void *handle = NULL;
    ith_buf_printf(&path, "%s%s", pattern, file);
    if (path.data && glob(path.data, 0, NULL, &found) == 0)
        for (size_t i = 0; !handle && i < found.gl_pathc; i++)
            handle = dlopen(found.gl_pathv[i], RTLD_NOW | RTLD_GLOBAL);
    globfree(&found);
    ith_buf_deinit(&path);
    return handle;
}

static void *open_below(const char *prefix, int prefix_len, const char *file)
{
    ith_buf pattern = {0};
    ith_buf_printf(&pattern, "%.*s/lib/python3*/site-packages/nvidia/*/lib/", prefix_len, prefix);
    void *handle = pattern.data ? open_matching(pattern.data, file) : NULL;
    ith_buf_deinit(&pattern);
    return handle;
}

/* The environments of the Python programs on PATH: <prefix>/bin gives <prefix>. */
static void *open_from_path(const char *file)
{
    const char *path = getenv("PATH");
    void *handle = NULL;
    while (!handle && path && *path) {
        int len = (int)strcspn(path, ":");
        if (len > 4 && strncmp(path + len - 4, "/bin", 4) == 0)
            handle = open_below(path, len - 4, file);
        path += len + (path[len] == ':');
    }
    return handle;
}

static void *open_library(const char *file)
{
    static const char *const folders[] = {
        "/usr/local/cuda/lib64/",
        "/usr/local/cuda/lib/",
        "/usr/local/lib/python3*/*-packages/nvidia/*/lib/",
        "/usr/lib/python3*/*-packages/nvidia/*/lib/",
    };
    static const char *const prefixes[] = {"VIRTUAL_ENV", "CONDA_PREFIX"};
    void *handle = dlopen(file, RTLD_NOW | RTLD_GLOBAL);
    for (size_t i = 0; !handle && i < sizeof prefixes / sizeof *prefixes; i++) {
        const char *prefix = getenv(prefixes[i]);
        if (prefix && *prefix)
            handle = open_below(prefix, (int)strlen(prefix), file);
    }
    if (!handle)
        handle = open_from_path(file);
    for (size_t i = 0; !handle && i < sizeof folders / sizeof *folders; i++)
        handle = open_matching(folders[i], file);
    return handle;
}

static ith_status resolve(void *handle, const char *library_name, const char *name, void *function,
                          ith_error *err)
{
    void *address = dlsym(handle, name);
    if (!address)
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "%s has no function %s (too old?)", library_name,
                        name);
    memcpy(function, &address, sizeof address);
    return ITH_OK;
}

#define RESOLVE_LT(name) ITH_TRY(resolve(handles[1], libraries[1].file, #name, &libs.name, err));
#define RESOLVE_DNN(name) ITH_TRY(resolve(handles[2], libraries[2].file, #name, &libs.name, err));

ith_status ith_cuda_libs_open(const ith_cuda_libs **out, ith_error *err)
{
    static ith_cuda_libs opened;
    static bool done;
    if (!done) {
        void *handles[NUM_LIBRARIES] = {NULL};
        ith_cuda_libs libs = {0};
        for (int i = 0; i < NUM_LIBRARIES; i++) {
            handles[i] = open_library(libraries[i].file);
            if (!handles[i] && libraries[i].required)
                return ith_fail(err, ITH_ERR_UNSUPPORTED,
                                "%s is not here: put its folder in LD_LIBRARY_PATH, or install "
                                "nvidia-cublas and nvidia-cudnn-cu13 for the python3 on PATH",
                                libraries[i].file);
        }
        ITH_CUBLASLT_FUNCTIONS(RESOLVE_LT)
        ITH_CUDNN_FUNCTIONS(RESOLVE_DNN)
        opened = libs;
        done = true;
    }
    *out = &opened;
    return ITH_OK;
}

#define RESOLVE_NCCL(result, name, arguments)                                                      \
    ITH_TRY(resolve(handle, "libnccl.so.2", #name, &nccl.name, err));

ith_status ith_nccl_open(const ith_nccl **out, ith_error *err)
{
    static ith_nccl opened;
    static bool done;
    if (!done) {
        ith_nccl nccl = {0};
        void *handle = open_library("libnccl.so.2");
        if (!handle)
            return ith_fail(err, ITH_ERR_UNSUPPORTED,
                            "libnccl.so.2 is not here: put its folder in LD_LIBRARY_PATH, or "
                            "install nvidia-nccl-cu13 for the python3 on PATH (one GPU works "
                            "without it)");
        ITH_NCCL_FUNCTIONS(RESOLVE_NCCL)
        opened = nccl;
        done = true;
    }
    *out = &opened;
    return ITH_OK;
}

const char *ith_cuda_libs_file(void *function)
{
    Dl_info info = {0};
    return dladdr(function, &info) && info.dli_fname ? info.dli_fname : "?";
}

/* cmd_env.c - what this program is, what it runs on, what it loaded and from where. */
#include "cli/commands.h"

#include "base/env.h"
#include "base/file.h"
#include "base/json.h"
#include "image/image.h"
#include "kernels/backend.h"
#include "kernels/cuda_plugin.h"

#include <link.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>
#include <yaml.h>

#ifndef ITH_BUILD_TYPE
#define ITH_BUILD_TYPE "unknown"
#endif
#ifndef ITH_SANITIZE_TEXT
#define ITH_SANITIZE_TEXT ""
#endif

static void write_row(ith_buf *out, const char *label, const char *text)
{
    ith_buf_printf(out, "  %-14s %s\n", label, text);
}

static void write_program(ith_buf *out)
{
    ith_buf_puts(out, "program\n");
    write_row(out, "version", ITH_VERSION);
    write_row(out, "compiler",
#ifdef __clang__
              __VERSION__
#else
              "gcc " __VERSION__
#endif
    );
    write_row(out, "build", ITH_BUILD_TYPE);
    if (ITH_SANITIZE_TEXT[0])
        write_row(out, "sanitizer", ITH_SANITIZE_TEXT);
#ifdef ITH_DEBUG
    write_row(out, "checks", "debug (slow assertions, new memory filled with NaN)");
#endif
    write_row(out, "libyaml", yaml_get_version_string());
    write_row(out, "jansson", JANSSON_VERSION);
}

/* The text after "name : " in /proc/cpuinfo or /proc/meminfo, up to the end of the line. */
static bool proc_field(const char *text, const char *name, char *out, size_t size)
{
    for (const char *line = text; line && *line;) {
        size_t len = strcspn(line, "\n"), name_len = strlen(name);
        if (strncmp(line, name, name_len) == 0) {
            const char *value = line + name_len;
            value += strspn(value, " \t:");
            snprintf(out, size, "%.*s", (int)(line + len - value), value);
            return true;
        }
        line += len + (line[len] == '\n');
    }
    return false;
}

/* The words of `flags` that matter to our kernels. */
static void pick_features(const char *flags, char *out, size_t size)
{
    static const char *const names[] = {"avx2",     "fma",         "f16c",        "avx512f",
                                        "avx512bw", "avx512_vnni", "avx512_bf16", "amx_tile",
                                        "amx_bf16", "asimd",       "bf16",        "sve"};
    size_t used = 0;
    out[0] = '\0';
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (const char *p = flags; *p;) {
            size_t len = strcspn(p, " ");
            if (len == strlen(names[i]) && memcmp(p, names[i], len) == 0 && used + len + 2 < size) {
                used +=
                    (size_t)snprintf(out + used, size - used, "%s%s", used ? " " : "", names[i]);
                break;
            }
            p += len + (p[len] == ' ');
        }
    if (!used)
        snprintf(out, size, "none of those the fast kernels use");
}

static void write_cpu(ith_buf *out)
{
    ith_buf info = {0};
    char model[256] = "unknown", flags[8192] = "", features[512];
    struct utsname name;
    if (ith_read_file("/proc/cpuinfo", 0, &info, NULL) == ITH_OK) {
        proc_field(info.data, "model name", model, sizeof model);
        if (!proc_field(info.data, "flags", flags, sizeof flags))
            proc_field(info.data, "Features", flags, sizeof flags);
    }
    ith_buf_deinit(&info);
    pick_features(flags, features, sizeof features);
    ith_buf_puts(out, "machine\n");
    if (uname(&name) == 0)
        ith_buf_printf(out, "  %-14s %s %s %s\n", "system", name.sysname, name.release,
                       name.machine);
    write_row(out, "cpu", model);
    write_row(out, "cpu features", features);
    write_row(out, "cpu kernels", ith_backend_cpu_name());
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) == 0)
        ith_buf_printf(out, "  %-14s %d usable cores\n", "threads", CPU_COUNT(&cores));
}

static double proc_kib(const char *text, const char *name)
{
    char value[64];
    return proc_field(text, name, value, sizeof value) ? strtod(value, NULL) * 1024 : 0;
}

/* The smallest limit a container sets, 0 when none. */
static double container_limit(void)
{
    static const char *const paths[] = {"/sys/fs/cgroup/memory.max",
                                        "/sys/fs/cgroup/memory/memory.limit_in_bytes"};
    double limit = 0;
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        ith_buf text = {0};
        if (ith_read_file(paths[i], 0, &text, NULL) == ITH_OK) {
            double value = strtod(text.data, NULL); /* "max": 0 */
            if (value > 0 && value < 0x1p60 && (!(limit > 0) || value < limit))
                limit = value;
        }
        ith_buf_deinit(&text);
    }
    return limit;
}

static void write_memory(ith_buf *out)
{
    ith_buf info = {0};
    if (ith_read_file("/proc/meminfo", 0, &info, NULL) == ITH_OK)
        ith_buf_printf(out, "  %-14s %.1f GiB, %.1f GiB available\n", "memory",
                       proc_kib(info.data, "MemTotal") / 0x1p30,
                       proc_kib(info.data, "MemAvailable") / 0x1p30);
    ith_buf_deinit(&info);
    double limit = container_limit();
    if (limit > 0)
        ith_buf_printf(out, "  %-14s %.1f GiB\n", "memory limit", limit / 0x1p30);
}

/* Where PATH has a program. */
static bool find_program(const char *name, char *out, size_t size)
{
    const char *path = getenv("PATH");
    for (const char *p = path ? path : ""; *p;) {
        size_t len = strcspn(p, ":");
        snprintf(out, size, "%.*s/%s", (int)len, p, name);
        if (access(out, X_OK) == 0)
            return true;
        p += len + (p[len] == ':');
    }
    return false;
}

static void write_media(ith_buf *out)
{
    char ffmpeg[4096], ffprobe[4096];
    ith_buf_puts(out, "media\n");
    write_row(out, "pictures", ith_image_formats());
    bool both = find_program("ffmpeg", ffmpeg, sizeof ffmpeg) &&
                find_program("ffprobe", ffprobe, sizeof ffprobe);
    write_row(out, "videos", both ? ffmpeg : "ffmpeg and ffprobe are not in PATH");
}

static void write_cuda(ith_buf *out)
{
    ith_error err = {0};
    ith_buf text = {0};
    ith_buf_puts(out, "cuda\n");
    if (ith_cuda_env_text(&text, &err) == ITH_OK && text.len)
        ith_buf_append(out, text.data, text.len);
    else
        ith_buf_printf(out, "  not available: %s\n", err.text);
    ith_buf_deinit(&text);
}

static int add_library(struct dl_phdr_info *info, size_t size, void *arg)
{
    ith_buf *out = arg;
    (void)size;
    if (info->dlpi_name && info->dlpi_name[0] == '/')
        ith_buf_printf(out, "  %s\n", info->dlpi_name);
    return 0;
}

static void write_libraries(ith_buf *out)
{
    ith_buf_puts(out, "loaded libraries\n");
    dl_iterate_phdr(add_library, out);
}

static void write_variables(ith_buf *out)
{
    ith_buf_puts(out, "environment\n");
    for (int i = 0; i < ITH_ENV_COUNT; i++) {
        const char *value = ith_env((ith_env_id)i);
        ith_buf_printf(out, "  %s%s%s\n", ith_env_table[i].name, value ? "=" : " is not set",
                       value ? value : "");
    }
}

/* docs/env.md */
static void write_markdown(ith_buf *out)
{
    ith_buf_puts(out, "# Environment variables\n"
                      "\n"
                      "Generated by `ithaca env --markdown` from the table in `src/base/env.c`; do "
                      "not edit.\n"
                      "\n"
                      "| variable | default | meaning |\n"
                      "| --- | --- | --- |\n");
    for (int i = 0; i < ITH_ENV_COUNT; i++) {
        const ith_env_row *row = &ith_env_table[i];
        if (row->default_text[0])
            ith_buf_printf(out, "| `%s` | `%s` | %s |\n", row->name, row->default_text,
                           row->meaning);
        else
            ith_buf_printf(out, "| `%s` | unset | %s |\n", row->name, row->meaning);
    }
}

/* A new part of the program adds its section here. Libraries come after the sections that load
 * them. */
static void (*const sections[])(ith_buf *out) = {write_program,  write_cpu,  write_memory,
                                                 write_media,    write_cuda, write_libraries,
                                                 write_variables};

static ith_status run_env(const ith_args *args, ith_error *err)
{
    if (ith_args_flag(args, "markdown"))
        return ith_print_page(write_markdown, err);
    ith_buf text = {0};
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++)
        sections[i](&text);
    ith_status status = ith_print(&text, err);
    ith_buf_deinit(&text);
    return status;
}

static const ith_option env_options[] = {
    {.name = "markdown", .help = "Write docs/env.md, the table of environment variables, instead."},
    {0}};

const ith_command ith_cmd_env = {
    .name = "env",
    .arguments = "",
    .summary = "Show version, machine, loaded libraries and environment variables",
    .options = env_options,
    .run = run_env};

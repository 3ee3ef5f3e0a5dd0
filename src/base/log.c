/* log.c - level table and dispatch to the sink. */
#include "base/log.h"

#include <stdio.h>
#include <string.h>

#define MAX_RULES 16
#define NAME_BYTES 24

static struct {
    char name[NAME_BYTES];
    ith_log_level level;
} rules[MAX_RULES];
static int num_rules;
static ith_log_level default_level = ITH_LOG_INFO;
static ith_log_sink log_sink;
static void *sink_arg;

void ith_log_set_sink(ith_log_sink sink, void *arg)
{
    log_sink = sink;
    sink_arg = arg;
}

static bool parse_level(const char *text, size_t len, ith_log_level *out)
{
    static const char *const names[] = {"debug", "info", "warn", "error"};
    for (int i = 0; i < 4; i++)
        if (strlen(names[i]) == len && memcmp(names[i], text, len) == 0) {
            *out = (ith_log_level)i;
            return true;
        }
    return false;
}

ith_status ith_log_set_levels(const char *spec, ith_error *err)
{
    num_rules = 0;
    default_level = ITH_LOG_INFO;
    for (const char *p = spec; p && *p;) {
        size_t len = strcspn(p, ","), name_len = strcspn(p, ":,");
        ith_log_level level = ITH_LOG_INFO;
        bool named = name_len < len;
        const char *text = named ? p + name_len + 1 : p;
        if (!parse_level(text, named ? len - name_len - 1 : len, &level) ||
            name_len >= NAME_BYTES || num_rules == MAX_RULES)
            return ith_fail(
                err, ITH_ERR_USAGE,
                "ITH_LOG: '%.*s' is not LEVEL or SUBSYSTEM:LEVEL (debug, info, warn, error)",
                (int)len, p);
        if (named) {
            memcpy(rules[num_rules].name, p, name_len);
            rules[num_rules].name[name_len] = '\0';
            rules[num_rules++].level = level;
        } else {
            default_level = level;
        }
        p += len + (p[len] == ',');
    }
    return ITH_OK;
}

bool ith_log_enabled(ith_log_level level, const char *subsystem)
{
    for (int i = 0; i < num_rules; i++)
        if (strcmp(rules[i].name, subsystem) == 0)
            return level >= rules[i].level;
    return level >= default_level;
}

void ith_log(ith_log_level level, const char *subsystem, const char *fmt, ...)
{
    if (!log_sink || !ith_log_enabled(level, subsystem))
        return;
    char text[2048];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    log_sink(level, subsystem, text, sink_arg);
}

/* terminal.c - log sink, error lines, assertion hook. */
#include "cli/terminal.h"

#include "base/env.h"
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

bool ith_terminal_colours(int fd)
{
    const char *term = getenv("TERM");
    return isatty(fd) && !ith_env(ITH_ENV_NO_COLOR) && term && strcmp(term, "dumb") != 0;
}

int ith_terminal_columns(int fd, int when_unknown)
{
    struct winsize size;
    return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : when_unknown;
}

static void print_line(const char *colour, const char *label, const char *text, int len)
{
    bool colours = *colour && ith_terminal_colours(STDERR_FILENO);
    fprintf(stderr, "%s%s%s%.*s\n", colours ? colour : "", label, colours ? "\033[0m" : "", len,
            text);
}

static void sink(ith_log_level level, const char *subsystem, const char *text, void *arg)
{
    static const struct {
        const char *colour, *label;
    } levels[] = {[ITH_LOG_DEBUG] = {"\033[2m", "debug: "},
                  [ITH_LOG_INFO] = {"", ""},
                  [ITH_LOG_WARN] = {"\033[33m", "warning: "},
                  [ITH_LOG_ERROR] = {"\033[31m", "error: "}};
    (void)arg;
    char label[64];
    snprintf(label, sizeof label, "%s%s%s", levels[level].label,
             level == ITH_LOG_DEBUG ? subsystem : "", level == ITH_LOG_DEBUG ? ": " : "");
    fflush(stdout); /* keeps the order when both go to one place */
    print_line(levels[level].colour, label, text, (int)strlen(text));
}

void ith_terminal_error(const ith_error *err)
{
    fflush(stdout);
    for (const char *p = err->text;;) {
        int len = (int)strcspn(p, "\n");
        print_line("\033[31m", "error: ", p, len);
        if (p[len] == '\0')
            break;
        p += len + 1;
    }
}

/* A bug: say where, then end without running exit handlers. A debug build leaves a core. */
static void on_assert(const char *file, int line, const char *text)
{
    fprintf(stderr,
            "ithaca " ITH_VERSION ": internal error at %s:%d: %s does not hold (please report "
            "this)\n",
            file, line, text);
#ifdef ITH_DEBUG
    abort();
#else
    _exit(1);
#endif
}

void ith_terminal_init(void)
{
    ith_log_set_sink(sink, NULL);
    ith_set_assert_hook(on_assert);
}

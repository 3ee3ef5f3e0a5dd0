/* status.c - error chain and assertions. */
#include "base/status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef ith_fail
#undef ith_wrap

static ith_assert_hook assert_hook;

ith_status ith_fail(ith_error *err, ith_status status, const char *fmt, ...)
{
    if (err && err->status == ITH_OK) {
        va_list args;
        va_start(args, fmt);
        vsnprintf(err->text, sizeof err->text, fmt, args);
        va_end(args);
        err->status = status;
    }
    return status;
}

ith_status ith_wrap(ith_error *err, ith_status status, const char *fmt, ...)
{
    if (!err || status == ITH_OK)
        return status;
    char context[ITH_ERROR_TEXT_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(context, sizeof context, fmt, args);
    va_end(args);
    size_t context_len = strlen(context), text_len = strlen(err->text);
    if (context_len + 2 >= sizeof err->text)
        return status;
    size_t room = sizeof err->text - 1 - context_len - 2;
    if (text_len > room)
        text_len = room;
    memmove(err->text + context_len + 2, err->text, text_len);
    memcpy(err->text, context, context_len);
    memcpy(err->text + context_len, ": ", 2);
    err->text[context_len + 2 + text_len] = '\0';
    return status;
}

void ith_error_clear(ith_error *err)
{
    if (err) {
        err->status = ITH_OK;
        err->text[0] = '\0';
    }
}

int ith_exit_code(ith_status status)
{
    if (status == ITH_OK)
        return 0;
    return status == ITH_ERR_USAGE || status == ITH_ERR_UNSUPPORTED ? 2 : 1;
}

void ith_set_assert_hook(ith_assert_hook hook)
{
    assert_hook = hook;
}

void ith_assert_failed(const char *file, int line, const char *text)
{
    if (assert_hook)
        assert_hook(file, line, text);
    fprintf(stderr, "ithaca: internal error at %s:%d: %s does not hold (please report this)\n",
            file, line, text);
    abort();
}

/* status.h - how functions report failure.
 *
 * What can fail returns ith_status. The text of the first failure goes into an ith_error that the
 * caller owns (the last argument, or ith_ctx.err). Context is added on the way up, outermost first:
 *     model-00002.safetensors: model.norm.weight: shape [1024], expected [2048] (hidden_size)
 * Out-parameters are untouched on failure. Only src/cli/ prints errors and exits. */
#ifndef ITH_BASE_STATUS_H
#define ITH_BASE_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    ITH_OK = 0,
    ITH_ERR_USAGE,       /* the request is wrong: option, key, value; exit code 2 */
    ITH_ERR_IO,          /* open, read, write, sync, rename failed */
    ITH_ERR_FORMAT,      /* foreign bytes are not what they claim to be */
    ITH_ERR_MEMORY,      /* an allocation failed or a stated limit was reached */
    ITH_ERR_UNSUPPORTED, /* valid request, not built yet or not possible here; exit code 2 */
    ITH_ERR_RUN,         /* the run itself failed: non-finite values, a lost rank */
    ITH_ERR_INTERRUPTED  /* stopped by a signal after saving */
} ith_status;

#define ITH_ERROR_TEXT_BYTES 2048

typedef struct {
    ith_status status;
    char text[ITH_ERROR_TEXT_BYTES]; /* one line, NUL-terminated */
} ith_error;

#if defined(__GNUC__)
#define ITH_PRINTF(fmt_idx, arg_idx) __attribute__((format(printf, fmt_idx, arg_idx)))
#else
#define ITH_PRINTF(fmt_idx, arg_idx)
#endif

/* Records a failure (err may be NULL) unless err already holds one; returns status. */
ith_status ith_fail(ith_error *err, ith_status status, const char *fmt, ...) ITH_PRINTF(3, 4);
/* Puts "context: " before the text of a recorded failure; returns its argument `status`. */
ith_status ith_wrap(ith_error *err, ith_status status, const char *fmt, ...) ITH_PRINTF(3, 4);
#ifdef __clang_analyzer__ /* which sees one file at a time */
#define ith_fail(err, status, ...) (ith_fail(err, status, __VA_ARGS__), (status))
#define ith_wrap(err, status, ...) (ith_wrap(err, status, __VA_ARGS__), (status))
#endif
void ith_error_clear(ith_error *err);
/* Process exit code of a status: 0, 1 (the run failed) or 2 (the request was wrong). */
int ith_exit_code(ith_status status);

/* Forwards a failure. */
#define ITH_TRY(call)                                                                              \
    do {                                                                                           \
        ith_status ith_try_status_ = (call);                                                       \
        if (ith_try_status_ != ITH_OK)                                                             \
            return ith_try_status_;                                                                \
    } while (0)

/* Forwards a failure to a cleanup label; `status` must be a local of type ith_status. */
#define ITH_TRY_OUT(call)                                                                          \
    do {                                                                                           \
        status = (call);                                                                           \
        if (status != ITH_OK)                                                                      \
            goto out;                                                                              \
    } while (0)

/* Forwards a failure with one more segment of context. */
#define ITH_WRAP(call, err, ...)                                                                   \
    do {                                                                                           \
        ith_status ith_wrap_status_ = (call);                                                      \
        if (ith_wrap_status_ != ITH_OK)                                                            \
            return ith_wrap((err), ith_wrap_status_, __VA_ARGS__);                                 \
    } while (0)

/* Assertions state what only a bug can break; they stay on in release builds. The hook (installed
 * by src/cli/) prints rank, place and values, then ends the job; the default writes one line and
 * aborts. */
typedef void (*ith_assert_hook)(const char *file, int line, const char *text);
void ith_set_assert_hook(ith_assert_hook hook);
#if defined(__GNUC__)
__attribute__((noreturn))
#endif
void ith_assert_failed(const char *file, int line, const char *text);

#define ITH_ASSERT(cond)                                                                           \
    do {                                                                                           \
        if (!(cond))                                                                               \
            ith_assert_failed(__FILE__, __LINE__, #cond);                                          \
    } while (0)

#ifdef ITH_DEBUG
#define ITH_ASSERT_SLOW(cond) ITH_ASSERT(cond)
#else
#define ITH_ASSERT_SLOW(cond)                                                                      \
    do {                                                                                           \
    } while (0)
#endif

#ifdef __cplusplus
}
#endif
#endif

/* testing.h - what every test includes: cmocka in its required order, and small helpers. */
#ifndef ITH_TESTS_TESTING_H
#define ITH_TESTS_TESTING_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/status.h"

/* The call succeeds; otherwise its error text is shown. `err` is an ith_error lvalue. */
#define assert_ok(call, err)                                                                       \
    do {                                                                                           \
        ith_error_clear(&(err));                                                                   \
        if ((call) != ITH_OK)                                                                      \
            fail_msg("%s: %s", #call, (err).text);                                                 \
    } while (0)

/* The call fails with this status, and its text contains `part`. */
#define assert_fails(call, err, wanted, part)                                                      \
    do {                                                                                           \
        ith_error_clear(&(err));                                                                   \
        ith_status got_ = (call);                                                                  \
        if (got_ != (wanted) || !strstr((err).text, (part)))                                       \
            fail_msg("%s: status %d, text '%s'; expected status %d and '%s'", #call, (int)got_,    \
                     (err).text, (int)(wanted), (part));                                           \
    } while (0)

/* Path below the reference data beside the checkout, or skips the test with a reason where it is
 * absent. */
static inline const char *shared_path(const char *name)
{
    static char path[4096];
    snprintf(path, sizeof path, "%s/%s", ITH_SHARED_DIR, name);
    if (access(path, R_OK) != 0) {
        print_message("[   SKIP   ] %s is not here\n", path);
        skip();
    }
    return path;
}

/* A fresh empty directory below the build folder; removed and made anew on each call with the same
 * name. */
static inline const char *temp_dir(const char *name)
{
    static char path[4096];
    snprintf(path, sizeof path, "test-tmp/%s-%ld", name, (long)getpid());
    ith_error err = {0};
    assert_ok(ith_remove_tree(path, &err), err);
    assert_ok(ith_make_dirs(path, &err), err);
    return path;
}

/* "NAME.tmp-PLACE-PID" (file.h) of a process of this place that is no more, or of one that lives.
 */
static inline const char *named_by(const char *name, bool lives)
{
    static char text[256];
    char tag[ITH_TMP_TAG_BYTES];
    long pid = 1;
    if (!lives) {
        pid_t child = fork();
        if (child == 0)
            _exit(0);
        assert_true(child > 0 && waitpid(child, NULL, 0) == child);
        pid = child;
    }
    ith_tmp_tag(tag);
    *(strrchr(tag, '-') + 1) = '\0';
    snprintf(text, sizeof text, "%s%s%ld", name, tag, pid);
    return text;
}

#endif

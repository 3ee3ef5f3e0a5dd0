/* cases.h - runs the program on a small model directory and compares what it says.
 *
 * In texts and expected lines @ stands for the folder of the test, so that paths can be written. */
#ifndef ITH_TESTS_CASES_H
#define ITH_TESTS_CASES_H

#include "cli/run_program.h"
#include "e2e/small_dir.h"

static char *case_root;

/* `text` with @ replaced; free with ith_free. */
static inline char *case_text(const char *text)
{
    ith_buf out = {0};
    for (const char *p = text; *p; p++)
        if (*p == '@')
            ith_buf_puts(&out, case_root);
        else
            ith_buf_putc(&out, *p);
    ith_buf_puts(&out, "");
    assert_non_null(out.data);
    return out.data;
}

static inline void case_write(const char *name, const char *text)
{
    char *full = case_text(text);
    small_write(case_root, name, full);
    ith_free(full);
}

/* A folder of its own with model/ (vocabulary of 320 rows, tokenizer of 300), data.jsonl and
 * c.yaml, which trains two steps on them into out/. */
static inline int case_setup(const char *name)
{
    case_root = small_setup(name);
    small_shape shape = small_dense;
    shape.vocab = 320;
    small_make_model(small_join(case_root, "model"), &shape, &(small_layout){.dtype = ITH_BF16});
    small_make_data(small_join(case_root, "data.jsonl"), 12);
    case_write("c.yaml", "model: @/model\ntrain_dataset: @/data.jsonl\noutput_dir: @/out\n"
                         "cutoff_len: 256\nmax_steps: 2\nthreads: 2\ndevice: cpu\nreport_to: []\n");
    return 0;
}

static inline int case_teardown(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_status status = ith_remove_tree(case_root, &err);
    ith_free(case_root);
    return status == ITH_OK ? 0 : 1;
}

/* Runs one line of arguments, divided by blanks (a ~ inside an argument stands for a blank). */
static inline program_run case_run(const char *line)
{
    char *text = case_text(line), *words[32] = {0};
    int n = 0;
    for (char *p = NULL, *rest = text; (p = strsep(&rest, " ")) && n < 31;) {
        if (*p == '\0')
            continue;
        words[n++] = p;
        for (char *q = p; *q; q++)
            if (*q == '~')
                *q = ' ';
    }
    program_run run = run_program((const char *const *)words, "NO_COLOR=1");
    ith_free(text);
    return run;
}

static inline int case_count(const ith_buf *text, const char *part)
{
    int n = 0;
    for (const char *p = text->data; p && (p = strstr(p, part)); p++)
        n++;
    return n;
}

/* The program ends with `code`. code 0: `expected` is in its output or messages. Else: its last
 * line is "error: " and `expected`, the only such line. */
static inline void case_expect(const char *line, int code, const char *expected)
{
    program_run run = case_run(line);
    char *part = case_text(expected);
    const char *err = run.err.data ? run.err.data : "", *out = run.out.data ? run.out.data : "";
    const char *last = err;
    for (const char *p = err; *p; p++)
        if (*p == '\n' && p[1])
            last = p + 1;
    char wanted[4096];
    snprintf(wanted, sizeof wanted, "error: %s\n", part);
    bool good = run.code == code && (code ? strcmp(last, wanted) == 0
                                          : strstr(out, part) != NULL || strstr(err, part) != NULL);
    if (!good)
        fail_msg("ithaca %s\nexit %d, expected %d\nexpected: %s\noutput: %s\nmessages: %s", line,
                 run.code, code, part, out, err);
    if (code && case_count(&run.err, "error: ") != 1)
        fail_msg("ithaca %s: more than one error:\n%s", line, err);
    ith_free(part);
    program_run_deinit(&run);
}

#endif

/* golden_results.c - errors by name, those of ranks and draws put together, and the verdict. */
#include "golden.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define BF16_FLOOR (1.0 / 256)

void record(results *r, double error, double bound, const char *fmt, ...)
{
    die_on(ith_grow((void **)&r->rows, &r->cap, r->count + 1, sizeof *r->rows, "results",
                    &golden_err));
    result *row = &r->rows[r->count++];
    va_list args;
    va_start(args, fmt);
    vsnprintf(row->name, sizeof row->name, fmt, args);
    va_end(args);
    row->error = error;
    row->bound = bound;
}

void merge(const options *o, results *r)
{
    for (int64_t i = 0; i < r->count; i++)
        die_on(ith_comm_all_reduce(o->mesh->world, &r->rows[i].error, 1, ITH_F64, ITH_REDUCE_MAX,
                                   &golden_err));
}

static bool is_count(const result *row)
{
    return strncmp(row->name, "planned", 7) == 0;
}

void add_draw(results *sums, const results *draw)
{
    for (int64_t i = 0; i < draw->count; i++) {
        const result *row = &draw->rows[i];
        if (i == sums->count)
            record(sums, 0, row->bound, "%s", row->name);
        ITH_ASSERT(strcmp(sums->rows[i].name, row->name) == 0);
        if (is_count(row))
            sums->rows[i].error = fmax(sums->rows[i].error, row->error);
        else
            sums->rows[i].error += row->error * row->error;
    }
}

void end_draws(results *sums, int64_t draws)
{
    for (int64_t i = 0; i < sums->count; i++)
        if (!is_count(&sums->rows[i]))
            sums->rows[i].error = sqrt(sums->rows[i].error / (double)draws);
}

/* What bf16 must be expected to do to row i: the error of the reference there; to a gradient norm,
 * that of the gradients, which is the row before. */
static double expected_error(const results *reference, int64_t i)
{
    return reference->rows[strstr(reference->rows[i].name, "grad norm") ? i - 1 : i].error;
}

int64_t report(const golden *g, const results *r, const results *yardstick)
{
    int64_t failures = 0;
    for (int64_t i = 0; i < r->count; i++) {
        result *row = &r->rows[i];
        if (yardstick && !is_count(row))
            row->bound = fmax(row->bound, 2 * expected_error(yardstick, i) + BF16_FLOOR);
        bool bad = !(row->error <= row->bound);
        failures += bad;
        if (bad)
            printf("FAIL  %-60s %.3g  bound %.3g\n", row->name, row->error, row->bound);
    }
    for (int64_t i = 0; i < r->count;) {
        size_t word = strcspn(r->rows[i].name, " ");
        int64_t worst = i, j = i;
        for (; j < r->count && strncmp(r->rows[j].name, r->rows[i].name, word + 1) == 0; j++)
            if (!(r->rows[j].error * r->rows[worst].bound <=
                  r->rows[worst].error * r->rows[j].bound))
                worst = j;
        printf("%-12.*s worst of %3lld: %-55s %.3g  bound %.3g\n", (int)word, r->rows[i].name,
               (long long)(j - i), r->rows[worst].name, r->rows[worst].error, r->rows[worst].bound);
        i = j;
    }
    printf("%s: %lld values, %lld out of bounds\n", g->dir, (long long)r->count,
           (long long)failures);
    return failures;
}

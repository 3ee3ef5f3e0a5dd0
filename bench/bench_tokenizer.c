/* bench_tokenizer.c - tokenizer speed on one core: open, encode (whole file and line by line),
 * encode with offsets, decode. CPU time, best and median of the rounds after one warm-up.
 * Usage: ithaca_bench_tokenizer MODEL_DIR TEXT_FILE [rounds] */
#include "base/file.h"
#include "tokenizer/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_ROUNDS = 101 };

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void check(ith_status status, const ith_error *err)
{
    if (status == ITH_OK)
        return;
    fprintf(stderr, "error: %s\n", err->text);
    exit(ith_exit_code(status));
}

typedef struct {
    const ith_tokenizer *t;
    ith_buf text, decoded;
    ith_ids ids, begins, ends;
} bench;

static void encode_whole(bench *b, ith_error *err)
{
    b->ids.count = 0;
    check(ith_tokenizer_encode(b->t, b->text.data, b->text.len, &b->ids, err), err);
}

static void encode_lines(bench *b, ith_error *err)
{
    const char *p = b->text.data, *end = p + b->text.len;
    b->ids.count = 0;
    while (p < end) {
        const char *stop = memchr(p, '\n', (size_t)(end - p));
        stop = stop ? stop : end;
        check(ith_tokenizer_encode(b->t, p, stop - p, &b->ids, err), err);
        p = stop + 1;
    }
}

static void encode_offsets(bench *b, ith_error *err)
{
    b->ids.count = b->begins.count = b->ends.count = 0;
    check(ith_tokenizer_encode_offsets(b->t, b->text.data, b->text.len, &b->ids, &b->begins,
                                       &b->ends, err),
          err);
}

static void decode(bench *b, ith_error *err)
{
    ith_buf_clear(&b->decoded);
    check(ith_tokenizer_decode(b->t, b->ids.ids, b->ids.count, false, &b->decoded, err), err);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(const char *name, bench *b, void (*work)(bench *, ith_error *), int rounds)
{
    ith_error err = {0};
    double took[MAX_ROUNDS];
    work(b, &err);
    for (int i = 0; i < rounds; i++) {
        double start = seconds();
        work(b, &err);
        took[i] = seconds() - start;
    }
    qsort(took, (size_t)rounds, sizeof took[0], compare);
    double mb = 1e-6 * (double)b->text.len, median = took[rounds / 2];
    printf("%-16s best %7.1f MB/s  median %7.1f MB/s  %6.2f Mtok/s\n", name, mb / took[0],
           mb / median, 1e-6 * (double)b->ids.count / median);
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: %s MODEL_DIR TEXT_FILE [rounds]\n", argv[0]);
        return 2;
    }
    long wanted = argc > 3 ? strtol(argv[3], NULL, 10) : 9;
    int rounds = wanted < 1 ? 1 : wanted > MAX_ROUNDS ? MAX_ROUNDS : (int)wanted;
    ith_error err = {0};
    bench b = {0};
    ith_tokenizer *t = NULL;
    double start = seconds();
    check(ith_tokenizer_open(&t, argv[1], &err), &err);
    printf("open             %7.3f s, %lld tokens\n", seconds() - start,
           (long long)ith_tokenizer_size(t));
    b.t = t;
    check(ith_read_file(argv[2], 0, &b.text, &err), &err);
    measure("encode", &b, encode_whole, rounds);
    measure("encode lines", &b, encode_lines, rounds);
    measure("encode offsets", &b, encode_offsets, rounds);
    measure("decode", &b, decode, rounds);
    ith_tokenizer_close(t);
    ith_buf_deinit(&b.text);
    ith_buf_deinit(&b.decoded);
    ith_ids_free(&b.ids);
    ith_ids_free(&b.begins);
    ith_ids_free(&b.ends);
    return 0;
}

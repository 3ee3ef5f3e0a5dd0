/* Goal: blocks of a diffusion model that are drawn again and again leave the answer on the screen,
 * whatever the width. Method: a decoder's calls are played by hand; what the view prints goes
 * through a small terminal, whose screen is compared after every call. */
#include "testing.h"

#include <fcntl.h>
#include <unistd.h>

#include "base/utf8.h"
#include "cli/block_answering.h"

static ith_error err;
static ith_tokenizer *tokenizer;
static char dir[1024];

enum { ROWS = 64, COLUMNS = 80, BLOCK = 8, MASK = 5 };

/* A screen of narrow characters: text, carriage return, line feed, up, right, erase below. */
typedef struct {
    uint32_t cell[ROWS][COLUMNS];
    int row, column, width;
} screen;

static void screen_put(screen *s, const char *p, int64_t len)
{
    for (const char *end = p + len; p < end; p++) {
        int n = 0;
        char what = 0;
        if (*p == '\r') {
            s->column = 0;
        } else if (*p == '\n') {
            s->row++;
            s->column = 0;
        } else if (*p == '\033') {
            for (p += 2; *p >= '0' && *p <= '9'; p++)
                n = 10 * n + (*p - '0');
            what = *p;
        } else {
            if (s->column == s->width) {
                s->row++;
                s->column = 0;
            }
            assert_true(s->row < ROWS);
            int bytes = ith_utf8_decode(p, end, &s->cell[s->row][s->column++]);
            assert_true(bytes > 0);
            p += bytes - 1;
        }
        s->row -= what == 'A' ? n : 0;
        s->column += what == 'C' ? n : 0;
        assert_true(s->row >= 0 && s->column <= s->width);
        if (what == 'J') {
            memset(&s->cell[s->row][s->column], 0, (size_t)(COLUMNS - s->column) * 4);
            memset(s->cell[s->row + 1], 0, sizeof s->cell[0] * (size_t)(ROWS - s->row - 1));
        }
    }
}

/* The text, wrapped. */
static void assert_screen(const screen *s, const char *text)
{
    screen expected = {.width = s->width};
    screen_put(&expected, text, (int64_t)strlen(text));
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++)
            if (s->cell[r][c] != expected.cell[r][c])
                fail_msg("row %d, column %d of %d: U+%04x, expected U+%04x", r, c, s->width,
                         s->cell[r][c], expected.cell[r][c]);
}

/* Bytes that stdout got since the last call. */
static void take_output(int file, screen *s)
{
    char bytes[65536];
    fflush(stdout);
    ssize_t got = 0;
    while ((got = read(file, bytes, sizeof bytes)) > 0)
        screen_put(s, bytes, got);
}

static void play(int width, const int64_t *order, const ith_ids *text, int64_t prompt)
{
    screen s = {.width = width};
    char path[1100];
    snprintf(path, sizeof path, "%s/out", dir);
    fflush(stdout);
    int kept = dup(STDOUT_FILENO), out = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600),
        in = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(kept >= 0 && out >= 0 && in >= 0 && dup2(out, STDOUT_FILENO) >= 0);
    int64_t n = text->count, len = (prompt + n + BLOCK - 1) / BLOCK * BLOCK;
    int32_t row[128];
    for (int64_t p = 0; p < len; p++)
        row[p] = p < prompt ? 7 : MASK;
    ith_block_answer a = {.row = {.ids = row, .count = len}, .prompt = prompt};
    ith_answering answering = {.tokenizer = tokenizer,
                               .num_stop_ids = 1,
                               .stop_ids = {ith_tokenizer_find(tokenizer, "<|im_end|>")}};
    ith_block_how how = {.block = BLOCK, .mask_id = MASK};
    ith_block_view v;
    ith_block_view_begin(&v, &answering, &how, &a);
    v.width = width;
    for (int64_t k = 0; k < n; k++) {
        int64_t p = prompt + order[k];
        row[p] = text->ids[order[k]];
        how.written(how.arg, 0, p, row[p], 1, k);
        take_output(in, &s);
    }
    a.end = prompt + n;
    assert_ok(ith_block_view_end(&v, &err), err);
    take_output(in, &s);
    assert_true(dup2(kept, STDOUT_FILENO) >= 0);
    close(kept);
    close(out);
    close(in);
    ith_buf expected = {0};
    assert_ok(ith_tokenizer_decode(tokenizer, text->ids, n, true, &expected, &err), err);
    assert_screen(&s, expected.data);
    ith_buf_deinit(&expected);
}

/* Last tokens of a block first, then the others; a line end and a character of several tokens. */
static void test_the_answer_is_what_stays(void **state)
{
    (void)state;
    static const char text[] =
        "The mast stands in the middle,\nthe oar beside the bench; na\xc3\xafve "
        "\xe2\x82\xac sails.<|im_end|>";
    ith_ids ids = {0};
    assert_ok(ith_tokenizer_encode(tokenizer, text, (int64_t)sizeof text - 1, &ids, &err), err);
    assert_true(ids.count > 2 * BLOCK && ids.count < 100);
    for (int64_t prompt = 1; prompt < 12; prompt += 5) {
        int64_t order[128], count = 0;
        for (int64_t begin = 0; begin < prompt + ids.count; begin += BLOCK)
            for (int64_t p = begin + BLOCK - 1; p >= begin; p--)
                if (p >= prompt && p < prompt + ids.count)
                    order[count++] = p - prompt;
        assert_int_equal(count, ids.count);
        for (int width = 2; width <= COLUMNS; width = width < 12 ? width + 1 : width + 17)
            play(width, order, &ids, prompt);
    }
    ith_ids_free(&ids);
}

static void test_advance_counts_rows_and_columns(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int column, width, rows, to;
    } cases[] = {{"abc", 0, 10, 0, 3},
                 {"abc", 8, 10, 1, 1},
                 {"ab", 8, 10, 0, 10},
                 {"a\nb", 5, 10, 1, 1},
                 {"\033[2m_\033[0m", 4, 10, 0, 5},
                 {"\xe4\xb8\xad\xe6\x96\x87", 7, 10, 1, 2},
                 {"e\xcc\x81", 0, 10, 0, 1},
                 {"", 3, 10, 0, 3}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int column = cases[i].column;
        int rows = ith_terminal_advance(cases[i].text, (int64_t)strlen(cases[i].text),
                                        cases[i].width, &column);
        if (rows != cases[i].rows || column != cases[i].to)
            fail_msg("'%s': %d rows, column %d", cases[i].text, rows, column);
    }
}

static int setup(void **state)
{
    (void)state;
    static const char *const special[] = {"<|endoftext|>", "<|im_end|>"};
    static const char learn[] = "the mast stands in the middle, the oar lies beside the bench";
    snprintf(dir, sizeof dir, "%s", temp_dir("block_view"));
    assert_ok(ith_bpe_train(learn, (int64_t)sizeof learn - 1, 290, special, 2, dir, &err), err);
    assert_ok(ith_tokenizer_open(&tokenizer, dir, &err), err);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    ith_tokenizer_close(tokenizer);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_the_answer_is_what_stays),
                                       cmocka_unit_test(test_advance_counts_rows_and_columns)};
    return cmocka_run_group_tests(tests, setup, teardown);
}

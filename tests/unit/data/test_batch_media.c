/* Goal: ranks that share micro-batches with images read their own rows and pictures only, and get
 * there what one rank gets; a document that stays whole is read whole by its rank. Method: rows
 * with none to two images, tokenized into a cache, dealt to one rank and to three. */
#include "testing.h"

#include "base/checked.h"
#include "base/file.h"
#include "data/batching.h"
#include "unit/image/picture_files.inc"

enum { ROWS = 6, RANKS = 3 };

static ith_error err;
static char dir[1100];
static ith_tokenizer *tokenizer;
static ith_chat *chat;
static ith_media *media;
static ith_samples *samples;

static const char *at(const char *name)
{
    static char path[1400];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void put(const char *name, const void *data, size_t bytes)
{
    assert_ok(ith_write_file(at(name), data, (int64_t)bytes, &err), err);
}

static void put_text(const char *name, const char *text)
{
    put(name, text, strlen(text));
}

#define IMAGE "{\"type\":\"image_url\",\"value\":\"a.png\"}"
#define TEXT(text) "{\"type\":\"text\",\"value\":\"" text "\"}"
#define ROW(parts, answer)                                                                         \
    "{\"messages\":[{\"role\":\"user\",\"content\":[" parts                                        \
    "]},{\"role\":\"assistant\",\"content\":\"" answer "\"}]}\n"

static ith_samples *open_samples(void)
{
    ith_samples *s = NULL;
    char path[1400], cache[1400];
    snprintf(path, sizeof path, "%s", at("rows.jsonl"));
    snprintf(cache, sizeof cache, "%s", at("cache"));
    ith_samples_options o = {.path = path,
                             .cutoff_len = 1000,
                             .cache_dir = cache,
                             .tokenizer = tokenizer,
                             .chat = chat,
                             .media = media};
    assert_ok(ith_samples_open(&s, &o, &err), err);
    return s;
}

static int set_up(void **state)
{
    (void)state;
    static const char *const special[] = {"<|im_start|>",   "<|im_end|>",    "<|vision_start|>",
                                          "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"};
    if (!strstr(ith_image_formats(), "png"))
        return 0;
    const char *text = "a picture and a picture of a picture";
    snprintf(dir, sizeof dir, "%s", temp_dir("batch_media"));
    assert_ok(ith_bpe_train(text, (int64_t)strlen(text), 300, special, 6, dir, &err), err);
    assert_ok(ith_tokenizer_open(&tokenizer, dir, &err), err);
    put_text("chat_template.jinja",
             "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
             "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
             "{% if c.type == 'text' %}{{ c.text }}{% else %}"
             "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% endif %}{% endfor %}{% endif %}"
             "{{ '<|im_end|>\\n' }}{% endfor %}"
             "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}");
    assert_ok(ith_chat_open(&chat, dir, NULL, tokenizer, &err), err);
    static const char *const processors[] = {"preprocessor_config.json",
                                             "video_preprocessor_config.json"};
    for (int i = 0; i < 2; i++)
        put_text(processors[i], "{\"patch_size\": 4, \"temporal_patch_size\": 2, \"merge_size\": 2,"
                                " \"min_pixels\": 64, \"max_pixels\": 4096}");
    put("a.png", png_alpha, sizeof png_alpha);
    put_text(
        "rows.jsonl",
        ROW(IMAGE "," TEXT("what"), "a picture") "" ROW(TEXT("of"), "a") "" ROW(
            IMAGE "," TEXT("and") "," IMAGE,
            "a picture and a picture") "" ROW(TEXT("a picture of a picture of a picture"),
                                              "of a picture") "" ROW(IMAGE,
                                                                     "of") "" ROW(TEXT("and") "," IMAGE,
                                                                                  "a picture of a "
                                                                                  "picture"));
    ith_media_options o = {.model_dir = dir,
                           .tokenizer = tokenizer,
                           .tokens = {ith_tokenizer_find(tokenizer, "<|image_pad|>"),
                                      ith_tokenizer_find(tokenizer, "<|video_pad|>"),
                                      ith_tokenizer_find(tokenizer, "<|vision_start|>"), 2}};
    assert_ok(ith_media_open(&media, &o, &err), err);
    samples = open_samples();
    assert_int_equal(ith_samples_count(samples), ROWS);
    assert_int_equal(ith_samples_num_media(samples), 5);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    ith_samples_close(samples);
    ith_media_close(media);
    ith_chat_close(chat);
    ith_tokenizer_close(tokenizer);
    return 0;
}

/* Rank *arg of three has a third of each half of the rows. */
static void third_of_each_half(const void *arg, int64_t tokens, int64_t ranges[4])
{
    int64_t k = *(const int64_t *)arg, half = tokens / 2;
    for (int i = 0; i < 2; i++) {
        ranges[2 * i] = i * half + k * (half / 3);
        ranges[2 * i + 1] = k < 2 ? ranges[2 * i] + half / 3 : i ? tokens : half;
    }
}

static ith_batcher_options options(int64_t micro_batch_size, int64_t grad_accum)
{
    return (ith_batcher_options){.strategy = ITH_BATCHING_NORMAL,
                                 .micro_batch_size = micro_batch_size,
                                 .cutoff_len = 1000,
                                 .grad_accum = grad_accum,
                                 .dp_size = 1,
                                 .num_epochs = 1,
                                 .media = media};
}

static ith_batcher *open_batcher(ith_batcher_options o, ith_batch_step *step)
{
    ith_batcher *b = NULL;
    assert_ok(ith_batcher_create(&b, samples, &o, &err), err);
    assert_true(ith_batcher_next(b, step));
    return b;
}

static int64_t num_frames(const ith_micro_batch *b)
{
    int64_t n = 0;
    for (int64_t i = 0; i < b->num_grids; i++)
        n += b->grids[i].t;
    return n;
}

/* The cache has the places of images, and a sample of it those of one. */
static void test_frames_are_where_the_tokens_are(void **state)
{
    (void)state;
    if (!samples)
        skip();
    ith_samples *again = open_samples();
    assert_true(ith_samples_from_cache(again));
    int32_t pad = ith_media_ids(media)->image;
    for (int64_t i = 0; i < ROWS; i++) {
        ith_sample s = ith_samples_get(again, i);
        int64_t found = 0, tokens = 0;
        for (int64_t k = 0; k < s.num_media; k++) {
            int64_t first = ith_samples_media_frames(again, &s.media[k])[0];
            int64_t n = ith_media_features(ith_media_ids(media), s.media[k].grid);
            assert_true(n > 1 && first > 0 && s.ids[first - 1] != pad);
            for (int64_t t = 0; t < n; t++)
                found += s.ids[first + t] == pad;
            tokens += n;
        }
        for (int64_t t = 0; t < s.num_tokens; t++)
            found -= s.ids[t] == pad;
        assert_int_equal(found, 0);
        assert_true(s.num_media == 0 || tokens > 0);
    }
    ith_samples_close(again);
}

/* Rank `rank` of the group against what one rank has of the same micro-batch; returns ids read. */
static int64_t check_rank(const ith_micro_batch *a, int64_t rank, int64_t *encoded)
{
    ith_batcher_options o = options(ROWS, 1);
    ith_batch_step step;
    ith_micro_batch b;
    int64_t own[4], width = ith_media_patch_width(media), patches = 0, all = 0;
    o.cp_size = o.media_ranks = RANKS;
    o.cp_rank = o.media_rank = rank;
    o.own_rows = third_of_each_half;
    o.own_arg = &rank;
    ith_batcher *part = open_batcher(o, &step);
    assert_ok(ith_batcher_fill(part, 0, &b, &err), err);
    third_of_each_half(&rank, a->num_tokens, own);
    for (int i = 0; i < 4; i += 2) {
        size_t bytes = (size_t)(own[i + 1] - own[i]) * 4;
        assert_memory_equal(a->ids + own[i], b.ids + own[i], bytes);
        assert_memory_equal(a->labels + own[i], b.labels + own[i], bytes);
        for (int64_t axis = 0; axis < 3; axis++)
            assert_memory_equal(a->mrope + axis * a->num_tokens + own[i],
                                b.mrope + axis * a->num_tokens + own[i], bytes);
    }
    assert_int_equal(b.num_grids, a->num_grids);
    assert_memory_equal(b.grids, a->grids, (size_t)a->num_grids * sizeof *a->grids);
    assert_memory_equal(b.frames, a->frames, (size_t)num_frames(a) * 4);
    for (int64_t i = 0; i < a->num_grids; i++)
        all += ith_grid_patches(a->grids[i]);
    for (int64_t i = 0; i < a->num_grids; i++) {
        int64_t n = ith_grid_patches(a->grids[i]);
        if (ith_frame_rank(patches, n, all, RANKS) == rank) {
            assert_memory_equal(b.pixels + patches * width, a->pixels + patches * width,
                                (size_t)(n * width) * 4);
            ++*encoded;
        }
        patches += n;
    }
    int64_t read = b.num_read;
    assert_int_equal(read, own[1] - own[0] + own[3] - own[2]);
    ith_batcher_destroy(part);
    return read;
}

static void test_ranks_read_their_rows_and_pictures(void **state)
{
    (void)state;
    if (!samples)
        skip();
    ith_batch_step step;
    ith_micro_batch a;
    ith_batcher *all = open_batcher(options(ROWS, 1), &step);
    assert_ok(ith_batcher_fill(all, 0, &a, &err), err);
    assert_int_equal(a.num_read, a.num_tokens);
    int64_t read = 0, encoded = 0;
    for (int64_t rank = 0; rank < RANKS; rank++)
        read += check_rank(&a, rank, &encoded);
    assert_int_equal(read, a.num_tokens);
    assert_int_equal(encoded, 5);
    ith_batcher_destroy(all);
}

/* A whole document: all its rows and pictures, on the rank that has it, and nowhere else. */
static void test_whole_documents_have_their_pictures(void **state)
{
    (void)state;
    if (!samples)
        skip();
    int64_t seen[ROWS] = {0}, encoded = 0, width = ith_media_patch_width(media);
    for (int64_t rank = 0; rank < RANKS; rank++) {
        ith_batcher_options o = options(3, 2);
        ith_batch_step step;
        o.cp_size = o.media_ranks = RANKS;
        o.cp_rank = o.media_rank = rank;
        o.own_rows = third_of_each_half;
        o.own_arg = &rank;
        o.whole = ITH_CP_WHOLE_ALWAYS;
        ith_batcher *b = open_batcher(o, &step);
        ith_batch_limits l = ith_batcher_limits(b);
        assert_true(l.max_whole_patches > 0 && l.max_whole_patches <= l.max_patches);
        for (int64_t j = 0; j < step.num_micro; j++) {
            ith_micro_batch mb;
            assert_ok(ith_batcher_fill(b, j, &mb, &err), err);
            for (int64_t d = 0; d < mb.num_docs; d++)
                seen[mb.sample[d]] += mb.whole ? RANKS : 1;
            if (!mb.whole)
                continue;
            assert_int_equal(mb.num_read, mb.num_tokens);
            encoded += mb.num_grids;
            float *pixels = malloc((size_t)(8 * width) * 4);
            ith_sample s = mb.num_docs ? ith_samples_get(samples, mb.sample[0]) : (ith_sample){0};
            if (s.num_media) { /* all pictures are the same */
                assert_int_equal(ith_grid_patches(s.media[0].grid), 8);
                assert_ok(ith_media_load(media, s.media, ith_samples_media_path(samples, s.media),
                                         pixels, &err),
                          err);
                for (int64_t i = 0; i < mb.num_grids; i++)
                    assert_memory_equal(mb.pixels + i * 8 * width, pixels, (size_t)(8 * width) * 4);
            }
            free(pixels);
        }
        ith_batcher_destroy(b);
    }
    for (int64_t i = 0; i < ROWS; i++)
        assert_int_equal(seen[i], RANKS);
    assert_true(encoded > 1);
}

/* Two rows with a picture, of 31 and 27 tokens, and two without, of 37 and 24: by tokens the
 * pictures go to one group, by what encoding them costs each group has one. */
static void test_pictures_are_work(void **state)
{
    (void)state;
    if (!samples)
        skip();
    int64_t shown[2][2];
    for (int heavy = 0; heavy < 2; heavy++)
        for (int64_t group = 0; group < 2; group++) {
            static const int64_t rows[] = {0, 1, 3, 4};
            ith_batcher_options o = options(2, 1);
            ith_batch_step step;
            ith_micro_batch mb;
            o.subset = rows;
            o.num_subset = 4;
            o.dp_size = 2;
            o.dp_rank = group;
            o.work = (ith_batch_work){.linear = 1, .patch = heavy ? 100 : 0, .pair = heavy};
            ith_batcher *b = open_batcher(o, &step);
            assert_ok(ith_batcher_fill(b, 0, &mb, &err), err);
            assert_int_equal(mb.num_docs, 2);
            shown[heavy][group] = mb.num_grids;
            ith_batcher_destroy(b);
        }
    assert_int_equal(shown[0][0] * shown[0][1], 0);
    assert_int_equal(shown[1][0], 1);
    assert_int_equal(shown[1][1], 1);
}

/* Ids of the cache are looked at when they are used: one that is no token of an image any more. */
static void test_an_image_without_its_token_is_told(void **state)
{
    (void)state;
    if (!samples)
        skip();
    ith_buf file = {0};
    ith_names names = {0};
    ith_micro_batch mb;
    ith_batch_step step;
    char path[1400];
    ith_sample s = ith_samples_get(samples, 0);
    int64_t token = ith_samples_media_frames(samples, s.media)[0] + 1;
    assert_ok(ith_list_dir(at("cache"), &names, &err), err);
    snprintf(path, sizeof path, "%s/cache/%s", dir, names.names[0]);
    assert_ok(ith_read_file(path, 0, &file, &err), err);
    memset(file.data + 64 + 4 * token, 0, 4);
    ith_samples *good = samples;
    assert_ok(ith_write_file(path, file.data, file.len, &err), err);
    samples = open_samples();
    assert_true(ith_samples_from_cache(samples));
    ith_batcher *b = open_batcher(options(ROWS, 1), &step);
    assert_fails(ith_batcher_fill(b, 0, &mb, &err), err, ITH_ERR_FORMAT,
                 "cache of tokenized data is damaged (the images of sample 0 are not where its "
                 "tokens for them are): remove it and start again");
    ith_batcher_destroy(b);
    ith_samples_close(samples);
    samples = good;
    ith_names_free(&names);
    ith_buf_deinit(&file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_frames_are_where_the_tokens_are),
        cmocka_unit_test(test_ranks_read_their_rows_and_pictures),
        cmocka_unit_test(test_whole_documents_have_their_pictures),
        cmocka_unit_test(test_pictures_are_work),
        cmocka_unit_test(test_an_image_without_its_token_is_told),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}

/* Goal: what rows with images and videos become: text, grids, patches, positions, cuts. Method:
 * worked examples, a small picture, and every allocation and read failing once. */
#include "testing.h"

#include "base/checked.h"
#include "base/file.h"
#include "data/media.h"
#include "unit/image/picture_files.inc"

/* Text, an image of 4x6 patches, text, a video of two frames, text; then a document of text alone.
 */
static void test_positions_of_images_and_video(void **state)
{
    (void)state;
    static const ith_media_tokens tokens = {
        .image = 90, .video = 91, .vision_start = -1, .merge = 2};
    static const int32_t ids[] = {1,  2,  90, 90, 90, 90, 90, 90, 3, 91, 91,
                                  91, 91, 4,  91, 91, 91, 91, 5,  6, 7};
    static const int32_t cu[] = {0, 19, 21};
    static const ith_grid grids[] = {{1, 4, 6}, {2, 4, 4}};
    static const int32_t wanted[3][21] = {
        {0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 6, 6, 8, 9, 9, 9, 9, 11, 0, 1},
        {0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 7, 7, 8, 9, 9, 10, 10, 11, 0, 1},
        {0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9, 10, 9, 10, 11, 0, 1}};
    int32_t got[3][21], frames[3];
    ith_error err = {0};
    assert_ok(ith_media_find(&tokens, ids, cu, 2, grids, 2, frames, &err), err);
    assert_memory_equal(frames, ((int32_t[]){2, 9, 14}), sizeof frames);
    for (int64_t first = 0; first <= 21; first++) /* two ranges of rows, between them one of 3 */
        for (int64_t last = first; last <= 21; last++) {
            const int64_t own[] = {0, first, ith_min_i64(first + 3, last), last};
            memset(got, 0xff, sizeof got);
            ith_mrope_positions(2, cu, 2, grids, 2, frames, last < 21 ? own : NULL, got[0]);
            for (int axis = 0; axis < 3; axis++)
                for (int t = 0; t < 21; t++) {
                    bool set = last == 21 || t < own[1] || (t >= own[2] && t < own[3]);
                    if (got[axis][t] != (set ? wanted[axis][t] : -1))
                        fail_msg("row %d, token %d: %d, expected %d", axis, t, got[axis][t],
                                 set ? wanted[axis][t] : -1);
                }
        }
    assert_fails(ith_media_find(&tokens, ids, cu, 2, grids, 1, frames, &err), err,
                 ITH_ERR_FORMAT,
                 "document 0, token 9: a media token, but the row has only 1 images");
    static const ith_grid large[] = {{1, 4, 8}, {2, 4, 4}};
    memset(&err, 0, sizeof err);
    assert_fails(ith_media_find(&tokens, ids, cu, 2, large, 2, frames, &err), err,
                 ITH_ERR_FORMAT, "6 media tokens, the image has 8 features");
    static const ith_grid more[] = {{1, 4, 6}, {2, 4, 4}, {1, 2, 2}};
    memset(&err, 0, sizeof err);
    assert_fails(ith_media_find(&tokens, ids, cu, 2, more, 3, frames, &err), err,
                 ITH_ERR_FORMAT, "3 images and videos, but media tokens for 2");
}

/* text, <start>, image of 4, <end>, text, <start>, image of 4, <end>: a cut never goes through an
 * image, nor between it and its <start>; what lies whole before the cut is counted. */
static void test_cuts_stand_before_images(void **state)
{
    (void)state;
    static const ith_media_tokens tokens = {
        .image = 90, .video = 91, .vision_start = 80, .merge = 2};
    static const int32_t ids[] = {1, 80, 90, 90, 90, 90, 81, 2, 80, 90, 90, 90, 90, 81, 3};
    static const ith_media_item items[] = {{.grid = {1, 4, 4}}, {.grid = {1, 4, 4}}};
    static const struct {
        int64_t limit, end, num;
    } cases[] = {{1, 1, 0}, {2, 1, 0},  {3, 1, 0},  {5, 1, 0},   {6, 6, 1},   {7, 7, 1},
                 {9, 8, 1}, {10, 8, 1}, {12, 8, 1}, {13, 13, 2}, {15, 15, 2}, {99, 15, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ith_error err = {0};
        int64_t end = 0, num = 0;
        assert_ok(ith_media_cut(&tokens, ids, 15, 0, cases[i].limit, items, 2, &end, &num, &err),
                  err);
        if (end != cases[i].end || num != cases[i].num)
            fail_msg("limit %lld: cut at %lld with %lld images, expected %lld with %lld",
                     (long long)cases[i].limit, (long long)end, (long long)num,
                     (long long)cases[i].end, (long long)cases[i].num);
    }
    ith_error err = {0};
    int64_t end = 0, num = 0;
    assert_ok(ith_media_cut(&tokens, ids, 15, 8, 6, items + 1, 1, &end, &num, &err), err);
    assert_int_equal(end, 14);
    assert_int_equal(num, 1);
    assert_fails(ith_media_cut(&tokens, ids, 15, 0, 99, items, 1, &end, &num, &err), err,
                 ITH_ERR_FORMAT, "token 9 stands for an image or video, and none is left of 1");
    static const ith_media_item large[] = {{.grid = {1, 4, 8}}, {.grid = {1, 4, 4}}};
    memset(&err, 0, sizeof err);
    assert_fails(ith_media_cut(&tokens, ids, 15, 0, 99, large, 2, &end, &num, &err), err,
                 ITH_ERR_FORMAT, "an image of 8 tokens: the text has 4");
}

/* Frames of a video: how many, which, and their size. */
static void test_frames_and_size_of_videos(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_video_processor p;
    int64_t indices[768], n = 0;
    static const int64_t wanted[] = {0,   13,  25,  38,  50,  63,  75,  88,  101, 113,
                                     126, 138, 151, 164, 176, 189, 201, 214, 226, 239};
    assert_ok(ith_video_processor_load(&p, "/nonexistent", &err), err);
    ith_video_info info = {.num_frames = 240, .fps = 24};
    assert_ok(ith_video_sample(&p, &info, indices, &n, &err), err);
    assert_int_equal(n, 20);
    assert_memory_equal(indices, wanted, sizeof wanted);
    info = (ith_video_info){.num_frames = 3, .fps = 30};
    assert_ok(ith_video_sample(&p, &info, indices, &n, &err), err);
    assert_int_equal(n, 3); /* four at least, but there are three */
    info.num_frames = 1;
    assert_fails(ith_video_sample(&p, &info, indices, &n, &err), err, ITH_ERR_FORMAT,
                 "a video of 1 frames (2 at least)");
    static const struct {
        int64_t frames, height, width;
        ith_grid grid;
    } sizes[] = {{8, 720, 1280, {4, 44, 80}},
                 {64, 720, 1280, {32, 28, 52}},
                 {3, 720, 1280, {2, 44, 80}},
                 {4, 16, 64, {2, 2, 8}}}; /* the short side is first brought to 32 */
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        ith_grid g;
        memset(&err, 0, sizeof err);
        assert_ok(ith_video_grid(&p, sizes[i].frames, sizes[i].height, sizes[i].width, &g, &err),
                  err);
        if (memcmp(&g, &sizes[i].grid, sizeof g) != 0)
            fail_msg("%lld frames of %lld x %lld: %d %d %d", (long long)sizes[i].frames,
                     (long long)sizes[i].height, (long long)sizes[i].width, g.t, g.h, g.w);
    }
}

static ith_tokenizer *learn(const char *dir, ith_error *err)
{
    static const char *const special[] = {"<|im_end|>", "<|vision_start|>", "<|vision_end|>",
                                          "<|image_pad|>", "<|video_pad|>"};
    ith_tokenizer *tok = NULL;
    const char *text = "a picture and a picture";
    assert_ok(ith_bpe_train(text, (int64_t)strlen(text), 300, special, 5, dir, err), *err);
    assert_ok(ith_tokenizer_open(&tok, dir, err), *err);
    return tok;
}

/* Opens, prepares and loads a row of one image; *left: what it became. */
static ith_status one_row(const char *dir, const ith_tokenizer *tok, json_t *messages, double *sum,
                          ith_error *err)
{
    ith_media_options o = {.model_dir = dir,
                           .tokenizer = tok,
                           .tokens = {ith_tokenizer_find(tok, "<|image_pad|>"),
                                      ith_tokenizer_find(tok, "<|video_pad|>"), -1, 2}};
    ith_media *media = NULL;
    ith_media_list list = {0};
    float *pixels = NULL;
    char data_file[4200];
    snprintf(data_file, sizeof data_file, "%s/rows.jsonl", dir);
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_media_open(&media, &o, err));
    ITH_TRY_OUT(ith_media_prepare(media, messages, data_file, &list, err));
    assert_int_equal(list.count, 1);
    int64_t count = ith_grid_patches(list.items[0].grid) * ith_media_patch_width(media);
    ITH_TRY_OUT(ith_alloc((void **)&pixels, count * 4, "pixels", err));
    ITH_TRY_OUT(ith_media_load(media, &list.items[0], list.paths.data, pixels, err));
    for (int64_t i = 0; i < count; i++)
        *sum += (double)pixels[i];
out:
    ith_free(pixels);
    ith_media_list_deinit(&list);
    ith_media_close(media);
    return status;
}

static void test_every_failure_of_a_picture_is_one_error(void **state)
{
    (void)state;
    if (!strstr(ith_image_formats(), "png"))
        skip();
    const char *dir = temp_dir("media");
    ith_error err = {0};
    char path[4200];
    ith_tokenizer *tok = learn(dir, &err);
    snprintf(path, sizeof path, "%s/a.png", dir);
    assert_ok(ith_write_file(path, png_alpha, sizeof png_alpha, &err), err);
    json_t *messages = json_pack("[{s:s, s:[{s:s, s:s}]}]", "role", "user", "content", "type",
                                 "image_url", "value", "a.png");
    double sum = 0;
    assert_ok(one_row(dir, tok, messages, &sum, &err), err);
    const json_t *block =
        json_array_get(json_object_get(json_array_get(messages, 0), "content"), 0);
    assert_string_equal(json_string_value(json_object_get(block, "placeholder")), "<|image_pad|>");
    /* 8 x 12 becomes 224 x 320: 7 x 10 tokens */
    assert_int_equal(json_string_length(json_object_get(block, "text")), 70 * 13);
    for (int kind = 0; kind < 2; kind++) {
        for (int64_t n = 1;; n++) {
            double again = 0;
            memset(&err, 0, sizeof err);
            ith_fault_set(kind ? ITH_FAULT_READ : ITH_FAULT_ALLOC, n);
            ith_status status = one_row(dir, tok, messages, &again, &err);
            bool hit = ith_fault_count(kind ? ITH_FAULT_READ : ITH_FAULT_ALLOC) >= n;
            ith_fault_set(kind ? ITH_FAULT_READ : ITH_FAULT_ALLOC, 0);
            if (!hit) {
                assert_ok(status, err);
                assert_true(again >= sum && again <= sum);
                break;
            }
            assert_true(status == ITH_OK || err.text[0]);
            assert_in_range(n, 1, 1000);
        }
    }
    json_decref(messages);
    ith_tokenizer_close(tok);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_positions_of_images_and_video),
        cmocka_unit_test(test_cuts_stand_before_images),
        cmocka_unit_test(test_frames_and_size_of_videos),
        cmocka_unit_test(test_every_failure_of_a_picture_is_one_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

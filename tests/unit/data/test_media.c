/* Goal: positions and cuts of rows with images and videos. Method: worked examples. */
#include "testing.h"

#include "data/media.h"

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
    int32_t got[3][21];
    ith_error err = {0};
    assert_ok(ith_mrope_positions(&tokens, ids, cu, 2, grids, 2, got[0], &err), err);
    for (int axis = 0; axis < 3; axis++)
        for (int t = 0; t < 21; t++)
            if (got[axis][t] != wanted[axis][t])
                fail_msg("row %d, token %d: %d, expected %d", axis, t, got[axis][t],
                         wanted[axis][t]);
    assert_fails(ith_mrope_positions(&tokens, ids, cu, 2, grids, 1, got[0], &err), err,
                 ITH_ERR_FORMAT,
                 "document 0, token 9: a media token, but the row has only 1 images");
    static const ith_grid large[] = {{1, 4, 8}, {2, 4, 4}};
    memset(&err, 0, sizeof err);
    assert_fails(ith_mrope_positions(&tokens, ids, cu, 2, large, 2, got[0], &err), err,
                 ITH_ERR_FORMAT, "6 media tokens, the image has 8 features");
    static const ith_grid more[] = {{1, 4, 6}, {2, 4, 4}, {1, 2, 2}};
    memset(&err, 0, sizeof err);
    assert_fails(ith_mrope_positions(&tokens, ids, cu, 2, more, 3, got[0], &err), err,
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_positions_of_images_and_video),
        cmocka_unit_test(test_cuts_stand_before_images),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Goal: what ranks answer that share sequences and their caches is what one rank answers.
 * Method: each rank first feeds the same prompts and tokens to a decoder of its own, then to one
 * that all share, Ulysses and rings, with whole weights and with cut ones; logits after the prompts
 * and after every token are equal to 1e-5, and so are greedy answers, ids. Prompts of a batch are
 * longer than a rank's share of the cache, shorter than the number of ranks, and of unequal length;
 * images begin in one slice and end in another. Models: the golden cases.
 * test_cut_cache CASES [device=cuda] */
#include "testing.h"

#include <math.h>

#include "base/rng.h"
#include "generate/block_decoder.h"

static ith_comm *world;
static ith_error err;
static const char *cases_dir;
static ith_use_device device = ITH_USE_CPU;

enum { BATCH = 4, LONGEST = 61, STEPS = 24, CAPACITY = LONGEST + STEPS + 1, BLOCK = 4 };
static const int64_t lengths[BATCH] = {LONGEST, 1, 2, 22};

static const struct model {
    const char *name;
    int32_t vocab;
    bool media;
} models[] = {{"dense_yarn", 72, false},
              {"tied_linear", 72, false},
              {"experts", 72, false},
              {"sees", 58, true},
              {"sees_experts", 58, true}};
enum { IMAGE = 60 }; /* image_token_id of those that see */
static const int32_t stop_id = 17;

/* Of the first prompt one from token 5 on and one behind a token of text; of the last one. */
static const struct {
    int64_t prompt, first;
    ith_grid grid;
} images[] = {{0, 5, {1, 12, 8}}, {0, 30, {1, 4, 8}}, {3, 1, {1, 6, 8}}};
enum { NUM_IMAGES = sizeof images / sizeof *images, PATCH_WIDTH = 3 * 2 * 4 * 4 };

static int64_t features(ith_grid g)
{
    return (int64_t)g.t * g.h * g.w / 4;
}

typedef struct {
    int32_t ids[BATCH][CAPACITY + BLOCK];
    float *pixels;
    ith_grid grids[NUM_IMAGES];
    ith_decoder_media media;
    ith_vision_limits limits;
} request;

static void make_request(const struct model *m, request *r)
{
    *r = (request){0};
    for (int64_t b = 0; b < BATCH; b++)
        for (int64_t i = 0; i < CAPACITY; i++)
            r->ids[b][i] = (int32_t)ith_rng_below(3, (uint64_t)b, (uint64_t)i, m->vocab);
    if (!m->media)
        return;
    for (int k = 0; k < NUM_IMAGES; k++) {
        ith_grid g = images[k].grid;
        r->grids[k] = g;
        r->limits.max_patches += ith_grid_patches(g);
        r->limits.max_segments += g.t;
        r->limits.max_segment_patches =
            ith_max_i64(r->limits.max_segment_patches, (int64_t)g.h * g.w);
        for (int64_t i = 0; i < features(g); i++)
            r->ids[images[k].prompt][images[k].first + i] = IMAGE;
    }
    int64_t n = r->limits.max_patches * PATCH_WIDTH;
    r->pixels = ith_calloc(n, 4);
    assert_non_null(r->pixels);
    for (int64_t i = 0; i < n; i++)
        r->pixels[i] = (float)ith_rng_normal(4, 1, (uint64_t)i);
    r->media = (ith_decoder_media){r->pixels, r->grids, NUM_IMAGES};
}

static const char *model_dir(const char *name)
{
    static char path[4096];
    assert_true(snprintf(path, sizeof path, "%s/%s/hf", cases_dir, name) < (int)sizeof path);
    return path;
}

static ith_decoder_options options_of(const ith_ranks_options *ranks, ith_vision_limits media)
{
    int64_t all = 0;
    for (int64_t b = 0; b < BATCH; b++)
        all += lengths[b];
    return (ith_decoder_options){.device = device,
                                 .threads = 1,
                                 .set_dtype = true,
                                 .dtype = ITH_F32,
                                 .batch = BATCH,
                                 .capacity = CAPACITY,
                                 .max_append = all,
                                 .media = media,
                                 .ranks = *ranks};
}

static void agree(const ith_decoder *one, const ith_decoder *all, const char *what, int64_t step)
{
    int64_t n = one->hf.vocab_size;
    double largest = 0, worst = 0;
    for (int64_t i = 0; i < BATCH * n; i++) {
        largest = fmax(largest, fabs((double)one->host_logits[i]));
        worst = fmax(worst, fabs((double)all->host_logits[i] - (double)one->host_logits[i]));
    }
    if (!(worst <= 1e-5 * largest && largest > 0))
        fail_msg("rank %lld of %lld, %s, step %lld: logits differ by %.3g of %.3g",
                 (long long)world->rank, (long long)world->size, what, (long long)step, worst,
                 largest);
}

/* ---- answers ---- */

typedef struct {
    int32_t ids[BATCH][STEPS];
    int64_t count[BATCH];
} answers;

/* The second prompt ends early, the others at different tokens. */
static bool on_token(void *arg, int64_t i, int32_t id, bool is_stop)
{
    answers *a = arg;
    (void)is_stop;
    assert_true(a->count[i] < STEPS);
    a->ids[i][a->count[i]++] = id;
    return a->count[i] < (i == 1 ? 2 : STEPS - 3 * i);
}

static answers answer(ith_decoder *d, const request *r, bool draw)
{
    answers a = {0};
    ith_ids prompts[BATCH];
    for (int64_t b = 0; b < BATCH; b++)
        prompts[b] = (ith_ids){.ids = (int32_t *)(uintptr_t)r->ids[b], .count = lengths[b]};
    ith_generate_options how = {.sampling = {.do_sample = draw,
                                             .temperature = 1,
                                             .top_p = 1,
                                             .repetition_penalty = draw ? 1.1 : 1,
                                             .seed = 7},
                                .stop_ids = &stop_id,
                                .num_stop_ids = 1,
                                .max_new = STEPS,
                                .token = on_token,
                                .arg = &a,
                                .media = &r->media};
    assert_ok(ith_decoder_generate(d, prompts, BATCH, &how, &err), err);
    return a;
}

/* What a rank sends to its group for a token of every sequence: cut_cache.h. */
static int64_t bytes_of_step(const ith_decoder *d)
{
    const ith_hf_config *c = &d->hf;
    int64_t layers = 0;
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        layers += !c->layer_is_linear[l];
    return layers * (ith_decoder_ranks_cp(&d->ranks) - 1) * BATCH * c->num_attention_heads *
           (c->head_dim + 1) * 4;
}

/* Prompts and then tokens to both, logits compared; prompts again behind them. */
static void feed_both(ith_decoder *one, ith_decoder *all, const request *r, const char *what)
{
    const int32_t *at[BATCH];
    int64_t counts[BATCH];
    for (int round = 0; round < 2; round++) {
        ith_decoder_reset(one);
        ith_decoder_reset(all);
        for (int64_t step = 0; step <= (round ? 2 : STEPS); step++) {
            for (int64_t b = 0; b < BATCH; b++) {
                at[b] = r->ids[b] + (step ? lengths[b] + step - 1 : 0);
                counts[b] = step ? 1 : lengths[b];
            }
            const ith_decoder_media *media = step ? NULL : &r->media;
            assert_ok(ith_decoder_append_media(one, at, counts, media), err);
            int64_t sent = all->ranks.mesh.cp ? all->ranks.mesh.cp->bytes_sent : 0;
            assert_ok(ith_decoder_append_media(all, at, counts, media), err);
            if (step && ith_decoder_ranks_cp(&all->ranks) > 1 && device == ITH_USE_CPU)
                assert_int_equal(all->ranks.mesh.cp->bytes_sent - sent, bytes_of_step(all));
            agree(one, all, what, step);
        }
    }
}

static void compare_answers(ith_decoder *one, ith_decoder *all, const request *r, const char *what)
{
    for (int draw = 0; draw < 2; draw++) {
        answers a = answer(one, r, draw), b = answer(all, r, draw);
        if (world->rank % all->options.ranks.cp_size != 0)
            for (int64_t i = 0; i < BATCH; i++)
                assert_int_equal(b.count[i], 0); /* another rank of the group has them */
        else if (memcmp(&a, &b, sizeof a) != 0)
            fail_msg("%s: other answers (draw %d), %d %d %d for %d %d %d", what, draw, b.ids[0][0],
                     b.ids[0][1], b.ids[0][2], a.ids[0][0], a.ids[0][1], a.ids[0][2]);
    }
}

static int64_t common_divisor(int64_t a, int64_t b)
{
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static const struct layout {
    const char *name;
    ith_ring_wish mode;
    bool cut_weights, halves; /* halves: two groups, of half the ranks each */
} layouts[] = {{"auto", ITH_RING_AUTO, false, false},
               {"ring", ITH_RING_ONLY, false, false},
               {"cut weights", ITH_RING_AUTO, true, false},
               {"two groups", ITH_RING_AUTO, false, true},
               {"two groups, cut weights", ITH_RING_AUTO, true, true}};
enum { NUM_LAYOUTS = sizeof layouts / sizeof *layouts };

static bool make_ranks(const struct layout *l, int64_t experts, ith_ranks_options *out)
{
    if (l->halves && world->size % 2)
        return false;
    *out = (ith_ranks_options){
        .world = world,
        .cut_weights = l->cut_weights,
        .cp_size = l->halves ? world->size / 2 : world->size,
        .cp_mode = l->mode,
        .ep_size = l->cut_weights && experts ? common_divisor(experts, world->size) : 1};
    return true;
}

static void test_logits_and_answers_are_those_of_one_rank(void **state)
{
    (void)state;
    const ith_ranks_options alone = {0};
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        request r;
        ith_decoder one;
        make_request(&models[m], &r);
        ith_decoder_options o = options_of(&alone, r.limits);
        assert_ok(ith_decoder_open(&one, model_dir(models[m].name), &o, &err), err);
        for (int l = 0; l < NUM_LAYOUTS; l++) {
            ith_ranks_options ranks;
            ith_decoder all;
            char what[128];
            if (!make_ranks(&layouts[l], one.hf.num_experts, &ranks))
                continue;
            snprintf(what, sizeof what, "%s, %s", models[m].name, layouts[l].name);
            o = options_of(&ranks, r.limits);
            assert_ok(ith_decoder_open(&all, model_dir(models[m].name), &o, &err), err);
            feed_both(&one, &all, &r, what);
            compare_answers(&one, &all, &r, what);
            int64_t cp = ranks.cp_size;
            assert_int_equal(all.cache.capacity,
                             cp > 1 ? ith_div_ceil(CAPACITY, cp) + 3 : CAPACITY);
            if (cp > 1) {
                assert_true(all.cache.capacity < LONGEST);
                int64_t part = ith_plan_peak(all.session.ctx.plan, ITH_MEM_ACTIVATIONS),
                        whole = ith_plan_peak(one.session.ctx.plan, ITH_MEM_ACTIVATIONS);
                if (5 * part > 4 * whole)
                    fail_msg("%s: %lld bytes planned, alone %lld", what, (long long)part,
                             (long long)whole);
            }
            ith_decoder_close(&all);
        }
        ith_decoder_close(&one);
        ith_free(r.pixels);
    }
}

/* ---- blocks ---- */

static void same_block_answers(const ith_block_answer *a, const ith_block_answer *b,
                               const char *what)
{
    for (int64_t i = 0; i < BATCH; i++)
        if (a[i].end != b[i].end || a[i].steps != b[i].steps || a[i].edits != b[i].edits ||
            memcmp(a[i].row.ids, b[i].row.ids, (size_t)a[i].end * 4) != 0)
            fail_msg("%s: prompt %lld: %lld tokens in %lld steps, alone %lld in %lld, or others",
                     what, (long long)i, (long long)(b[i].end - b[i].prompt), (long long)b[i].steps,
                     (long long)(a[i].end - a[i].prompt), (long long)a[i].steps);
}

static void test_blocks_are_those_of_one_rank(void **state)
{
    (void)state;
    const struct model m = {"llada2", 56, false};
    const ith_ranks_options alone = {0};
    ith_block_decoder one;
    ith_block_answer wanted[2][BATCH], got[BATCH];
    ith_ids prompts[BATCH];
    request r;
    make_request(&m, &r);
    for (int64_t b = 0; b < BATCH; b++)
        prompts[b] = (ith_ids){.ids = r.ids[b], .count = lengths[b]};
    ith_decoder_options o = options_of(&alone, r.limits);
    o.capacity = ith_block_row_len(LONGEST, STEPS, BLOCK);
    ith_block_how how[2] = {{.block = BLOCK,
                             .steps = BLOCK,
                             .threshold = 0.9,
                             .max_new = STEPS,
                             .mask_id = 57,
                             .edit = true,
                             .edit_threshold = 0.02,
                             .max_post_steps = 3}};
    how[1] = how[0];
    how[1].temperature = 0.8;
    how[1].seed = 3;
    assert_ok(ith_block_decoder_open(&one, model_dir(m.name), &o, BLOCK, &err), err);
    for (int k = 0; k < 2; k++)
        assert_ok(ith_block_decoder_generate(&one, prompts, BATCH, &how[k], wanted[k], &err), err);
    for (int l = 0; l < NUM_LAYOUTS; l++) {
        ith_block_decoder all;
        if (!make_ranks(&layouts[l], one.hf.num_experts, &o.ranks))
            continue;
        assert_ok(ith_block_decoder_open(&all, model_dir(m.name), &o, BLOCK, &err), err);
        for (int k = 0; k < 2; k++) {
            assert_ok(ith_block_decoder_generate(&all, prompts, BATCH, &how[k], got, &err), err);
            same_block_answers(wanted[k], got, layouts[l].name);
            for (int64_t i = 0; i < BATCH; i++)
                ith_block_answer_deinit(&got[i]);
        }
        ith_block_decoder_close(&all);
    }
    for (int64_t i = 0; i < 2 * BATCH; i++)
        ith_block_answer_deinit(&wanted[i / BATCH][i % BATCH]);
    ith_block_decoder_close(&one);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_logits_and_answers_are_those_of_one_rank),
        cmocka_unit_test(test_blocks_are_those_of_one_rank)};
    if (argc < 2)
        return 2;
    cases_dir = argv[1];
    if (argc > 2 && strcmp(argv[2], "device=cuda") == 0)
        device = ITH_USE_CUDA;
    ith_session session = {0};
    ith_status status = ith_comm_open_world(&world, 120, &err);
    if (status == ITH_OK) /* is there one? */
        status = ith_session_open(&session, device, ith_narrow(world->local_rank), 1, false, &err);
    if (status != ITH_OK) {
        fprintf(stderr, "%s\n", err.text);
        return status == ITH_ERR_UNSUPPORTED && device == ITH_USE_CUDA ? 77 : 1;
    }
    ith_session_close(&session);
    int failed = cmocka_run_group_tests_name("cut cache", tests, NULL, NULL);
    ith_comm_close(world);
    return failed;
}

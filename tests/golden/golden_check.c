/* golden_check.c - runs directories of reference vectors and prints each error beside its bound.
 *
 *     golden_check [device=cpu|cuda] [dtype=float32|bfloat16] [threads=N] [chunk=N]
 *                  [keep=all|attention|input|host] [cp=N] [ulysses=N] [zero=N] [draws=N]
 *                  [backend=ref] DIR...
 *
 * Under mpirun the ranks are dp x cp: documents are dealt to the dp groups, each document's tokens
 * are sliced over the cp ranks, of which `ulysses` neighbours exchange heads (default: all) and the
 * rest is a ring. The same values must come out, within the same bounds.
 *
 * DIR/hf is a model directory; ref.safetensors holds input_ids, labels, logits (and packed_ids,
 * packed_labels, cu_seqlens, packed_logits, greedy), or of a diffusion model clean, noisy, labels
 * and three logits; grads/, grads_packed/, after3/ hold gradients and the weights after three AdamW
 * steps under the names of hf/; ref.json holds losses and the AdamW settings; decode.json of a
 * diffusion model decoding runs. Exit 0 when every error is within its bound, 1 when one is not, 77
 * when a directory is not there, 2 when the request is wrong. Bounds for float32: logits 2e-5 of
 * the largest logit, gradients 1e-4 and weights after three steps 1e-3 in relative norm, losses
 * 1e-5, gradient norms 3e-3 relative.
 *
 * For bfloat16 the bound of a value is twice the error that the plain bf16 reference operators make
 * in the same place, plus a floor of 2^-8. Both are root mean squares over `draws` (8) models: the
 * first is the directory's, the others have its weights a little off, and what they should give is
 * what the reference gives in float32. One draw would not do: a tensor of four numbers is now and
 * then right by chance. A gradient norm is one number, whose error may cancel to nothing; it is
 * measured by the relative error of all gradients together, which is the most that of their norm
 * can be. Which experts a token gets is discrete, and where two are nearly equal rounding decides:
 * in bfloat16 every token takes the choice of the float32 run, and the scores are compared. */
#include "golden.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/rng.h"
#include "data/noise.h"

#define DRAWS 8
#define DRAW_SPREAD (1.0 / 256) /* weights of a draw, relative */

ith_error golden_err;

void die_on(ith_status status)
{
    if (status != ITH_OK) {
        fprintf(stderr, "golden_check: %s\n", golden_err.text);
        exit(1);
    }
}

/* Diffusion: clean, noisy and labels [1,L] (labels at the masked positions themselves). */
static void run_diffusion(golden *g, const options *o, results *r)
{
    int64_t len = ith_st_numel(entry_of(g, "clean"));
    int32_t *clean = ints(entry_of(g, "clean")), *noisy = ints(entry_of(g, "noisy")),
            *labels = ints(entry_of(g, "labels"));
    float *weights = ith_malloc(len * 4);
    for (int64_t i = 0; i < len; i++)
        weights[i] = 1;
    mask_kind blocks = {(int64_t)number(g->json, "block_size"), false}, all = {0, true};
    ith_batch_limits limits = {.max_tokens = len, .max_docs = 1, .max_doc_tokens = len};
    static const struct {
        const char *what, *logits, *loss, *grads;
        bool noisy, keep_all, in_blocks;
    } kinds[] = {
        {"blocks", "noisy_logits", "loss", "grads", true, true, true},
        {"bidirectional", "full_logits", "loss_full_bidirectional", NULL, false, true, false},
        {"block-causal", "block_causal_logits", NULL, NULL, false, true, true},
        {"skipping", NULL, "loss", "grads", true, false, true}};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        ith_noise_options no = {.blocks = kinds[k].noisy,
                                .block_size = blocks.block,
                                .mask_id = (int32_t)number(g->json, "mask_id"),
                                .same_token = true,
                                .keep_all = kinds[k].keep_all};
        ith_noiser *noiser = NULL;
        ith_micro_batch batch;
        die_on(ith_noiser_create(&noiser, &no, &limits, &golden_err));
        ith_noiser_begin(noiser);
        ith_noiser_add(noiser, clean, noisy, labels, weights, len, 0);
        ith_noiser_end(noiser, &batch);
        mask_kind mask = kinds[k].in_blocks ? blocks : all;
        check_batch(g, o, &batch, mask, kinds[k].what,
                    kinds[k].logits ? entry_of(g, kinds[k].logits) : NULL,
                    kinds[k].loss ? number(g->json, kinds[k].loss) : (double)NAN, kinds[k].grads,
                    r);
        if (kinds[k].noisy)
            check_adamw(g, o, &batch, mask, r);
        ith_noiser_destroy(noiser);
    }
    ith_free(clean);
    ith_free(noisy);
    ith_free(labels);
    ith_free(weights);
}

static void run_golden(golden *g, const options *o, results *r)
{
    const mask_kind causal = {0, false};
    if (entry_of(g, "noisy")) {
        run_diffusion(g, o, r);
        check_decode(g, o, r);
        return;
    }
    const ith_st_entry *ids_entry = entry_of(g, "input_ids"), *packed = entry_of(g, "packed_ids");
    int32_t *ids = ints(ids_entry), *labels = ints(entry_of(g, "labels"));
    int32_t cu[2] = {0, (int32_t)ith_st_numel(ids_entry)};
    ith_micro_batch one = batch_of(ids, labels, cu, 1);
    add_media(g, &one, &(ith_mesh){.dp_size = 1}, &one);
    check_batch(g, o, &one, causal, "one document", entry_of(g, "logits"), number(g->json, "loss"),
                "grads", r);
    check_adamw(g, o, &one, causal, r);
    check_greedy(g, o, &one, r);
    free_batch(&one);
    ith_free(ids);
    ith_free(labels);
    if (!packed)
        return;
    const ith_st_entry *cu_entry = entry_of(g, "cu_seqlens");
    int32_t *packed_cu = ints(cu_entry);
    ids = ints(packed);
    labels = ints(entry_of(g, "packed_labels"));
    ith_micro_batch many = batch_of(ids, labels, packed_cu, ith_st_numel(cu_entry) - 1);
    add_media(g, &many, &(ith_mesh){.dp_size = 1}, &many);
    check_batch(g, o, &many, causal, "packed", entry_of(g, "packed_logits"),
                number(g->json, "packed_loss"), "grads_packed", r);
    free_batch(&many);
    ith_free(ids);
    ith_free(labels);
    ith_free(packed_cu);
}

/* Weights of this draw, which both types hold exactly: what is measured is arithmetic. */
static void draw_weights(ith_st_reader *weights, int64_t draw, float **copies)
{
    uint64_t stream = ith_rng_stream("golden_check"), at = 0;
    for (int64_t i = 0; i < ith_st_count(weights); i++) {
        ith_st_entry *e = (ith_st_entry *)(uintptr_t)ith_st_at(weights, i);
        int64_t n = ith_st_numel(e);
        float *x = copies[i] = ith_malloc(n * 4 + 4);
        if (!x)
            exit(1);
        ith_convert(x, ITH_F32, e->data, e->dtype, n);
        for (int64_t j = 0; j < n; j++) {
            double u = ith_rng_uniform((uint64_t)draw, stream, at++);
            x[j] *= (float)(1 + (2 * u - 1) * DRAW_SPREAD);
            x[j] = ith_bf16_to_f32(ith_f32_to_bf16(x[j]));
        }
        if (e->dtype == ITH_F32)
            e->data = x;
        else
            ITH_ASSERT(e->dtype == ITH_BF16);
    }
}

/* bf16: errors of the run and of the yardstick over all draws. */
static void run_draws(golden *g, const options *o, const char *weights, results *r,
                      results *yardstick)
{
    options plain = *o, own = *o;
    plain.device = ITH_USE_CPU;
    plain.reference = true;
    for (int64_t draw = 0; draw < o->draws; draw++) {
        results exact = {0}, reference = {0}, got = {0};
        int64_t count = ith_st_count(g->weights);
        float **copies = ith_calloc(count, sizeof *copies);
        if (draw)
            draw_weights(g->weights, draw, copies);
        plain.draw = own.draw = draw;
        plain.dtype = ITH_F32;
        plain.kind = RUN_LEADS;
        run_golden(g, &plain, &exact);
        plain.dtype = ITH_BF16;
        plain.kind = own.kind = RUN_FOLLOWS;
        run_golden(g, &plain, &reference);
        rewind_truth();
        run_golden(g, &own, &got);
        free_truth();
        add_draw(yardstick, &reference);
        add_draw(r, &got);
        ith_free(exact.rows);
        ith_free(reference.rows);
        ith_free(got.rows);
        for (int64_t i = 0; i < count; i++)
            ith_free(copies[i]);
        ith_free(copies);
        ith_st_close(g->weights);
        die_on(ith_st_open(&g->weights, weights, &golden_err));
    }
    end_draws(r, o->draws);
    end_draws(yardstick, o->draws);
}

static int64_t check_dir(const char *dir, const options *o)
{
    golden g = {.dir = dir};
    ith_buf path = {0};
    ith_path_join(&path, dir, "hf");
    die_on(ith_hf_config_load(&g.config, path.data, &golden_err));
    ith_mesh_set_ulysses(o->mesh, o->ulysses ? o->ulysses : o->mesh->cp_size,
                         g.config.linear_num_value_heads > 0);
    die_on(ith_st_open(&g.weights, path.data, &golden_err));
    ith_path_join(&path, dir, "ref.safetensors");
    die_on(ith_st_open(&g.ref, path.data, &golden_err));
    ith_path_join(&path, dir, "ref.json");
    die_on(ith_json_load(&g.json, path.data, &golden_err));
    results r = {0}, yardstick = {0};
    ith_path_join(&path, dir, "hf");
    if (o->dtype == ITH_BF16)
        run_draws(&g, o, path.data, &r, &yardstick);
    else
        run_golden(&g, o, &r);
    merge(o, &r);
    merge(o, &yardstick);
    if (o->mesh->world->rank > 0 && !freopen("/dev/null", "w", stdout)) /* rank 0 speaks */
        exit(1);
    int64_t failures = report(&g, &r, o->dtype == ITH_BF16 ? &yardstick : NULL);
    ith_free(r.rows);
    ith_free(yardstick.rows);
    ith_st_close(g.weights);
    ith_st_close(g.ref);
    json_decref(g.json);
    ith_hf_config_deinit(&g.config);
    ith_buf_deinit(&path);
    return failures;
}

static int run_dirs(int argc, char **argv, options *o, ith_comm *world)
{
    int64_t failures = 0, dirs = 0;
    ith_mesh mesh = {0};
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i], *eq = strchr(a, '=');
        if (eq && strncmp(a, "device=", 7) == 0)
            o->device = strcmp(eq, "=cuda") == 0 ? ITH_USE_CUDA : ITH_USE_CPU;
        else if (eq && strncmp(a, "dtype=", 6) == 0)
            o->dtype = strcmp(eq, "=bfloat16") == 0 ? ITH_BF16 : ITH_F32;
        else if (eq && strncmp(a, "threads=", 8) == 0)
            o->threads = (int)strtol(eq + 1, NULL, 10);
        else if (eq && strncmp(a, "chunk=", 6) == 0)
            o->chunk = strtoll(eq + 1, NULL, 10);
        else if (eq && strncmp(a, "draws=", 6) == 0)
            o->draws = ith_max_i64(1, strtoll(eq + 1, NULL, 10));
        else if (eq && strncmp(a, "zero=", 5) == 0)
            o->zero = (int)strtol(eq + 1, NULL, 10);
        else if (eq && strncmp(a, "cp=", 3) == 0)
            o->cp = strtoll(eq + 1, NULL, 10);
        else if (eq && strncmp(a, "ulysses=", 8) == 0)
            o->ulysses = strtoll(eq + 1, NULL, 10);
        else if (eq && strncmp(a, "keep=", 5) == 0)
            o->keep = strcmp(eq, "=all") == 0         ? ITH_KEEP_ALL
                      : strcmp(eq, "=attention") == 0 ? ITH_KEEP_ATTENTION
                      : strcmp(eq, "=host") == 0      ? ITH_KEEP_HOST
                                                      : ITH_KEEP_INPUT;
        else if (eq && strcmp(a, "backend=ref") == 0)
            o->reference = true;
        else if (!ith_path_is_dir(a))
            return fprintf(stderr, "golden_check: %s is not here\n", a), 77;
        else if (o->cp < 1 || world->size % o->cp != 0)
            return fprintf(stderr, "golden_check: cp=%lld does not divide %lld ranks\n",
                           (long long)o->cp, (long long)world->size),
                   2;
        else if (o->ulysses < 0 || (o->ulysses && o->cp % o->ulysses != 0))
            return fprintf(stderr, "golden_check: ulysses=%lld does not divide cp=%lld\n",
                           (long long)o->ulysses, (long long)o->cp),
                   2;
        else {
            die_on(ith_mesh_open(&mesh, world, o->cp, &golden_err));
            o->mesh = &mesh;
            failures += check_dir(a, o);
            ith_mesh_close(&mesh);
            dirs++;
        }
    }
    if (!dirs)
        return fprintf(stderr, "golden_check: no directory given\n"), 2;
    return failures ? 1 : 0;
}

int main(int argc, char **argv)
{
    options o = {.device = ITH_USE_CPU, .dtype = ITH_F32, .keep = -1, .cp = 1, .draws = DRAWS};
    ith_comm *world = NULL;
    die_on(ith_comm_open_world(&world, 120, &golden_err));
    int code = run_dirs(argc, argv, &o, world);
    ith_comm_close(world);
    return code;
}

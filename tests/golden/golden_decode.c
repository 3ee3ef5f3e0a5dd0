/* golden_decode.c - generation with a cache against the reference, token for token. */
#include "golden.h"

#include <math.h>
#include <string.h>

#include "base/file.h"
#include "generate/block_decoder.h"
#include "generate/decoder.h"

#define GREEDY_PROMPT 9 /* tokens of greedy that are the prompt, unless ref.json says */

typedef struct {
    const int32_t *want;
    int64_t count, wrong;
} greedy_check;

static bool on_greedy(void *arg, int64_t i, int32_t id, bool is_stop)
{
    (void)i;
    (void)is_stop;
    greedy_check *c = arg;
    c->wrong += id != c->want[c->count];
    c->count++;
    return true;
}

void check_greedy(const golden *g, const options *o, const ith_micro_batch *one, results *r)
{
    const ith_st_entry *entry = entry_of(g, "greedy");
    if (!entry || o->dtype != ITH_F32 || o->reference)
        return;
    json_t *given = json_object_get(g->json, "greedy_prompt");
    int64_t total = ith_st_numel(entry),
            prompt = given ? (int64_t)json_integer_value(given) : GREEDY_PROMPT;
    int32_t *all = ints(entry);
    ith_buf dir = {0};
    ith_path_join(&dir, g->dir, "hf");
    ith_decoder_options d = {.device = o->device,
                             .threads = o->threads,
                             .set_dtype = true,
                             .dtype = ITH_F32,
                             .batch = 1,
                             .capacity = total + 1,
                             .max_append = prompt,
                             .media = vision_limits(one)};
    ith_decoder decoder;
    die_on(ith_decoder_open(&decoder, dir.data, &d, &golden_err));
    greedy_check c = {all + prompt, 0, 0};
    const ith_decoder_media media = {one->pixels, one->grids, one->num_grids};
    ith_generate_options how = {.sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1},
                                .media = &media,
                                .max_new = total - prompt,
                                .token = on_greedy,
                                .arg = &c};
    ith_ids ids = {.ids = all, .count = prompt};
    die_on(ith_decoder_generate(&decoder, &ids, 1, &how, &golden_err));
    record(r, (double)(c.wrong + llabs(total - prompt - c.count)), 0, "greedy tokens that differ");
    ith_decoder_close(&decoder);
    ith_buf_deinit(&dir);
    ith_free(all);
}

typedef struct {
    const json_t *trace;
    double worst;
    int64_t next; /* token within the step */
    int64_t step;
    bool wrong;
} decode_trace;

static void on_written(void *arg, int64_t i, int64_t position, int32_t id, double confidence,
                       int64_t step)
{
    decode_trace *t = arg;
    (void)i;
    if (step != t->step)
        t->next = 0;
    t->step = step;
    const json_t *accepted = json_object_get(json_array_get(t->trace, (size_t)step), "accepted");
    bool found = false;
    for (size_t k = 0; k < json_array_size(accepted); k++) {
        const json_t *a = json_array_get(accepted, k);
        if (json_integer_value(json_array_get(a, 0)) != position)
            continue;
        found = json_integer_value(json_array_get(a, 1)) == id;
        t->worst = fmax(t->worst, fabs(json_number_value(json_array_get(a, 2)) - confidence));
    }
    t->wrong |= !found;
}

/* The head, float32, wherever it lies. */
static void scale_head(ith_block_decoder *d, double scale)
{
    ith_device *dev = d->session.ctx.device;
    ith_tensor head = d->model->params[d->model->head].w;
    float *w = ith_malloc(ith_tensor_bytes(head));
    if (!w)
        exit(1);
    die_on(dev->download(dev, w, head.data, ith_tensor_bytes(head), &golden_err));
    die_on(dev->sync(dev, &golden_err));
    for (int64_t i = 0; i < ith_numel(head); i++)
        w[i] *= (float)scale;
    die_on(dev->upload(dev, head.data, w, ith_tensor_bytes(head), &golden_err));
    die_on(dev->sync(dev, &golden_err));
    ith_free(w);
}

/* batch > 1: the same prompt in every place must give the same answer in every place. */
static void check_decode_run(const golden *g, const options *o, const json_t *run, int64_t batch,
                             results *r)
{
    int64_t num_prompt = 0, num_row = 0, num_out = 0, max_new = (int64_t)number(run, "gen_length");
    int32_t *prompt = json_ints(json_object_get(run, "prompt"), &num_prompt);
    int32_t *row = json_ints(json_object_get(run, "sequence"), &num_row);
    int32_t *generated = json_ints(json_object_get(run, "generated"), &num_out);
    int32_t stop = (int32_t)number(run, "eos_id");
    const json_t *threshold = json_object_get(run, "threshold"),
                 *edit = json_object_get(run, "edit_threshold"); /* absent or null: no edits */
    const char *name = json_string_value(json_object_get(run, "name"));
    double scale = number(run, "head_scale");
    decode_trace trace = {.trace = json_object_get(run, "trace"), .step = -1};
    ith_block_how how = {.block = (int64_t)number(run, "block_length"),
                         .steps = (int64_t)number(run, "steps"),
                         .minimal_topk = 1,
                         .threshold = json_is_null(threshold) ? 2 : json_number_value(threshold),
                         .max_new = max_new,
                         .edit = json_is_number(edit),
                         .edit_threshold = json_number_value(edit),
                         .max_post_steps =
                             json_integer_value(json_object_get(run, "max_post_steps")),
                         .mask_id = (int32_t)number(run, "mask_id"),
                         .stop_ids = &stop,
                         .num_stop_ids = 1,
                         .written = batch == 1 ? on_written : NULL,
                         .arg = &trace};
    ith_decoder_options opened = {.device = o->device,
                                  .threads = o->threads,
                                  .set_dtype = true,
                                  .dtype = ITH_F32,
                                  .batch = batch,
                                  .capacity = ith_block_row_len(num_prompt, max_new, how.block),
                                  .max_append = batch * num_prompt};
    ith_block_decoder d;
    ith_block_answer answers[3];
    ith_ids prompts[3];
    ith_buf path = {0};
    ith_path_join(&path, g->dir, "hf");
    die_on(ith_block_decoder_open(&d, path.data, &opened, how.block, &golden_err));
    scale_head(&d, scale);
    for (int64_t i = 0; i < batch; i++)
        prompts[i] = (ith_ids){.ids = prompt, .count = num_prompt};
    die_on(ith_block_decoder_generate(&d, prompts, batch, &how, answers, &golden_err));
    for (int64_t i = 0; i < batch; i++) {
        const ith_block_answer *a = &answers[i];
        bool same = a->row.count == num_row && memcmp(a->row.ids, row, (size_t)num_row * 4) == 0 &&
                    a->end - a->prompt == num_out &&
                    memcmp(a->row.ids + a->prompt, generated, (size_t)num_out * 4) == 0;
        record(r, same && !trace.wrong ? 0 : 1, 0, "decode %s tokens", name);
        record(r, fabs((double)a->steps - number(run, "forwards")), 0, "decode %s steps", name);
        record(r, fabs((double)a->edits - json_number_value(json_object_get(run, "edits"))), 0,
               "decode %s edits", name);
        record(r, fabs((double)(d.forwards + 1) - number(run, "forwards_with_cache")), 0,
               "decode %s forwards but the last commit", name);
        if (batch == 1)
            record(r, trace.worst, scale > 1 ? 1e-5 : 1e-6, "decode %s confidence", name);
        ith_block_answer_deinit(&answers[i]);
    }
    ith_block_decoder_close(&d);
    ith_buf_deinit(&path);
    ith_free(prompt);
    ith_free(row);
    ith_free(generated);
}

void check_decode(const golden *g, const options *o, results *r)
{
    ith_buf path = {0};
    json_t *json = NULL;
    ith_path_join(&path, g->dir, "decode.json");
    bool can = ith_path_exists(path.data) && o->dtype == ITH_F32 && !o->reference;
    if (can) {
        die_on(ith_json_load(&json, path.data, &golden_err));
        const json_t *runs = json_object_get(json, "runs");
        for (size_t i = 0; i < json_array_size(runs); i++)
            for (int64_t batch = 1; batch <= 3; batch += 2)
                check_decode_run(g, o, json_array_get(runs, i), batch, r);
        json_decref(json);
    }
    ith_buf_deinit(&path);
}

/* cmd_data.c - `ithaca data`: what a run trains on, as tokens with their mask, and how well the
 * samples fill the micro-batches. */
#include "base/checked.h"
#include "base/utf8.h"
#include "checkpoint/model_dir.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "base/file.h"
#include "data/batching.h"
#include "model/media_open.h"
#include "model/model.h"
#include "train/batch_work.h"
#include "train/diffusion.h"
#include "train/step.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#define HISTOGRAM_BINS 32
#define BAR_WIDTH 50
#define MAX_PATH_SHOWN 200 /* it may be a data: URI */

typedef struct {
    ith_config config;
    ith_config_layout layout;
    ith_tokenizer *tokenizer;
    ith_chat *chat;
    ith_pool *pool;
    ith_hf_config hf;
    ith_media *media; /* NULL: the model reads text only, or has no config.json here */
    ith_samples *samples;
    double flop_per_byte; /* of the device */
    ith_noise_options noise;
    bool eval;
    bool colours;
    ith_buf out;
} view;

/* Colours alternate between tokens, so that their borders show. Trained text is green. */
static const char *const colour_of[2][2] = {{"\033[2m", "\033[2;4m"},
                                            {"\033[32;1m", "\033[32;1;4m"}};

/* The bytes of a token so that a terminal shows all of them: line ends, control characters and
 * parts of characters are escaped. A line end also ends the line. */
static void put_token(view *v, int32_t id)
{
    const char *bytes = NULL;
    int64_t len = 0;
    if (ith_tokenizer_token(v->tokenizer, id, &bytes, &len, NULL, NULL) != ITH_OK) {
        ith_buf_printf(&v->out, "<%d>", id);
        return;
    }
    for (const char *p = bytes, *end = bytes + len; p < end;) {
        uint32_t c = 0;
        int n = ith_utf8_decode(p, end, &c);
        if (n > 0 && c >= ' ' && !(c >= 0x7f && c < 0xa0))
            ith_buf_append(&v->out, p, n);
        else if (c == '\n' && n > 0)
            ith_buf_puts(&v->out, "\\n");
        else
            ith_buf_printf(&v->out, "\\x%02x", (unsigned)(unsigned char)*p);
        p += n > 1 && c >= ' ' && !(c >= 0x7f && c < 0xa0) ? n : 1;
    }
}

static bool ends_line(const view *v, int32_t id)
{
    const char *bytes = NULL;
    int64_t len = 0;
    return ith_tokenizer_token(v->tokenizer, id, &bytes, &len, NULL, NULL) == ITH_OK && len > 0 &&
           bytes[len - 1] == '\n';
}

static bool is_media(const view *v, int32_t id)
{
    const ith_media_tokens *m = v->media ? ith_media_ids(v->media) : NULL;
    return m && (id == m->image || id == m->video);
}

/* Tokens from t on that are shown as one: those of a frame, else 1. */
static int64_t run_of(const view *v, const int32_t *ids, int64_t t, int64_t n)
{
    int64_t end = t + 1;
    while (is_media(v, ids[t]) && end < n && ids[end] == ids[t])
        end++;
    return end - t;
}

/* One document. Without colours tokens are divided by | and the trained ones stand in [[ ]]. */
static void put_tokens(view *v, const int32_t *ids, const bool *trained, int64_t n)
{
    for (int64_t t = 0, run = 1; t < n; t += run) {
        run = run_of(v, ids, t, n);
        bool begins = trained[t] && (t == 0 || !trained[t - 1]);
        bool ends = trained[t] && (t + 1 == n || !trained[t + 1]);
        if (v->colours)
            ith_buf_puts(&v->out, colour_of[trained[t]][t % 2]);
        else
            ith_buf_puts(&v->out, begins ? "[[" : (t && !ends_line(v, ids[t - 1]) ? "|" : ""));
        put_token(v, ids[t]);
        if (run > 1)
            ith_buf_printf(&v->out, " x %" PRId64, run);
        if (v->colours)
            ith_buf_puts(&v->out, "\033[0m");
        else if (ends)
            ith_buf_puts(&v->out, "]]");
        if (ends_line(v, ids[t]) || t + run == n)
            ith_buf_putc(&v->out, '\n');
    }
}

/* The images and videos of a sample, a line each. */
static void put_media(view *v, const ith_sample *s)
{
    for (int64_t i = 0; i < s->num_media; i++) {
        const ith_media_item *m = &s->media[i];
        ith_buf_printf(&v->out, "%s %" PRId64 ": %.*s: ", m->num_frames ? "video" : "image", i + 1,
                       MAX_PATH_SHOWN, ith_samples_media_path(v->samples, m));
        if (m->num_frames)
            ith_buf_printf(&v->out, "%d x ", m->grid.t);
        ith_buf_printf(&v->out, "%d x %d patches, %" PRId64 " tokens\n", m->grid.h, m->grid.w,
                       ith_media_features(ith_media_ids(v->media), m->grid));
    }
}

static ith_status put_sample(view *v, int64_t entry, ith_error *err)
{
    ith_sample s = ith_samples_get(v->samples, entry);
    bool *trained = NULL;
    char where[PATH_MAX];
    ITH_TRY(ith_alloc_zero((void **)&trained, s.num_tokens, sizeof(bool), "view", err));
    for (int64_t r = 0; r < s.num_runs; r++)
        for (int64_t t = s.runs[r].begin; t < s.runs[r].end; t++)
            trained[t] = true;
    ith_samples_where(v->samples, s.part, s.row, where, sizeof where);
    ith_buf_printf(&v->out, "--- sample %" PRId64 " of %" PRId64 ": %s, %s", entry + 1,
                   ith_samples_count(v->samples), ith_samples_part_name(v->samples, s.part), where);
    if (s.cut)
        ith_buf_printf(&v->out, ", messages 1-%d", s.cut);
    ith_buf_printf(&v->out, ": %" PRId64 " tokens, %" PRId64 " trained, weight %g\n", s.num_tokens,
                   s.num_labels, s.weight_sum);
    put_media(v, &s);
    put_tokens(v, s.ids, trained, s.num_tokens);
    if (s.full_tokens > s.num_tokens)
        ith_buf_printf(&v->out, "... %" PRId64 " more tokens, cut off by cutoff_len\n",
                       s.full_tokens - s.num_tokens);
    ith_free(trained);
    return ITH_OK;
}

/* What the run deals documents by; whole gradients are taken to fit. */
static void deal_like_the_run(const view *v, ith_batcher_options *o)
{
    ith_run_shape run = {.config = &v->config,
                         .layout = &v->layout,
                         .hf = &v->hf,
                         .samples = v->samples,
                         .noise = ith_is_diffusion(&v->config, &v->hf) ? &v->noise : NULL,
                         .flop_per_byte = v->flop_per_byte,
                         .sums_once = v->layout.grad_accum > 1};
    ith_deal_options(&run, !v->eval, o);
    o->media = v->media;
}

/* Links count where ranks share documents. */
static ith_status find_device(view *v, ith_error *err)
{
    static const ith_use_device use[] = {ITH_USE_AUTO, ITH_USE_CPU, ITH_USE_CUDA};
    ith_session session;
    if (v->layout.world_size == 1)
        return ITH_OK;
    ITH_TRY(ith_session_open(&session, use[v->config.device], 0, 1, true, err));
    v->flop_per_byte = ith_flop_per_byte(session.ctx.device);
    ith_session_close(&session);
    return ITH_OK;
}

/* A micro-batch as the model gets it: a token is trained when the row before it has it as label. */
static ith_status put_micro_batch(view *v, ith_batcher *batcher, int64_t rank, int64_t j,
                                  const ith_batch_step *step, ith_error *err)
{
    ith_micro_batch mb;
    const ith_config_layout *l = &v->layout;
    ITH_TRY(ith_batcher_fill(batcher, j, &mb, err));
    bool *trained = NULL;
    if (!mb.whole && rank % l->cp_size > 0) /* shown with the first rank that shares it */
        return ITH_OK;
    ITH_TRY(ith_alloc_zero((void **)&trained, ith_max_i64(mb.num_tokens, 1), sizeof(bool), "view",
                           err));
    ith_buf_printf(&v->out, "=== step %" PRId64 ", ", step->step + 1);
    if (mb.whole)
        ith_buf_printf(&v->out, "rank %" PRId64 " of %" PRId64 ", ", rank + 1, l->world_size);
    else if (l->dp_size > 1)
        ith_buf_printf(&v->out, "group %" PRId64 " of %" PRId64 ", ", rank / l->cp_size + 1,
                       l->dp_size);
    ith_buf_printf(&v->out,
                   "micro-batch %" PRId64 " of %" PRId64 ": %" PRId64 " document%s, %" PRId64
                   " tokens, %" PRId64 " trained, weight %g of %g\n",
                   j + 1, step->num_micro, mb.num_docs, mb.num_docs == 1 ? "" : "s", mb.num_tokens,
                   mb.num_labels, mb.weight_sum, step->weight_sum);
    for (int64_t d = 0; d < mb.num_docs; d++) {
        int64_t begin = mb.cu_seqlens[d], n = mb.cu_seqlens[d + 1] - begin;
        for (int64_t t = 1; t < n; t++)
            trained[t] = mb.labels[begin + t - 1] != ITH_LABEL_IGNORE;
        trained[0] = false;
        ith_buf_printf(&v->out, "--- rows %" PRId64 "-%" PRId64 ": sample %" PRId64 "\n", begin,
                       begin + n - 1, mb.sample[d] + 1);
        put_tokens(v, mb.ids + begin, trained, n);
    }
    ith_free(trained);
    return ITH_OK;
}

static ith_status put_rank(view *v, ith_batcher *batcher, int64_t rank, int64_t number,
                           ith_error *err)
{
    ith_batch_step step = {0};
    for (int64_t i = 0; i < number; i++)
        if (!ith_batcher_next(batcher, &step))
            return ith_fail(err, ITH_ERR_USAGE,
                            "data: --step %" PRId64 ": the run has %" PRId64 " steps", number, i);
    for (int64_t j = 0; j < step.num_micro; j++)
        ITH_TRY(put_micro_batch(v, batcher, rank, j, &step, err));
    return ITH_OK;
}

/* What each group of ranks shares, and what each rank computes alone. */
static ith_status put_step(view *v, int64_t number, ith_error *err)
{
    int64_t *train = NULL, *held = NULL, num_train = 0, num_held = 0;
    const ith_config *c = &v->config;
    ith_status status = ITH_OK;
    if (!v->eval && !c->eval_dataset && c->eval_split_ratio > 0)
        ITH_TRY(ith_samples_split(v->samples, c->eval_split_ratio, (uint64_t)c->seed, &train,
                                  &num_train, &held, &num_held, err));
    for (int64_t rank = 0; rank < v->layout.world_size && status == ITH_OK; rank++) {
        int64_t group = rank / v->layout.cp_size;
        ith_batcher_options o = v->eval ? ith_batcher_eval_options(c, &v->layout, group)
                                        : ith_batcher_options_from(c, &v->layout, group);
        ith_batcher *batcher = NULL;
        o.pool = v->pool;
        o.subset = train;
        o.num_subset = num_train;
        deal_like_the_run(v, &o);
        o.cp_rank = rank % o.cp_size;
        status = ith_batcher_create(&batcher, v->samples, &o, err);
        if (status == ITH_OK)
            status = put_rank(v, batcher, rank, number, err);
        ith_batcher_destroy(batcher);
    }
    ith_free(train);
    ith_free(held);
    return status;
}

static void put_summary(view *v)
{
    int64_t lost = 0, truncated = ith_samples_num_truncated(v->samples, &lost);
    int64_t tokens = ith_samples_num_tokens(v->samples);
    int64_t labels = ith_samples_num_labels(v->samples), n = ith_samples_count(v->samples);
    ith_buf_printf(&v->out,
                   "%" PRId64 " sample%s, %" PRId64 " tokens (%.1f each), %" PRId64
                   " trained (%.1f %%)\n",
                   n, n == 1 ? "" : "s", tokens, (double)tokens / (double)n, labels,
                   100.0 * (double)labels / (double)tokens);
    if (truncated)
        ith_buf_printf(&v->out,
                       "%" PRId64 " sample%s cut to cutoff_len %" PRId64 ": %" PRId64
                       " tokens not used\n",
                       truncated, truncated == 1 ? "" : "s", v->config.cutoff_len, lost);
    ith_samples_drop_report(v->samples, &v->out);
}

/* Lengths by powers of two. */
static void put_histogram(view *v)
{
    int64_t bins[HISTOGRAM_BINS] = {0}, n = ith_samples_count(v->samples), most = 1;
    int first = HISTOGRAM_BINS, last = 0;
    for (int64_t i = 0; i < n; i++) {
        int bin = 0;
        while (bin + 1 < HISTOGRAM_BINS && ith_samples_length(v->samples, i) > (int64_t)1 << bin)
            bin++;
        most = ith_max_i64(most, ++bins[bin]);
        first = bin < first ? bin : first;
        last = bin > last ? bin : last;
    }
    ith_buf_puts(&v->out, "\ntokens per sample\n");
    for (int bin = first; bin <= last; bin++) {
        ith_buf_printf(&v->out, "%9" PRId64 " - %-9" PRId64 " %9" PRId64 " ",
                       bin ? ((int64_t)1 << (bin - 1)) + 1 : 1, (int64_t)1 << bin, bins[bin]);
        for (int64_t k = 0; k < ith_div_ceil(bins[bin] * BAR_WIDTH, most); k++)
            ith_buf_putc(&v->out, '#');
        ith_buf_putc(&v->out, '\n');
    }
}

static const struct {
    ith_batching strategy;
    const char *name;
} strategies[] = {{ITH_BATCHING_NORMAL, "normal"},
                  {ITH_BATCHING_PADDING_FREE, "padding_free"},
                  {ITH_BATCHING_DYNAMIC, "dynamic_batching"},
                  {ITH_BATCHING_DYNAMIC_PADDING_FREE, "dynamic_padding_free"},
                  {ITH_BATCHING_PACKING, "packing"}};

/* What each strategy would make of these samples; the one of the config is marked. */
static ith_status put_packing(view *v, ith_error *err)
{
    ith_buf_printf(&v->out,
                   "\nbatching_strategy      steps/epoch  micro-batches  docs each  tokens each  "
                   "filled  if padded%s\n",
                   v->layout.world_size > 1 ? "  busiest" : "");
    for (size_t i = 0; i < sizeof strategies / sizeof strategies[0]; i++) {
        ith_batcher_options o = ith_batcher_options_from(&v->config, &v->layout, 0);
        ith_batcher *b = NULL;
        o.strategy = strategies[i].strategy;
        deal_like_the_run(v, &o);
        o.carry_over = false;
        o.num_epochs = 1;
        ITH_TRY(ith_batcher_create(&b, v->samples, &o, err));
        ith_batch_report r = ith_batcher_report(b);
        double micro = (double)ith_max_i64(r.num_micro, 1);
        ith_buf_printf(&v->out,
                       "%s %-20s %11" PRId64 "  %13" PRId64 "  %9.1f  %11.0f  %5.1f%%  %8.1f%%",
                       o.strategy == v->config.batching_strategy ? "*" : " ", strategies[i].name,
                       r.num_steps, r.num_micro, (double)r.num_docs / micro,
                       (double)r.num_tokens / micro, 100 * r.efficiency, 100 * r.pad_efficiency);
        if (v->layout.world_size > 1)
            ith_buf_printf(&v->out, "  %7.2f", r.work_dealt / r.work_even);
        ith_buf_putc(&v->out, '\n');
        ith_batcher_destroy(b);
    }
    ith_buf_printf(&v->out,
                   "filled: of cutoff_len x micro_batch_size = %" PRId64
                   " tokens. Pad tokens are never computed; the last column says what share of\n"
                   "the computed tokens would be real if they were.\n",
                   v->config.cutoff_len * v->config.micro_batch_size);
    if (v->layout.world_size > 1)
        ith_buf_printf(&v->out,
                       "busiest: work of the rank that the others wait for, of %" PRId64
                       "; 1 is even.\n",
                       v->layout.world_size);
    return ITH_OK;
}

/* Whether the model sees is in its config.json; a folder with a tokenizer alone reads text. */
static ith_status open_media(view *v, ith_error *err)
{
    ith_buf path = {0};
    const char *model = v->config.model;
    ith_path_join(&path, model, "config.json");
    ith_status status = ith_buf_check(&path, model, err);
    if (status == ITH_OK && ith_path_exists(path.data)) {
        status = ith_hf_config_load(&v->hf, model, err);
        if (status == ITH_OK)
            status =
                ith_media_open_model(&v->media, model, &v->config, 0, &v->hf, v->tokenizer, err);
    }
    ith_buf_deinit(&path);
    return status;
}

static ith_status open_view(view *v, bool eval, ith_error *err)
{
    const ith_config *c = &v->config;
    const char *key = eval ? "eval_dataset" : "train_dataset";
    if (!(eval ? c->eval_dataset : c->train_dataset))
        return ith_config_fail(c, key, err, "not given; there is nothing to show");
    if (!c->model)
        return ith_config_fail(c, "model", err, "not given; its tokenizer is needed");
    ITH_TRY(ith_config_need_model(c, "", err));
    ITH_TRY(ith_model_dir_check(c->model, ITH_DIR_TOKENIZER, err));
    ITH_TRY(ith_config_resolve_layout(c, ith_config_ranks(c), &v->layout, err));
    ITH_TRY(ith_pool_create(&v->pool, (int)c->nproc, err));
    ITH_TRY(ith_tokenizer_open(&v->tokenizer, c->model, err));
    ITH_TRY(ith_chat_open(&v->chat, c->model, c->custom_chat_template, v->tokenizer, err));
    ITH_TRY(open_media(v, err));
    ith_samples_options o = ith_samples_options_from(c, eval, v->tokenizer, v->chat, v->pool);
    int32_t mask = (int32_t)ith_diffusion_mask(c, &v->hf, v->tokenizer);
    o.media = v->media;
    v->noise = ith_diffusion_shape(c, &v->hf);
    o.mask_id = ith_is_diffusion(c, &v->hf) ? &mask : NULL; /* as a run opens them */
    v->eval = eval;
    return ith_samples_open(&v->samples, &o, err);
}

static ith_status show(view *v, const ith_args *args, ith_error *err)
{
    ITH_TRY(open_view(v, ith_args_flag(args, "eval"), err));
    v->colours = ith_terminal_colours(1);
    int64_t from = ith_args_int(args, "from") - 1, step = ith_args_int(args, "step");
    int64_t rows = ith_args_int(args, "rows"), n = ith_samples_count(v->samples);
    bool stats = ith_args_flag(args, "stats");
    if (from >= n)
        return ith_fail(err, ITH_ERR_USAGE,
                        "data: --from %" PRId64 ": there are %" PRId64 " samples", from + 1, n);
    if (step > 0 || stats)
        ITH_TRY(find_device(v, err));
    if (step > 0)
        ITH_TRY(put_step(v, step, err));
    else if (!stats || ith_args_given(args, "rows"))
        for (int64_t i = from; i < ith_min_i64(from + rows, n); i++)
            ITH_TRY(put_sample(v, i, err));
    put_summary(v);
    if (stats) {
        put_histogram(v);
        ITH_TRY(put_packing(v, err));
    }
    return ith_print(&v->out, err);
}

static ith_status run_data(const ith_args *args, ith_error *err)
{
    view v = {0};
    ITH_TRY(ith_config_load(&v.config, args->positional[0], args->positional + 1,
                            args->num_positional - 1, err));
    ith_status status = show(&v, args, err);
    ith_samples_close(v.samples);
    ith_media_close(v.media);
    ith_hf_config_deinit(&v.hf);
    ith_chat_close(v.chat);
    ith_tokenizer_close(v.tokenizer);
    ith_pool_destroy(v.pool);
    ith_config_deinit(&v.config);
    ith_buf_deinit(&v.out);
    return status;
}

static const ith_option options[] = {
    {.name = "rows",
     .letter = 'n',
     .type = ITH_OPTION_INT,
     .default_text = "3",
     .help = "Samples to show.",
     .min = 0,
     .max = 1e9},
    {.name = "from",
     .type = ITH_OPTION_INT,
     .default_text = "1",
     .help = "The first sample to show.",
     .min = 1,
     .max = 1e15},
    {.name = "step",
     .type = ITH_OPTION_INT,
     .help = "Show the micro-batches of this optimizer step instead, document by document.",
     .min = 1,
     .max = 1e9},
    {.name = "stats",
     .type = ITH_OPTION_FLAG,
     .help = "Show lengths and how well each batching strategy fills its micro-batches."},
    {.name = "eval", .type = ITH_OPTION_FLAG, .help = "Show eval_dataset."},
    {.name = NULL}};

const ith_command ith_cmd_data = {
    .name = "data",
    .arguments = "CONFIG [key=value ...]",
    .summary = "Show samples as tokens with the loss mask, and how they fill batches",
    .details = "On a terminal trained tokens are green and tokens are told apart by underlines. "
               "Elsewhere tokens are divided by | and trained ones stand in [[ ]].\n"
               "What was dropped is listed by reason, with the place of the first.\n",
    .options = options,
    .min_positional = 1,
    .max_positional = -1,
    .takes_overrides = true,
    .run = run_data};

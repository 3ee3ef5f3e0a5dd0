/* batch_work.c - what a document costs a rank, from the shape of the model. docs/parallel.md has
 * the bytes that it sends. */
#include "train/batch_work.h"

#include "base/checked.h"
#include "model/vision.h"

/* Elements that the layers exchange for one token of a group of p ranks, each rank its part of p.
 */
static double exchanged(const ith_hf_config *c, int64_t p)
{
    double sum = 0, rep = (double)ith_max_i64(1, p / c->num_key_value_heads);
    double q = (double)(c->num_attention_heads * c->head_dim),
           kv = (double)(c->num_key_value_heads * c->head_dim) * rep;
    double values = (double)c->linear_num_value_heads,
           v = values * (double)c->linear_value_head_dim, k = 0;
    if (values > 0)
        k = (double)(c->linear_num_key_heads * c->linear_key_head_dim) *
            (double)ith_max_i64(1, p / c->linear_num_key_heads);
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        sum += c->layer_is_linear[l] ? 5 * v + 6 * values + 6 * k : 6 * (q + kv);
    return sum * (double)(p - 1) / (double)p;
}

/* Bytes that the layers of a micro-batch send in ZeRO stages 2 and 3. */
static double round_bytes(const ith_run_shape *run, double element_bytes)
{
    ith_hf_config all = *run->hf;
    int stage = ith_config_zero_stage(run->config);
    double ranks = (double)run->layout->world_size;
    all.num_experts_per_tok = all.num_experts / run->layout->ep_size;
    double weights = ith_config_flops(&all, 1, 0, 0).linear / 6;
    return (ranks - 1) / ranks * weights *
           (stage >= 3                      ? 2 * element_bytes + 4
            : stage == 2 && !run->sums_once ? 4
                                            : 0);
}

/* Rows of the model for a token of a document, and pairs of them for two. */
static void rows_and_pairs(const ith_run_shape *run, double *rows, double *pairs)
{
    double copies = run->noise && run->noise->complementary ? 2 : 1;
    *rows = run->noise && run->noise->blocks ? 2 * copies : copies;
    *pairs = run->noise ? copies : 0.5;
}

ith_flops ith_epoch_flops(const ith_run_shape *run, double *tower)
{
    double rows, pairs, tokens = 0, squares = 0;
    ith_vision_flops f = {0, 0};
    rows_and_pairs(run, &rows, &pairs);
    *tower = 0;
    if (run->hf->vision.hidden_size > 0)
        f = ith_vision_flops_of(&run->hf->vision, run->config->freeze_vision_tower);
    for (int64_t i = 0; i < ith_samples_count(run->samples); i++) {
        int64_t n = ith_samples_length(run->samples, i);
        double len = (double)(run->noise ? ith_noise_padded(run->noise, n) : n);
        tokens += len;
        squares += len * len;
        ith_sample s = {0};
        if (f.patch > 0)
            s = ith_samples_get(run->samples, i);
        for (int64_t k = 0; k < s.num_media; k++) {
            double frame = (double)s.media[k].grid.h * s.media[k].grid.w;
            *tower += s.media[k].grid.t * frame * (f.patch + f.pair * frame);
        }
    }
    return ith_config_flops(run->hf, rows * tokens, pairs * squares,
                            (double)ith_samples_num_labels(run->samples));
}

ith_batch_work ith_batch_work_of(const ith_run_shape *run)
{
    const ith_hf_config *c = run->hf;
    int64_t cp = run->layout->cp_size;
    if (c->hidden_size == 0)
        return (ith_batch_work){.linear = 1};
    double rows, pairs;
    rows_and_pairs(run, &rows, &pairs);
    double labels =
        (double)ith_samples_num_labels(run->samples) / (double)ith_samples_num_tokens(run->samples);
    double bytes = ith_config_param_dtype(run->config) == ITH_DTYPE_F32 ? 4 : 2;
    double worth = run->flop_per_byte;
    ith_vision_flops tower = {0, 0};
    if (c->vision.hidden_size > 0)
        tower = ith_vision_flops_of(&c->vision, run->config->freeze_vision_tower);
    return (ith_batch_work){.linear = ith_config_flops(c, rows, 0, labels).total,
                            .quadratic = ith_config_flops(c, 0, pairs, 0).total,
                            .exchange = cp == 1 ? 0 : rows * exchanged(c, cp) * bytes * worth,
                            .round = round_bytes(run, bytes) * worth,
                            .patch = tower.patch,
                            .pair = tower.pair};
}

double ith_aux_coef(const ith_config *config, const ith_hf_config *hf)
{
    if (ith_config_is_set(config, "router_aux_loss_coef"))
        return config->router_aux_loss_coef;
    return hf->output_router_logits ? hf->router_aux_loss_coef : 0;
}

bool ith_keeps_micro_batches(const ith_config *config, const ith_hf_config *hf)
{
    return ith_aux_coef(config, hf) > 0 || (hf->family == ITH_FAMILY_LLADA2 &&
                                            config->diffusion.normalizer == ITH_NORM_MICRO_BATCH);
}

void ith_deal_options(const ith_run_shape *run, bool training, ith_batcher_options *out)
{
    out->cp_size = run->layout->cp_size;
    out->work = ith_batch_work_of(run);
    out->whole = out->cp_size > 1 ? run->config->cp_whole_documents : ITH_CP_WHOLE_NEVER;
    out->keep_together = training && ith_keeps_micro_batches(run->config, run->hf);
    if (run->noise) {
        out->padded = ith_noise_padded;
        out->padded_arg = run->noise;
    }
}

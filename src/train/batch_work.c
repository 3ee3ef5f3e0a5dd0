/* batch_work.c - what a document costs a rank, from the shape of the model. docs/parallel.md has
 * the bytes that it sends. */
#include "train/diffusion.h"
#include "train/trainer_internal.h"

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
static double round_bytes(const ith_trainer *t, double element_bytes)
{
    ith_hf_config all = t->hf;
    int stage = ith_config_zero_stage(t->config);
    double ranks = (double)ith_world_size(t->mesh);
    all.num_experts_per_tok = all.num_experts / ith_ep_size(t->mesh);
    double weights = ith_config_flops(&all, 1, 0, 0).linear / 6;
    return (ranks - 1) / ranks * weights *
           (stage >= 3   ? 2 * element_bytes + 4
            : stage == 2 ? 4
                         : 0);
}

ith_batch_work ith_trainer_batch_work(const ith_trainer *t)
{
    const ith_hf_config *c = &t->hf;
    int64_t cp = ith_cp_size(t->mesh);
    bool diffusion = ith_is_diffusion(t->config, c);
    double copies = diffusion && t->config->diffusion.complementary ? 2 : 1,
           rows = diffusion && t->config->diffusion.name != ITH_DIFFUSION_RANDOM_MASK ? 2 * copies
                                                                                      : copies;
    double labels =
        (double)ith_samples_num_labels(t->samples) / (double)ith_samples_num_tokens(t->samples);
    double bytes = ith_config_param_dtype(t->config) == ITH_DTYPE_F32 ? 4 : 2;
    double worth = ith_flop_per_byte(t->session.ctx.device);
    return (ith_batch_work){.linear = ith_config_flops(c, rows, 0, labels).total,
                            .quadratic =
                                ith_config_flops(c, 0, diffusion ? copies : 0.5, 0).total,
                            .exchange = cp == 1 ? 0 : rows * exchanged(c, cp) * bytes * worth,
                            .round = t->mesh ? round_bytes(t, bytes) * worth : 0};
}

/* experts.h - changes the layout of expert weights on disk: one tensor per expert, or all experts
 * of a projection stacked.
 *
 *   apart    PREFIX.mlp.experts.<e>.{gate,up,down}_proj.weight   [rows, cols] each
 *   merged   PREFIX.mlp.experts.{gate,up,down}_proj              [E, rows, cols]
 *
 * Bytes are moved, never converted: every tensor keeps its type, merge and then split gives back
 * every byte. All other tensors and files are copied. Memory does not grow with the model: data
 * goes through in pieces whose pages are given back. Resume: shards are finished one by one below
 * OUT/.experts.partial, each read back and compared by hash with what was written before it counts;
 * a later call with the same source and settings goes on after the last finished one. The index
 * comes last, so a directory that stopped half way is no model. Training reads and writes both
 * layouts: this is for other programs. */
#ifndef ITH_CHECKPOINT_EXPERTS_H
#define ITH_CHECKPOINT_EXPERTS_H

#include "checkpoint/safetensors.h"

typedef struct {
    int64_t num_in, num_out;     /* tensors */
    int64_t num_changed;         /* of the output */
    int64_t bytes;               /* of tensor data */
    int64_t num_files, num_kept; /* shards; those that an earlier call had finished */
} ith_experts_report;

/* merge: apart -> merged; else merged -> apart. max_shard_bytes 0: the default of safetensors.h. */
ith_status ith_experts_convert(const char *source, const char *out_dir, bool merge,
                               int64_t max_shard_bytes, ith_experts_report *report, ith_error *err);

#endif

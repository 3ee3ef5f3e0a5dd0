/* redeal.h - rows that lie in order over the ranks of a cp group, cut anew.
 *
 * Rank r has rows [first[r], first[r + 1]) of a list before, and those of other borders after: what
 * several ranks made (features of images) goes to the ranks that read it. Each row is sent once, to
 * one rank. The adjoint is the same call with the borders swapped. */
#ifndef ITH_PARALLEL_REDEAL_H
#define ITH_PARALLEL_REDEAL_H

#include "parallel/mesh.h"

/* from, to: [cp_size + 1] borders, on the host, read only when the plan does not count. in: this
 * rank's rows [n,D] before; *out: [rows,D] after, pushed onto the workspace. With cp_size 1 *out is
 * in. */
ith_status ith_redeal_rows(const ith_mesh *mesh, ith_ctx *ctx, const char *name, ith_tensor in,
                           const int64_t *from, const int64_t *to, int64_t rows, ith_tensor *out);

#endif

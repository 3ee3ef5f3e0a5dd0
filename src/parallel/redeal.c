/* redeal.c - one exchange, straight out of the rows into the rows. */
#include "parallel/redeal.h"

/* Block of rank j: the rows that [begin, end) shares with [lo, hi); *at rows behind begin. */
static int64_t overlap(int64_t begin, int64_t end, int64_t lo, int64_t hi, int64_t *at)
{
    int64_t first = ith_max_i64(begin, lo), last = ith_min_i64(end, hi);
    *at = ith_max_i64(first - begin, 0);
    return ith_max_i64(last - first, 0);
}

ith_status ith_redeal_rows(const ith_mesh *mesh, ith_ctx *ctx, const char *name, ith_tensor in,
                           const int64_t *from, const int64_t *to, int64_t rows, ith_tensor *out)
{
    if (ith_cp_size(mesh) == 1) {
        *out = in;
        return ITH_OK;
    }
    ITH_ASSERT(in.ndim == 2 && ith_is_contiguous(in));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, name, in.dtype, 2, rows, in.shape[1], 1, 1, out));
    if (ith_ctx_counting(ctx))
        return ITH_OK;
    int64_t p = mesh->cp_size, me = mesh->cp_rank,
            row_bytes = in.shape[1] * ith_dtype_bytes(in.dtype);
    int64_t *send_at = mesh->lists, *send_bytes = mesh->lists + p, *recv_at = mesh->lists + 2 * p,
            *recv_bytes = mesh->lists + 3 * p;
    ITH_ASSERT(in.shape[0] == from[me + 1] - from[me] && rows == to[me + 1] - to[me]);
    for (int64_t j = 0; j < p; j++) {
        send_bytes[j] = row_bytes * overlap(from[me], from[me + 1], to[j], to[j + 1], &send_at[j]);
        recv_bytes[j] = row_bytes * overlap(to[me], to[me + 1], from[j], from[j + 1], &recv_at[j]);
        send_at[j] *= row_bytes;
        recv_at[j] *= row_bytes;
    }
    ith_exchange x = {in.data, send_at, send_bytes, out->data, recv_at, recv_bytes};
    return ith_comm_exchange(mesh->device_cp[0], &x, ctx->err);
}

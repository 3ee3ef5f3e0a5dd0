/* tensor.c - text form of a view. */
#include "tensor/tensor.h"

#include <stdio.h>

const char *ith_tensor_text(ith_tensor t, char *out, int64_t out_bytes)
{
    ITH_ASSERT(out_bytes > 0);
    int64_t len = snprintf(out, (size_t)out_bytes, "[");
    for (int i = 0; i < t.ndim && len < out_bytes; i++)
        len += snprintf(out + len, (size_t)(out_bytes - len), "%s%lld", i ? ", " : "",
                        (long long)t.shape[i]);
    if (len < out_bytes)
        snprintf(out + len, (size_t)(out_bytes - len), "] %s", ith_dtype_name(t.dtype));
    return out;
}

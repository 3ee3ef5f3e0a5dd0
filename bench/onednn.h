/* onednn.h - matrix products by oneDNN, the yardstick of bench_gemm. */
#ifndef ITH_BENCH_ONEDNN_H
#define ITH_BENCH_ONEDNN_H

#include "kernels/cpu/cpu_internal.h"

const char *ith_onednn_version(void); /* "2.6.3", or why it is absent */
/* The product by oneDNN's own threads; false when it cannot. */
bool ith_onednn_gemm(const ith_cpu_gemm *g);

#endif

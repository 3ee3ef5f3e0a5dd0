/* ref_internal.h - the two instances of the reference operators; ref.c picks one by type. */
#ifndef ITH_KERNELS_REF_INTERNAL_H
#define ITH_KERNELS_REF_INTERNAL_H

#include "kernels/backend.h"

/* Math in float, memory F32 or BF16. Entries without arithmetic are empty: ref.c owns them. */
extern const ith_backend ith_ref_f32;
/* Math in double, memory F64 (F32 and BF16 are read and written too). */
extern const ith_backend ith_ref_f64;

#endif

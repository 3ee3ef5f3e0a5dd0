/* op_cases.h - every case of the operator bench: shapes that are odd, single, empty, strided,
 * aliased, and documents of every kind. */
#ifndef ITH_TESTS_OP_CASES_H
#define ITH_TESTS_OP_CASES_H

#include "op_bench.h"

/* The long cases follow the others. */
int64_t op_case_count(void);
int64_t op_long_case_count(void);
const op_case *op_case_at(int64_t i);

#endif

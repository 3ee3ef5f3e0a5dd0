/* rows_impl.h */
#define ROWS_TABLE

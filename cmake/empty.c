/* A folder without sources yet still makes a library. */
typedef int ith_empty_module;

# Settings of the sanitizers; ctest reads them before the tests of a build with ITH_SANITIZE.
# No fake stack (detect_stack_use_after_return): up to GCC 13.2 its frames are aligned to 32 bytes, and vectors of 64 bytes in them fault.
set(ENV{ASAN_OPTIONS} "strict_string_checks=1:detect_stack_use_after_return=0")
set(ENV{LSAN_OPTIONS} "suppressions=${CMAKE_CURRENT_LIST_DIR}/lsan.supp:print_suppressions=0")
set(ENV{UBSAN_OPTIONS} "print_stacktrace=1")
set(ENV{TSAN_OPTIONS} "suppressions=${CMAKE_CURRENT_LIST_DIR}/tsan.supp:second_deadlock_stack=1")

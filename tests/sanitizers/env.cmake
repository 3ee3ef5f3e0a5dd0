# Settings of the sanitizers; ctest reads them before the tests of a build with ITH_SANITIZE.
set(ENV{ASAN_OPTIONS} "strict_string_checks=1:detect_stack_use_after_return=1")
set(ENV{LSAN_OPTIONS} "suppressions=${CMAKE_CURRENT_LIST_DIR}/lsan.supp:print_suppressions=0")
set(ENV{UBSAN_OPTIONS} "print_stacktrace=1")
set(ENV{TSAN_OPTIONS} "suppressions=${CMAKE_CURRENT_LIST_DIR}/tsan.supp:second_deadlock_stack=1")

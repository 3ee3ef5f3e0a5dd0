# Fast CPU kernels: one file per instruction set, chosen at run time (src/kernels/cpu/backend_cpu.c), so that one
# binary runs anywhere. -ffp-contract=fast: the product sums are fused multiply-adds; no other float rule is loosened.
set(cpu_dir ${CMAKE_SOURCE_DIR}/src/kernels/cpu)
set(level_flags -O3 -ffp-contract=fast -fno-math-errno)
if(ITH_SANITIZE) # -O3 of instrumented tiles takes minutes to compile
    set(level_flags -O2 -ffp-contract=fast -fno-math-errno)
endif()
set_source_files_properties(${cpu_dir}/level_generic.c PROPERTIES COMPILE_OPTIONS "${level_flags}")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|amd64|AMD64")
    set(ith_avx512_flags ${level_flags} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mprefer-vector-width=512)
    set_source_files_properties(${cpu_dir}/level_avx2.c PROPERTIES COMPILE_OPTIONS "${level_flags};-mavx2;-mfma")
    set_source_files_properties(${cpu_dir}/level_avx512.c PROPERTIES COMPILE_OPTIONS "${ith_avx512_flags}")
    set_source_files_properties(${cpu_dir}/level_avx512bf16.c PROPERTIES COMPILE_OPTIONS "${ith_avx512_flags};-mavx512bf16")
    set_source_files_properties(${cpu_dir}/level_amx.c PROPERTIES COMPILE_OPTIONS "${ith_avx512_flags};-mavx512bf16;-mamx-tile;-mamx-bf16")
    set(levels "generic avx2 avx512 avx512bf16 amx")
else()
    set_source_files_properties(${cpu_dir}/level_avx2.c ${cpu_dir}/level_avx512.c ${cpu_dir}/level_avx512bf16.c
                                ${cpu_dir}/level_amx.c PROPERTIES COMPILE_DEFINITIONS ITH_LEVEL_ABSENT)
    set(levels "generic")
endif()

target_link_libraries(ith_kernels PUBLIC ${CMAKE_DL_LIBS})
ith_summary("CPU kernels: ${levels}, chosen at run time")
add_subdirectory(${CMAKE_SOURCE_DIR}/bench)

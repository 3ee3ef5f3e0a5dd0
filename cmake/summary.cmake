# One table: what is in, what is out, and why. Modules add rows with ith_summary(name state why).
get_property(rows GLOBAL PROPERTY ITH_SUMMARY)
message(STATUS "ithaca ${PROJECT_VERSION}, ${CMAKE_C_COMPILER_ID} ${CMAKE_C_COMPILER_VERSION}, ${CMAKE_BUILD_TYPE}")
foreach(dep JANSSON YAML PCRE2 UTF8PROC)
    message(STATUS "  ${dep}: ${ITH_${dep}_LIB}")
endforeach()
foreach(row ${rows})
    message(STATUS "  ${row}")
endforeach()

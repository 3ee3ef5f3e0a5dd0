# libithaca.a: every module but the commands in one archive, with include/ithaca.h and ithaca.pc.
include(GNUInstallDirs)
foreach(module base tensor config kernels comm tokenizer image report parallel checkpoint data model train generate api)
    list(APPEND library_objects $<TARGET_OBJECTS:ith_${module}>)
endforeach()
add_library(ithaca_library STATIC ${library_objects})
set_target_properties(ithaca_library PROPERTIES OUTPUT_NAME ithaca LINKER_LANGUAGE C)

# The file finds its own prefix, so that the tree may be staged (DESTDIR) or moved.
file(RELATIVE_PATH pc_up /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" pc_up "${pc_up}")
set(pc_extra "")
if(ITH_SANITIZE)
    set(pc_extra "-fsanitize=${ITH_SANITIZE} ")
endif()
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/ithaca.pc @ONLY CONTENT "prefix=\${pcfiledir}/@pc_up@
libdir=\${prefix}/@CMAKE_INSTALL_LIBDIR@
includedir=\${prefix}/@CMAKE_INSTALL_INCLUDEDIR@

Name: ithaca
Description: @PROJECT_DESCRIPTION@
Version: @PROJECT_VERSION@
Requires: jansson yaml-0.1 libpcre2-8 libutf8proc@ITH_IMAGE_PC@
Libs: -L\${libdir} -lithaca @pc_extra@-lm -ldl -lpthread
Cflags: -I\${includedir}
")

install(TARGETS ithaca_library ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES ${CMAKE_SOURCE_DIR}/include/ithaca.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${CMAKE_BINARY_DIR}/ithaca.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES ${CMAKE_SOURCE_DIR}/README.md ${CMAKE_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY ${CMAKE_SOURCE_DIR}/docs DESTINATION ${CMAKE_INSTALL_DOCDIR} FILES_MATCHING PATTERN "*.md")

# The program, its man page and its shell completions (made by the program itself from its option tables).
include(GNUInstallDirs)
string(REPLACE ";" " " sanitize_text "${ITH_SANITIZE}")
target_compile_definitions(ith_cli PRIVATE ITH_BUILD_TYPE="${CMAKE_BUILD_TYPE}" ITH_SANITIZE_TEXT="${sanitize_text}")
add_executable(ithaca ${CMAKE_SOURCE_DIR}/src/cli/main.c)
target_link_libraries(ithaca PRIVATE ith_cli)

set(pages ${CMAKE_BINARY_DIR}/pages)
add_custom_command(
    OUTPUT ${pages}/ithaca.1 ${pages}/ithaca ${pages}/_ithaca ${pages}/ithaca.fish
    COMMAND ${CMAKE_COMMAND} -E make_directory ${pages}
    COMMAND ithaca help --man > ${pages}/ithaca.1
    COMMAND ithaca completion bash > ${pages}/ithaca
    COMMAND ithaca completion zsh > ${pages}/_ithaca
    COMMAND ithaca completion fish > ${pages}/ithaca.fish
    DEPENDS ithaca
    VERBATIM)
add_custom_target(pages ALL DEPENDS ${pages}/ithaca.1)
# The generated pages that live in the source tree; tests/cli checks that they are in sync.
add_custom_target(docs
    COMMAND ithaca help --man > ${CMAKE_SOURCE_DIR}/docs/ithaca.1
    COMMAND ithaca help --config-markdown > ${CMAKE_SOURCE_DIR}/docs/config.md
    COMMAND ithaca env --markdown > ${CMAKE_SOURCE_DIR}/docs/env.md
    VERBATIM)

install(TARGETS ithaca RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES ${pages}/ithaca.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES ${pages}/ithaca DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
install(FILES ${pages}/_ithaca DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
install(FILES ${pages}/ithaca.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)

# cmake --install: the command, the two libraries with their headers, and the package that find_package(foremoe) reads.
# The target `installed` builds what is installed and nothing else. Nothing installed names the prefix: the tree may be
# moved.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

add_custom_target(installed DEPENDS foremoe libforemoe libforemoe_runtime)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/foremoe)

install(TARGETS foremoe RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS libforemoe EXPORT foremoeTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS libforemoe_runtime EXPORT foremoeRuntimeTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT foremoeTargets NAMESPACE foremoe:: DESTINATION ${package_dir})
install(EXPORT foremoeRuntimeTargets NAMESPACE foremoe:: DESTINATION ${package_dir})

get_target_property(FOREMOE_LINKED_FILES libforemoe FOREMOE_LINKED_FILES)
get_target_property(FOREMOE_RUNTIME_LINKED_FILES libforemoe_runtime FOREMOE_LINKED_FILES)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/foremoeConfig.cmake.in
  ${PROJECT_BINARY_DIR}/foremoeConfig.cmake INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/foremoeConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/foremoeConfig.cmake ${PROJECT_BINARY_DIR}/foremoeConfigVersion.cmake
  DESTINATION ${package_dir})

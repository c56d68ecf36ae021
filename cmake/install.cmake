# Headers, the library and its CMake package: the same layout in an install tree and inside the wheel.

include(CMakePackageConfigHelpers)
include(GNUInstallDirs)
if(EPILOQ_PYTHON)
  set(CMAKE_INSTALL_LIBDIR lib)  # wheels have no lib64
endif()

install(TARGETS epiloq EXPORT epiloq LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/epiloq ${CMAKE_CURRENT_BINARY_DIR}/include/epiloq DESTINATION include FILES_MATCHING PATTERN "*.h")
set(package ${CMAKE_INSTALL_LIBDIR}/cmake/epiloq)
install(EXPORT epiloq FILE epiloqTargets.cmake NAMESPACE epiloq:: DESTINATION ${package})
configure_package_config_file(cmake/epiloqConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/epiloqConfig.cmake
                              INSTALL_DESTINATION ${package})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/epiloqConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/epiloqConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/epiloqConfigVersion.cmake
        DESTINATION ${package})

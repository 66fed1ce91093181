# Installs the public headers and what find_package(bitsparse) reads.
include(CMakePackageConfigHelpers)
set(package_dir share/cmake/bitsparse)

foreach(dir IN LISTS public_headers)
  install(DIRECTORY "${dir}/" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.h")
endforeach()
configure_package_config_file(cmake/bitsparseConfig.cmake.in "${PROJECT_BINARY_DIR}/bitsparseConfig.cmake"
                              INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/bitsparseConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/bitsparseConfig.cmake" "${PROJECT_BINARY_DIR}/bitsparseConfigVersion.cmake"
              cmake/bitsparseTorch.cmake cmake/bitsparseLocateTorch.cmake
        DESTINATION "${package_dir}")
install(EXPORT bitsparseTargets NAMESPACE bitsparse:: DESTINATION "${package_dir}")

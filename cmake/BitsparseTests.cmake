# One program from all of tests/cpp; ctest lists every test of it, skipped ones too.
find_package(GTest)
if(NOT GTest_FOUND)
  bitsparse_fail("GoogleTest was not found: install it (Debian: apt-get install libgtest-dev) or set BITSPARSE_TESTS=OFF")
endif()
include(GoogleTest)

file(GLOB test_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/cpp/*.cpp")
add_executable(bitsparse_tests ${test_sources})
target_include_directories(bitsparse_tests PRIVATE csrc kernels tests/cpp)
target_link_libraries(bitsparse_tests PRIVATE bitsparse bitsparse_options GTest::gtest GTest::gtest_main)
if(BITSPARSE_WITH_CUDA)
  target_link_libraries(bitsparse_tests PRIVATE CUDA::cudart)
endif()
gtest_discover_tests(bitsparse_tests DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 120
                     WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}" PROPERTIES TIMEOUT 300)

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

# The C++ example as a user would build it: a project of its own against an installed bitsparse.
if(NOT BITSPARSE_PREBUILT)
  set(installed "${PROJECT_BINARY_DIR}/example-cpp/installed")
  set(built "${PROJECT_BINARY_DIR}/example-cpp/build")
  add_test(NAME example_cpp.install COMMAND "${CMAKE_COMMAND}" --install "${PROJECT_BINARY_DIR}" --prefix "${installed}")
  add_test(NAME example_cpp.build
           COMMAND "${CMAKE_CTEST_COMMAND}" --build-and-test "${PROJECT_SOURCE_DIR}/examples/cpp" "${built}"
                   --build-generator "${CMAKE_GENERATOR}" --build-makeprogram "${CMAKE_MAKE_PROGRAM}"
                   --build-options "-DCMAKE_PREFIX_PATH=${installed}" "-DTorch_DIR=${Torch_DIR}"
                                   "-DCMAKE_BUILD_TYPE=Release")
  add_test(NAME example_cpp.run COMMAND "${built}/char_model" --steps 20)
  set_tests_properties(example_cpp.install PROPERTIES FIXTURES_SETUP example_installed)
  set_tests_properties(example_cpp.build PROPERTIES FIXTURES_REQUIRED example_installed FIXTURES_SETUP example_built
                                                    TIMEOUT 900)
  set_tests_properties(example_cpp.run PROPERTIES FIXTURES_REQUIRED example_built TIMEOUT 600
                                                  ENVIRONMENT "OMP_WAIT_POLICY=PASSIVE;OMP_NUM_THREADS=1")
endif()

# Enables C++ and, when wanted and possible, CUDA. Sets BITSPARSE_WITH_CUDA, BITSPARSE_CUDA_ARCHITECTURES (text for the
# build info) and the interface library bitsparse_options with our own compile options.
include(CheckLanguage)
include(BitsparseMessages)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, RelWithDebInfo or Debug" FORCE)
endif()

check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  bitsparse_fail("no C++ compiler found: install one (Debian: apt-get install g++) or set CXX")
endif()
enable_language(CXX)
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)

find_program(BITSPARSE_CCACHE ccache)
if(BITSPARSE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${BITSPARSE_CCACHE}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${BITSPARSE_CCACHE}")
endif()

set(BITSPARSE_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO (when nvcc is found), ON or OFF")
set_property(CACHE BITSPARSE_CUDA PROPERTY STRINGS AUTO ON OFF)
set(BITSPARSE_WITH_CUDA OFF)
set(BITSPARSE_CUDA_ARCHITECTURES "")
include(bitsparseLocateTorch)  # BITSPARSE_TORCH_CUDA: the CUDA version of the torch that will be used
if(NOT BITSPARSE_CUDA STREQUAL "OFF")
  find_program(BITSPARSE_NVCC nvcc HINTS "$ENV{CUDACXX}" "${CUDAToolkit_ROOT}/bin" "$ENV{CUDAToolkit_ROOT}/bin"
               "$ENV{CUDA_HOME}/bin" NO_CACHE)
  if(DEFINED ENV{CUDACXX})
    set(BITSPARSE_NVCC "$ENV{CUDACXX}")
  elseif(NOT BITSPARSE_NVCC)
    find_program(BITSPARSE_NVCC nvcc PATHS /usr/local/cuda/bin NO_DEFAULT_PATH NO_CACHE)
  endif()
  if(CMAKE_CUDA_COMPILER)
    set(BITSPARSE_NVCC "${CMAKE_CUDA_COMPILER}")
  endif()

  set(reason "")
  if(NOT BITSPARSE_NVCC)
    set(reason "nvcc was not found (set CUDACXX, or CUDAToolkit_ROOT, or run scripts/cuda_toolkit.py)")
  elseif(BITSPARSE_TORCH_CUDA STREQUAL "none")
    set(reason "the installed torch is a CPU build")
  endif()
  if(reason STREQUAL "")
    set(BITSPARSE_WITH_CUDA ON)
  elseif(BITSPARSE_CUDA STREQUAL "ON")
    bitsparse_fail("BITSPARSE_CUDA is ON but ${reason}")
  else()
    message(STATUS "bitsparse: CPU-only build, because ${reason}")
  endif()
else()
  message(STATUS "bitsparse: CPU-only build, because BITSPARSE_CUDA is OFF")
endif()

if(BITSPARSE_WITH_CUDA)
  include(BitsparseCudaArchitectures)
  execute_process(COMMAND "${BITSPARSE_NVCC}" --version OUTPUT_VARIABLE nvcc_text ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+)[0-9.]*" nvcc_text "${nvcc_text}")
  set(nvcc_major "${CMAKE_MATCH_1}")
  string(REGEX MATCH "^[0-9]+" torch_major "${BITSPARSE_TORCH_CUDA}")
  if(NOT nvcc_major)
    bitsparse_fail("${BITSPARSE_NVCC} does not run as nvcc: set CUDACXX to one that does, or BITSPARSE_CUDA=OFF")
  elseif(torch_major AND NOT torch_major EQUAL nvcc_major)
    bitsparse_fail("torch is for CUDA ${BITSPARSE_TORCH_CUDA} but ${BITSPARSE_NVCC} is ${nvcc_text}: install a torch for CUDA ${nvcc_major}, set CUDACXX to an nvcc of CUDA ${torch_major}, or set BITSPARSE_CUDA=OFF")
  endif()
  set(CMAKE_CUDA_COMPILER "${BITSPARSE_NVCC}")
  enable_language(CUDA)
  # The nvcc on PATH can be a wrapper outside of its toolkit: ask the compiler, not the path.
  if(NOT CUDAToolkit_ROOT)
    set(CUDAToolkit_ROOT "${CMAKE_CUDA_COMPILER_TOOLKIT_ROOT}")
  endif()
  find_package(CUDAToolkit REQUIRED)
  set(BITSPARSE_CUDA_MAJOR "${CUDAToolkit_VERSION_MAJOR}")
  message(STATUS "bitsparse: CUDA ${CUDAToolkit_VERSION} build for ${BITSPARSE_CUDA_ARCHITECTURES}")
endif()

add_library(bitsparse_options INTERFACE)
target_compile_options(bitsparse_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra;--expt-relaxed-constexpr>")
target_compile_definitions(bitsparse_options INTERFACE
  BITSPARSE_VERSION="${PROJECT_VERSION}"
  BITSPARSE_CUDA_ARCHITECTURES="${BITSPARSE_CUDA_ARCHITECTURES}"
  $<$<BOOL:${BITSPARSE_WITH_CUDA}>:BITSPARSE_WITH_CUDA=1>)

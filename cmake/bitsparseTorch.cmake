# Defines bitsparse::torch, what a target needs in order to use torch's C++ API. Installed with the package, so it stands
# on its own. find_package(Torch) alone would not do: a CUDA build of torch stops where there is no CUDA toolkit, although
# code that calls no CUDA needs none; and it adds nvcc flags to every CUDA target of the project.
if(TARGET bitsparse::torch)
  return()
endif()
include("${CMAKE_CURRENT_LIST_DIR}/bitsparseLocateTorch.cmake")

set(bitsparse_use_config ON)
if(NOT BITSPARSE_TORCH_CUDA STREQUAL "none" AND NOT TARGET torch)
  find_package(CUDAToolkit QUIET)
  if(NOT CUDAToolkit_FOUND OR NOT CUDAToolkit_NVCC_EXECUTABLE)
    set(bitsparse_use_config OFF)
  endif()
endif()

add_library(bitsparse::torch INTERFACE IMPORTED)
if(bitsparse_use_config)
  if(NOT TARGET torch)
    # torch looks for the toolkit in its own way, and derives flags for eleven architectures unless told otherwise.
    set(bitsparse_saved_cuda_flags "${CMAKE_CUDA_FLAGS}")
    set(bitsparse_saved_architectures "${CMAKE_CUDA_ARCHITECTURES}")
    unset(CMAKE_CUDA_ARCHITECTURES)
    if(NOT CUDA_TOOLKIT_ROOT_DIR AND CUDAToolkit_NVCC_EXECUTABLE)
      get_filename_component(CUDA_TOOLKIT_ROOT_DIR "${CUDAToolkit_BIN_DIR}/.." ABSOLUTE)
    endif()
    if(NOT DEFINED TORCH_CUDA_ARCH_LIST AND NOT DEFINED ENV{TORCH_CUDA_ARCH_LIST})
      set(TORCH_CUDA_ARCH_LIST 9.0)
    endif()
    set(bitsparse_saved_log_level "${CMAKE_MESSAGE_LOG_LEVEL}")
    set(CMAKE_MESSAGE_LOG_LEVEL ERROR)  # it warns about libraries and settings that nobody needs
    find_package(Torch REQUIRED)
    set(CMAKE_MESSAGE_LOG_LEVEL "${bitsparse_saved_log_level}")
    if(TARGET caffe2::mkl)  # link folders that exist only where MKL is installed
      set_property(TARGET caffe2::mkl PROPERTY INTERFACE_LINK_DIRECTORIES "")
    endif()
    set(CMAKE_CUDA_FLAGS "${bitsparse_saved_cuda_flags}")
    if(bitsparse_saved_architectures)
      set(CMAKE_CUDA_ARCHITECTURES "${bitsparse_saved_architectures}")
    endif()
  endif()
  target_link_libraries(bitsparse::torch INTERFACE ${TORCH_LIBRARIES})
else()
  message(STATUS "bitsparse: no CUDA toolkit here, linking torch without its CUDA part")
  target_include_directories(bitsparse::torch INTERFACE
    "${BITSPARSE_TORCH_ROOT}/include" "${BITSPARSE_TORCH_ROOT}/include/torch/csrc/api/include")
  target_link_libraries(bitsparse::torch INTERFACE
    "${BITSPARSE_TORCH_ROOT}/lib/libtorch_cpu.so" "${BITSPARSE_TORCH_ROOT}/lib/libc10.so")
  # torch's CUDA libraries find theirs at run time, not in a linker that does not know where they are.
  target_link_options(bitsparse::torch INTERFACE "-Wl,--allow-shlib-undefined")
endif()

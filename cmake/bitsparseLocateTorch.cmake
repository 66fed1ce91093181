# Finds the torch installation without loading its CMake files: sets Torch_DIR, BITSPARSE_TORCH_ROOT and
# BITSPARSE_TORCH_CUDA ("13.0", "none" for a CPU build, "unknown" for a CUDA build that does not say).
# Looks at Torch_DIR, CMAKE_PREFIX_PATH, beside an installed bitsparse, then asks the Python interpreter.
if(NOT Torch_DIR)
  find_path(Torch_DIR TorchConfig.cmake
            PATHS "${CMAKE_CURRENT_LIST_DIR}/../../../../torch/share/cmake/Torch"
            PATH_SUFFIXES Torch share/cmake/Torch
            NO_CMAKE_SYSTEM_PATH NO_SYSTEM_ENVIRONMENT_PATH)  # a distribution's torch is not the interpreter's
endif()
if(NOT Torch_DIR)
  find_package(Python 3.10 COMPONENTS Interpreter QUIET)
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
              "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '', end='')"
      OUTPUT_VARIABLE torch_package ERROR_QUIET)
    if(torch_package)
      set(Torch_DIR "${torch_package}/share/cmake/Torch" CACHE PATH "The folder of TorchConfig.cmake" FORCE)
    endif()
  endif()
endif()
if(NOT EXISTS "${Torch_DIR}/TorchConfig.cmake")
  message(FATAL_ERROR " bitsparse: torch was not found: pip install torch==2.11.0 into the Python that builds (${Python_EXECUTABLE}), or set CMAKE_PREFIX_PATH or Torch_DIR to a LibTorch")
endif()
get_filename_component(BITSPARSE_TORCH_ROOT "${Torch_DIR}/../../.." ABSOLUTE)

set(BITSPARSE_TORCH_CUDA none)
if(EXISTS "${BITSPARSE_TORCH_ROOT}/lib/libtorch_cuda.so")
  set(BITSPARSE_TORCH_CUDA unknown)
  if(EXISTS "${BITSPARSE_TORCH_ROOT}/version.py")
    file(STRINGS "${BITSPARSE_TORCH_ROOT}/version.py" line REGEX "^cuda")
    if(line MATCHES "'([0-9.]+)'")
      set(BITSPARSE_TORCH_CUDA "${CMAKE_MATCH_1}")
    endif()
  endif()
endif()

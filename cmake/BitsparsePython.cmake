# Finds the interpreter's headers and its pybind11.
find_package(Python 3.10 COMPONENTS Interpreter Development.Module)
if(NOT Python_Development.Module_FOUND)
  bitsparse_fail("Python's headers were not found for ${Python_EXECUTABLE}: install them (Debian: apt-get install python3-dev) or set BITSPARSE_PYTHON=OFF")
endif()
execute_process(COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
                OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed)
  bitsparse_fail("pybind11 was not found: ${Python_EXECUTABLE} -m pip install pybind11, or set BITSPARSE_PYTHON=OFF")
endif()
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 CONFIG REQUIRED)

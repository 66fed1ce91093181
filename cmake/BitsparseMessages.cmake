# One line that says what is wrong and what to do. The leading space keeps CMake from wrapping it; setup.py looks for it.
function(bitsparse_fail text)
  message(FATAL_ERROR " bitsparse: ${text}")
endfunction()

// What this library was built from.
#pragma once

#include <string>
#include <vector>

namespace bitsparse {

struct BuildInfo {
  std::string version;
  std::string torch;                       // version of the PyTorch that it was compiled against
  std::string cuda;                        // version of the CUDA toolkit, empty: CPU only
  std::vector<std::string> architectures;  // CUDA architectures that kernels were compiled for
  std::string compiler;
};

const BuildInfo& build_info();

}  // namespace bitsparse

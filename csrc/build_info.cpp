#include "bitsparse/build_info.h"

#include <torch/version.h>

#include <sstream>
#ifdef BITSPARSE_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace bitsparse {
namespace {

BuildInfo make_build_info() {
  BuildInfo info;
  info.version = BITSPARSE_VERSION;
  info.torch = TORCH_VERSION;
#ifdef BITSPARSE_WITH_CUDA
  info.cuda = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  std::string list = BITSPARSE_CUDA_ARCHITECTURES;
  for (char& c : list)
    if (c == ';' || c == ',') c = ' ';
  std::istringstream words(list);
  for (std::string word; words >> word;) info.architectures.push_back(word);
#endif
#if defined(__clang__)
  info.compiler = std::string("clang ") + __clang_version__;
#elif defined(__GNUC__)
  info.compiler = "g++ " + std::string(__VERSION__);
#endif
  return info;
}

}  // namespace

const BuildInfo& build_info() {
  static const BuildInfo info = make_build_info();
  return info;
}

}  // namespace bitsparse

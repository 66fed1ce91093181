// First touches of fresh memory, page by page, cost more than encoding into it. Huge pages make them cheap.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace bitsparse::cpu {

// Asks for huge pages in the part of a large new allocation where they fit. A hint: failure has no consequence.
inline void advise_huge_pages(void* data, std::int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end =
      (reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(bytes)) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  static_cast<void>(data), static_cast<void>(bytes);
#endif
}

}  // namespace bitsparse::cpu

#include "cpu/tile_codec.h"

#include <atomic>
#include <initializer_list>

namespace bitsparse::cpu {
namespace {

const TileCodecs* codecs_of(Isa isa) {
  switch (isa) {
    case Isa::avx512: return avx512_tile_codecs();
    case Isa::avx2: return avx2_tile_codecs();
    case Isa::portable: break;
  }
  return portable_tile_codecs();
}

Isa best_isa() {
  for (const Isa isa : {Isa::avx512, Isa::avx2}) {
    if (isa_available(isa)) return isa;
  }
  return Isa::portable;
}

std::atomic<Isa>& selected_isa() {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}

// Pattern of minus infinity, or of the largest negative number where there is no infinity: what is above it is a NaN.
std::uint32_t largest_negative(DType dtype) {
  switch (dtype) {
    case DType::bfloat16: return 0xff80;
    case DType::float16: return 0xfc00;
    case DType::float32: return 0xff800000;
    case DType::float8_e4m3fn: return 0xfe;
    case DType::float8_e5m2: return 0xfc;
  }
  return 0;
}

}  // namespace

EncodeRules encode_rules(DType dtype, Codec codec, Keep keep) {
  return {codec, rotates_sign(codec, keep), keep == Keep::positive ? largest_negative(dtype) : 0};
}

bool isa_available(Isa isa) {
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
  if (isa == Isa::avx512) {
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512vbmi2")) {
      return false;
    }
  }
  if (isa != Isa::portable) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2") ||
        !__builtin_cpu_supports("popcnt")) {
      return false;
    }
  }
#endif
  return codecs_of(isa) != nullptr;
}

Isa current_isa() { return selected_isa().load(std::memory_order_relaxed); }

void force_isa(Isa isa) {
  if (isa_available(isa)) selected_isa().store(isa, std::memory_order_relaxed);
}

const TileCodec& tile_codec(int element_bytes, Isa isa) {
  const TileCodecs& codecs = *codecs_of(isa);
  return element_bytes == 1 ? codecs.bytes1 : element_bytes == 2 ? codecs.bytes2 : codecs.bytes4;
}

}  // namespace bitsparse::cpu

#include "bitsparse/arena.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <vector>

#include "cpu/arena.h"
#ifdef BITSPARSE_WITH_CUDA
#include "cuda/arena.h"
#endif

namespace bitsparse {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, std::shared_ptr<Arena>> arenas;
};

// Never destroyed: leases may end while the process does.
Registry& registry() {
  static auto* r = new Registry;
  return *r;
}

std::vector<std::shared_ptr<Arena>>& arena_stack() {
  static thread_local std::vector<std::shared_ptr<Arena>> stack;
  return stack;
}

std::pair<c10::DeviceType, c10::DeviceIndex> key_of(c10::Device device) {
  return {device.type(), device.is_cpu() ? c10::DeviceIndex{0} : device.index()};
}

// "cuda" means the current CUDA device, as everywhere in PyTorch.
c10::Device with_index(c10::Device device) {
#ifdef BITSPARSE_WITH_CUDA
  if (device.is_cuda() && !device.has_index()) return {device.type(), cuda::current_device()};
#endif
  return device.is_cpu() ? c10::Device(c10::kCPU) : device;
}

void check_options(const ArenaOptions& options) {
  const int settings = options.capacity.has_value() + options.density_bound.has_value() + options.worst_case;
  TORCH_CHECK_VALUE(settings <= 1,
                    "bitsparse: Arena: expected at most one of capacity, density_bound and worst_case, got ", settings);
  TORCH_CHECK_VALUE(!options.capacity || *options.capacity >= 0, "bitsparse: Arena: expected capacity >= 0 bytes, got ",
                    options.capacity.value_or(0));
  TORCH_CHECK_VALUE(!options.density_bound || (*options.density_bound > 0 && *options.density_bound <= 1),
                    "bitsparse: Arena: expected density_bound in (0, 1], got ", options.density_bound.value_or(0));
  TORCH_CHECK_VALUE(options.spill_bytes >= 0, "bitsparse: Arena: expected spill_bytes >= 0, got ", options.spill_bytes);
}

}  // namespace

std::optional<std::tuple<at::Tensor, at::Tensor>> Arena::linear_compress(const at::Tensor&, const at::Tensor&,
                                                                         const std::optional<at::Tensor>&, Codec,
                                                                         Activation) {
  return std::nullopt;
}

std::shared_ptr<Arena> Arena::create(c10::Device device, const ArenaOptions& options) {
  check_options(options);
  device = with_index(device);
  if (device.is_cpu()) return cpu::make_arena(options);
#ifdef BITSPARSE_WITH_CUDA
  if (device.is_cuda()) return cuda::make_arena(device, options);
  TORCH_CHECK_VALUE(false, "bitsparse: expected device to be cpu or cuda, got ", device);
#else
  TORCH_CHECK_VALUE(!device.is_cuda(), "bitsparse: expected device to be cpu, got ", device,
                    ": this build of bitsparse has no CUDA code (no nvcc was found when it was built)");
  TORCH_CHECK_VALUE(false, "bitsparse: expected device to be cpu or cuda, got ", device);
#endif
}

std::shared_ptr<Arena> default_arena(c10::Device device) {
  device = with_index(device);
  std::lock_guard<std::mutex> lock(registry().mutex);
  auto& arena = registry().arenas[key_of(device)];
  if (!arena) arena = Arena::create(device);
  return arena;
}

bool has_default_arena(c10::Device device) {
  if (device.is_cuda() && !device.has_index()) {
    // Asking which device is current could create a context, and without one there is no arena.
    std::lock_guard<std::mutex> lock(registry().mutex);
    const auto& arenas = registry().arenas;
    if (std::none_of(arenas.begin(), arenas.end(), [](const auto& item) { return item.first.first == c10::kCUDA; }))
      return false;
  }
  device = with_index(device);
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().arenas.find(key_of(device));
  return found != registry().arenas.end() && found->second;
}

std::shared_ptr<Arena> current_arena(c10::Device device) {
  const auto& stack = arena_stack();
  const auto found = std::find_if(stack.rbegin(), stack.rend(),
                                  [&](const auto& arena) { return key_of(arena->device()) == key_of(device); });
  return found == stack.rend() ? default_arena(device) : *found;
}

void push_arena(std::shared_ptr<Arena> arena) {
  TORCH_CHECK_VALUE(arena, "bitsparse: push_arena: expected arena to be an arena, got null");
  arena_stack().push_back(std::move(arena));
}

// Generators and coroutines may leave their scopes in another order than they entered them.
void pop_arena(const Arena& arena) {
  auto& stack = arena_stack();
  const auto found = std::find_if(stack.rbegin(), stack.rend(), [&](const auto& each) { return each.get() == &arena; });
  TORCH_CHECK(found != stack.rend(),
              "bitsparse: Arena: expected an arena that this thread has entered and not left, got another: a `with` "
              "block ends in the thread in which it began");
  stack.erase(std::next(found).base());
}

ArenaGuard::ArenaGuard(std::shared_ptr<Arena> arena) : arena_(arena.get()) { push_arena(std::move(arena)); }
ArenaGuard::~ArenaGuard() { pop_arena(*arena_); }

MemoryStats memory_stats(c10::Device device, bool synchronize) {
  return has_default_arena(device) ? default_arena(device)->memory_stats(synchronize) : MemoryStats{};
}

}  // namespace bitsparse

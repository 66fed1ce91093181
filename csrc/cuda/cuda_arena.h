// The CUDA arena's state. Its parts: arena.cpp (what users call), arena_leases.cpp (how leases begin, end and pass
// their pages on), arena_capacity.cpp (how large it is).
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bitsparse/arena.h"
#include "cuda/capture.h"
#include "cuda/graph_owner.h"
#include "cuda/inbox.h"
#include "cuda/lease_state.h"
#include "cuda/page_memory.h"
#include "cuda/record_pool.h"
#include "cuda/slot_pool.h"
#include "cuda/warm_slots.h"
#include "lease.h"
#include "sizing.h"

namespace bitsparse::cuda {

class CudaArena final : public Arena {
 public:
  CudaArena(c10::Device device, const ArenaOptions& options) : Arena(device), options_(options) {}
  ~CudaArena() override;

  MemoryStats memory_stats(bool synchronize) override;
  void reset_peak_memory_stats() override;
  void trim() override;
  at::Tensor compress(const at::Tensor& h, const at::Tensor& out, Codec codec, Activation activation) override;
  std::optional<std::tuple<at::Tensor, at::Tensor>> linear_compress(const at::Tensor& x, const at::Tensor& w,
                                                                    const std::optional<at::Tensor>& bias, Codec codec,
                                                                    Activation activation) override;

  void restore(LeaseState& lease, const LeaseInfo& info, const at::Tensor& out, Activation activation);
  void gradient(LeaseState& lease, const LeaseInfo& info, const at::Tensor& grad, Activation activation);
  std::optional<at::Tensor> linear_gradient(LeaseState& lease, const LeaseInfo& info, const at::Tensor& grad,
                                            const at::Tensor& w, Activation activation);
  void end_lease(LeaseState& lease) noexcept;

 private:
  using CUDAStream = c10::cuda::CUDAStream;

  // Everything below runs with mutex_ held and, where it calls CUDA, the arena's device current. The holder of mutex_
  // may wait for the device, and for Python's lock inside of PyTorch's allocator: whoever may hold that lock, as those
  // do who drop tensors, must not wait for mutex_.

  // arena.cpp
  template <class Launch>
  at::Tensor write(const LeaseInfo& info, const char* what, Launch launch);
  template <class Launch>
  void read(LeaseState& lease, const LeaseInfo& info, Launch launch);
  void raise_failure();

  // arena_leases.cpp
  LeaseState& begin(const LeaseInfo& info, CUDAStream stream);
  LeaseState* find_warm(const WarmSlots::Key& key);
  void take_over(LeaseState& old, LeaseState& fresh);
  void wait_for_readers(LeaseState& lease);
  // Those of the warm slots for which wanted(lease), except for what a graph owns and on streams that are being
  // captured.
  template <class Predicate>
  void flush_if(Predicate wanted);
  void flush_all();
  void take_ended();
  void adopt_orphans();
  // Reads the records and forgets the leases that are over. Waits for nothing.
  void poll();
  void read_record(LeaseState& lease);
  void settle(LeaseState& lease);

  // arena_capacity.cpp
  bool fixed() const { return options_.capacity.has_value(); }
  bool has_bound() const { return options_.worst_case || options_.density_bound; }
  void initialise(CUDAStream stream);
  template <class Work>
  void set_up(CUDAStream stream, Work work);
  std::int64_t bound_pages(const LeaseInfo& info) const;
  void trim_if_due(CUDAStream stream);
  void ensure_capacity(const Sizing::Request& request, CUDAStream stream);
  bool may_stay_warm(const Sizing::Request& request) const;
  LeaseSlot* new_slot(const SlotClass& size, CUDAStream stream);
  bool wait_for_oldest_unfinished(CUDAStream stream);
  void grow(std::int64_t pages, CUDAStream stream);
  void trim_to_high_water(CUDAStream stream, bool asked);
  std::string advice_on_loss() const;
  std::string advice_on_spill() const;

  const ArenaOptions options_;
  std::mutex mutex_;
  Sizing sizing_;

  PageMemory pages_;
  SlotPool slots_;
  RecordPool records_;
  WarmSlots warm_;
  std::vector<std::unique_ptr<LeaseState>> leases_;  // in the order of their start, until they are over
  Inbox<EndedLease> ended_;
  std::shared_ptr<OrphanedLeases> orphans_ = std::make_shared<OrphanedLeases>();

  // The user's high-water mark: of leases that started since the last reset.
  std::int64_t peak_pages_ = 0;
  Sizing::LeaseId peak_since_ = 0;

  bool ready_ = false;             // initialise has done all its work
  std::int64_t ask_again_at_ = 0;  // in leases_total_: PyTorch refused memory, and would again

  std::string failure_;  // to be raised by the next call
  std::string warning_;  // to be given by it, once in the arena's life
  bool warned_ = false;
  std::int64_t waits_ = 0, growths_ = 0, failures_ = 0, leases_total_ = 0;
};

}  // namespace bitsparse::cuda

#include "sizing.h"

#include <algorithm>
#include <cmath>

namespace bitsparse {

template <class PagesOf>
std::int64_t Sizing::sum(StreamId stream, PagesOf pages_of) const {
  std::int64_t pages = 0;
  for (const auto& [id, entry] : leases_)
    if (entry.pinned || entry.owned || entry.stream != stream) pages += pages_of(entry);
  return pages;
}

std::int64_t Sizing::worst_case_demand(std::int64_t worst, StreamId stream) const {
  return worst + sum(stream, [](const Entry& e) { return e.worst; });
}

Sizing::Demand Sizing::demand(Kind kind, std::int64_t worst, StreamId stream) const {
  const auto seen = seen_.find(kind);
  if (seen == seen_.end() || !seen->second.completed_step)
    return {worst + sum(stream, [](const Entry& e) { return e.pages >= 0 && !e.pinned ? e.pages : e.worst; }), true};
  // Steady: what was enough for as many leases, and for each one beyond that the largest seen of this kind.
  const std::int64_t extra = std::max<std::int64_t>(0, live_ + 1 - most_live_);
  return {steady_pages() + extra * seen->second.most_pages, false};
}

std::int64_t Sizing::expected_pages(Kind kind) const {
  const auto seen = seen_.find(kind);
  const auto position = static_cast<std::size_t>(live_);
  if (seen == seen_.end() || position >= seen->second.last_pages.size()) return 0;
  return seen->second.last_pages[position];
}

Sizing::LeaseId Sizing::start(Kind kind, std::int64_t worst, StreamId stream) {
  if (seen_.size() >= kMostKinds) {
    seen_.clear();
    new_kinds_.clear();
  }
  if (seen_.emplace(kind, Seen{}).second) new_kinds_.push_back(kind);
  const LeaseId id = next_++;
  Entry entry{};
  entry.kind = kind;
  entry.worst = worst;
  entry.stream = stream;
  entry.position = static_cast<std::size_t>(live_);
  leases_.emplace(id, entry);
  ++live_;
  step_most_live_ = std::max(step_most_live_, live_);
  return id;
}

void Sizing::finish(LeaseId id, std::int64_t pages) {
  Entry& entry = leases_.at(id);
  if (entry.pages < 0) known_pages_ += pages;
  entry.pages = pages;
  const auto found = seen_.find(entry.kind);
  if (found == seen_.end()) return;  // forgotten meanwhile
  Seen& seen = found->second;
  seen.most_pages = std::max(seen.most_pages, pages);
  if (seen.last_pages.size() <= entry.position) seen.last_pages.resize(entry.position + 1, 0);
  seen.last_pages[entry.position] = pages;
}

void Sizing::ending(LeaseId id) {
  Entry& entry = leases_.at(id);
  if (!entry.owned) return;
  entry.owned = false;
  if (--live_ > 0) return;
  // A step is complete.
  most_live_ = std::max(most_live_, step_most_live_);
  step_most_live_ = 0;
  if (!new_kinds_.empty()) trim_due_ = true;
  for (Kind kind : new_kinds_) seen_[kind].completed_step = true;
  new_kinds_.clear();
}

void Sizing::end(LeaseId id) {
  const auto found = leases_.find(id);
  if (found->second.pages >= 0) known_pages_ -= found->second.pages;
  leases_.erase(found);
}

void Sizing::pin(LeaseId id) { leases_.at(id).pinned = true; }
void Sizing::unpin(LeaseId id) { leases_.at(id).pinned = false; }

bool Sizing::take_trim_due() {
  const bool due = trim_due_ && live_ == 0;
  if (due) trim_due_ = false;
  return due;
}

std::int64_t Sizing::steady_pages() const {
  return static_cast<std::int64_t>(std::ceil(static_cast<double>(high_water_) * headroom_));
}

void Sizing::note_high_water(std::int64_t pages) { high_water_ = std::max(high_water_, pages); }

}  // namespace bitsparse

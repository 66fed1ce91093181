#include "sizing.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace bitsparse {

// What is in use when the request's lease starts: its stream has been through all that came before it.
template <class PagesOf>
std::int64_t Sizing::sum_at_start(const Request& request, PagesOf pages_of) const {
  std::int64_t pages = 0;
  for (const auto& [id, entry] : leases_) {
    const bool over = !entry.owned && !entry.pinned && entry.stream == request.stream && !request.captured;
    if (!over && id != request.takes_over) pages += pages_of(entry);
  }
  return pages;
}

// The same if ended leases keep their pages until they are taken over.
template <class PagesOf>
std::int64_t Sizing::sum_kept(const Request& request, PagesOf pages_of) const {
  std::int64_t pages = 0;
  for (const auto& [id, entry] : leases_) {
    const bool over = entry.flushing && (entry.stream == request.stream || request.captured);
    if (!over && id != request.takes_over) pages += pages_of(entry);
  }
  return pages;
}

const Sizing::Entry* Sizing::taken_over_by(const Request& request) const { return leases_.find(request.takes_over); }

// A lease holds what it takes over until it knows how much it needs.
std::int64_t Sizing::worst_of(const Request& request) const {
  const Entry* before = taken_over_by(request);
  return std::max(request.worst, before ? before->bound() : 0);
}

std::int64_t Sizing::expected_of(const Request& request) const {
  const auto seen = seen_.find(request.kind);
  if (seen == seen_.end() || seen->second.last_pages.empty()) return request.worst;
  const auto position = static_cast<std::size_t>(live_);
  const auto& last = seen->second.last_pages;
  return position < last.size() && last[position] >= 0 ? last[position] : seen->second.most_pages;
}

std::int64_t Sizing::worst_case_demand(const Request& request) const {
  return worst_of(request) + sum_at_start(request, [](const Entry& e) { return e.worst; });
}

Sizing::Demand Sizing::demand(const Request& request) const {
  const auto seen = seen_.find(request.kind);
  if (seen == seen_.end() || !seen->second.completed_step)
    return {worst_of(request) + sum_at_start(request, [](const Entry& e) { return e.bound(); }), true};
  // Steady: what was enough for as many leases, and for each one beyond that the largest seen of this kind.
  const std::int64_t extra = std::max<std::int64_t>(0, live_ + 1 - most_live_) * seen->second.most_pages;
  const auto guess = [](const Entry& e) { return e.guess(); };
  if (request.captured)  // a replay finds everything else where it is now
    return {std::max(steady_pages() + extra, with_headroom(expected_of(request) + sum_kept(request, guess))), false};
  std::int64_t of_graphs = 0;
  for (const auto& [id, entry] : leases_)
    if (entry.pinned && !entry.owned) of_graphs += entry.guess();
  return {with_headroom(high_water_ + of_graphs) + extra, false};
}

bool Sizing::may_keep(const Request& request, std::int64_t capacity, bool certain) const {
  if (certain) return worst_of(request) + sum_kept(request, [](const Entry& e) { return e.bound(); }) <= capacity;
  const auto seen = seen_.find(request.kind);
  if (seen == seen_.end() || !seen->second.completed_step) return false;
  const Entry* before = taken_over_by(request);
  const std::int64_t own = std::max(expected_of(request), before ? before->guess() : 0);
  return own + sum_kept(request, [](const Entry& e) { return e.guess(); }) <= capacity;
}

Sizing::LeaseId Sizing::start(const Request& request) {
  if (seen_.size() >= kMostKinds) {
    seen_.clear();
    new_kinds_.clear();
  }
  Entry entry{};
  entry.kind = request.kind;
  entry.position = static_cast<std::size_t>(live_);
  entry.stream = request.stream;
  entry.worst = worst_of(request);
  entry.expected = expected_of(request);
  entry.pinned = request.captured;
  if (const Entry* before = taken_over_by(request)) {
    taken_over_.add(request.takes_over, {before->kind, before->position});
    count(*before, -1);
    leases_.erase(request.takes_over);
  }
  if (seen_.try_emplace(request.kind).second) new_kinds_.push_back(request.kind);
  const LeaseId id = next_++;
  leases_.add(id, entry);
  ++live_;
  step_most_live_ = std::max(step_most_live_, live_);
  return id;
}

void Sizing::count(const Entry& entry, std::int64_t sign) {
  if (entry.pages < 0) return;
  if (entry.owned) known_pages_ += sign * entry.pages;
  if (entry.pinned && !entry.owned) graph_pages_ += sign * entry.pages;
}

template <class Change>
void Sizing::update(Entry& entry, Change change) {
  count(entry, -1);
  change(entry);
  count(entry, 1);
}

void Sizing::learn(Kind kind, std::size_t position, std::int64_t pages) {
  const auto found = seen_.find(kind);
  if (found == seen_.end()) return;  // forgotten meanwhile
  Seen& seen = found->second;
  seen.most_pages = std::max(seen.most_pages, pages);
  if (seen.last_pages.size() <= position) seen.last_pages.resize(position + 1, -1);
  seen.last_pages[position] = pages;
}

void Sizing::finish(LeaseId id, std::int64_t pages) {
  if (Entry* entry = leases_.find(id)) {
    update(*entry, [&](Entry& e) { e.pages = pages; });
    learn(entry->kind, entry->position, pages);
  } else if (const TakenOver* late = taken_over_.find(id)) {
    learn(late->kind, late->position, pages);
  }
}

void Sizing::ending(LeaseId id) {
  Entry& entry = leases_.at(id);
  if (!entry.owned) return;
  update(entry, [](Entry& e) { e.owned = false; });
  if (--live_ > 0) return;
  // A step is complete.
  most_live_ = std::max(most_live_, step_most_live_);
  step_most_live_ = 0;
  if (!new_kinds_.empty()) trim_due_ = true;
  for (Kind kind : new_kinds_) seen_[kind].completed_step = true;
  new_kinds_.clear();
}

void Sizing::flushing(LeaseId id) { leases_.at(id).flushing = true; }

void Sizing::end(LeaseId id) {
  taken_over_.erase(id);
  if (const Entry* entry = leases_.find(id)) count(*entry, -1);
  leases_.erase(id);
}

void Sizing::unpin(LeaseId id) {
  if (Entry* entry = leases_.find(id)) update(*entry, [](Entry& e) { e.pinned = false; });
}

bool Sizing::take_trim_due() {
  const bool due = trim_due_ && live_ == 0;
  if (due) trim_due_ = false;
  return due;
}

std::int64_t Sizing::with_headroom(std::int64_t pages) const {
  return static_cast<std::int64_t>(std::ceil(static_cast<double>(pages) * headroom_));
}

// The device counts what graphs hold too, but only between replays does the host know how much that is.
void Sizing::note_high_water(std::int64_t pages) {
  recent_high_water_ = std::max(recent_high_water_, pages - graph_pages_);
  high_water_ = std::max(high_water_, recent_high_water_);
}

void Sizing::note_loss(std::int64_t pages) {
  high_water_ += pages;
  recent_high_water_ = high_water_;
}

void Sizing::forget_older_high_water() {
  if (recent_high_water_ > 0) high_water_ = std::exchange(recent_high_water_, 0);
}

}  // namespace bitsparse

// A map from growing numbers to values, side by side in memory: tens of them, walked through again and again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace bitsparse {

template <class Value>
class ById {
 public:
  using Id = std::uint64_t;
  using Item = std::pair<Id, Value>;

  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }
  bool empty() const { return items_.empty(); }

  // Null: there is none. Good until the next change.
  Value* find(Id id) {
    const auto at = place_of(id);
    return at != items_.end() && at->first == id ? &at->second : nullptr;
  }
  const Value* find(Id id) const { return const_cast<ById*>(this)->find(id); }

  Value& at(Id id) {
    Value* value = find(id);
    if (!value) throw std::out_of_range("no item has this number");
    return *value;
  }

  void add(Id id, const Value& value) { items_.insert(place_of(id), Item(id, value)); }
  void erase(Id id) {
    const auto at = place_of(id);
    if (at != items_.end() && at->first == id) items_.erase(at);
  }

 private:
  auto place_of(Id id) {
    if (items_.empty() || items_.back().first < id) return items_.end();  // as a rule
    return std::lower_bound(items_.begin(), items_.end(), id, [](const Item& item, Id i) { return item.first < i; });
  }

  std::vector<Item> items_;  // by number
};

}  // namespace bitsparse

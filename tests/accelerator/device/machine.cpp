#include "machine.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace sim {

namespace {

std::string stream_name(StreamNumber number) {
  std::ostringstream text;
  text << "stream " << number % kStreams << " of sim:" << number / kStreams;
  return text.str();
}

std::shared_ptr<c10::GatheredContext> gather() {
  return torch::CapturedTraceback::gather(true, false, false);
}

// The innermost frames of Python, the last one last; those of installed packages only if there are no others.
std::string shown(const std::shared_ptr<c10::GatheredContext>& stack) {
  constexpr size_t most = 12;
  std::vector<std::string> own, all;
  if (stack) {
    const auto found = torch::symbolize({torch::getCapturedTracebackFromContext(stack)});
    for (const auto index : found.tracebacks.at(0)) {
      const auto& frame = found.all_frames[index];
      const auto line = "\n    " + frame.filename + ":" + std::to_string(frame.lineno) + " in " + frame.funcname;
      all.push_back(line);
      if (frame.filename.find("site-packages") == std::string::npos) {
        own.push_back(line);
      }
    }
  }
  const auto& lines = own.empty() ? all : own;
  std::string text = lines.empty() ? "\n    a thread without Python, such as autograd's" : "";
  for (size_t index = std::min(most, lines.size()); index-- > 0;) {
    text += lines[index];
  }
  return text;
}

std::string shown(const Operation& operation) {
  return operation.name + " on " + stream_name(operation.stream) + shown(operation.stack);
}

bool overlaps(size_t begin, size_t end, const Use& use) {
  return begin < use.end && use.begin < end;
}

bool same_memory(const Use& one, const Use& other) {
  return one.block == other.block && overlaps(one.begin, one.end, other);
}

size_t this_thread() {
  static std::atomic<size_t> threads{0};
  thread_local const size_t number = threads++;
  return number;
}

} // namespace

StreamNumber number_of(const c10::Stream& stream) {
  return static_cast<size_t>(stream.device_index()) * kStreams + static_cast<size_t>(stream.id());
}

void Clock::join(const Clock& other) {
  if (times_.size() < other.times_.size()) {
    times_.resize(other.times_.size());
  }
  for (size_t index = 0; index < other.times_.size(); ++index) {
    times_[index] = std::max(times_[index], other.times_[index]);
  }
}

bool Clock::covers(StreamNumber stream, Time time) const {
  return time == 0 || (stream < times_.size() && times_[stream] >= time);
}

bool Clock::covers(const Clock& other) const {
  for (size_t index = 0; index < other.times_.size(); ++index) {
    if (!covers(index, other.times_[index])) {
      return false;
    }
  }
  return true;
}

Time Clock::tick(StreamNumber stream) {
  if (times_.size() <= stream) {
    times_.resize(stream + 1);
  }
  return ++times_[stream];
}

Machine& Machine::get() {
  static auto* machine = new Machine();
  return *machine;
}

Machine::Machine() {
  const char* given = std::getenv("SIMULATED_DEVICES");
  devices_ = given ? std::atoi(given) : 3;
  TORCH_CHECK(
      devices_ >= 1 && devices_ <= kMostDevices, "SIMULATED_DEVICES is ", given, ". Give 1 to ", kMostDevices, ".");
  clocks_.resize(static_cast<size_t>(devices_) * kStreams);
  stats_.resize(devices_);
}

Clock& Machine::host() {
  if (!own_hosts) {
    return one_host_;
  }
  const auto [found, is_new] = hosts_.try_emplace(this_thread(), one_host_);
  for (const auto& [thread, clock] : hosts_) {
    if (is_new) { // a thread begins after all that others know
      found->second.join(clock);
    }
  }
  return found->second;
}

// ---------------------------------------------------------------------------------------------------------- operations

std::shared_ptr<Operation> Machine::launch(
    const std::string& name,
    const c10::Stream& stream,
    const std::vector<Use>& uses) {
  raise_found();
  auto operation = std::make_shared<Operation>();
  const auto node = torch::autograd::get_current_node();
  operation->name = node ? name + " (" + node->name() + ")" : name;
  operation->stream = number_of(stream);
  operation->stack = checks ? gather() : nullptr; // takes the GIL, so not under the lock
  std::list<Copy> done;
  std::shared_ptr<const Operation> earlier;
  bool both_write = false, writes = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    auto& clock = clocks_[operation->stream];
    clock.join(host());
    for (const auto& use : uses) {
      if (const auto* access = checks ? conflict(use, clock) : nullptr) {
        earlier = access->operation;
        both_write = use.writes && access->writes;
        writes = use.writes;
        break;
      }
    }
    if (!earlier) {
      operation->time = clock.tick(operation->stream);
      for (const auto& use : uses) {
        perform(use, done);
        note(use, operation);
      }
    }
  }
  if (earlier) {
    const auto* what = both_write ? " writes what it wrote" : writes ? " writes what it reads" : " reads what it wrote";
    TORCH_CHECK(
        false,
        "race: nothing orders ", operation->name, " on ", stream_name(operation->stream), " after ", earlier->name, " on ",
        stream_name(earlier->stream), ", yet it", what, ". An event's wait, a wait_stream or a synchronize is missing.",
        "\n  now: ", shown(*operation), "\n  before: ", shown(*earlier));
  }
  return operation;
}

void Machine::made(Block* block, const std::shared_ptr<Operation>& operation) {
  std::unique_lock<std::mutex> lock(mutex_);
  note({block, 0, block->nbytes, true}, operation);
}

const Access* Machine::conflict(const Use& use, const Clock& clock) const {
  for (const auto& access : use.block->accesses) {
    if ((use.writes || access.writes) && overlaps(access.begin, access.end, use) &&
        !clock.covers(access.operation->stream, access.operation->time)) {
      return &access;
    }
  }
  return nullptr;
}

void Machine::note(const Use& use, const std::shared_ptr<Operation>& operation) {
  if (!checks) {
    return;
  }
  auto& accesses = use.block->accesses;
  const auto covered = [&](const Access& access) {
    return use.begin <= access.begin && access.end <= use.end &&
        (use.writes || (!access.writes && access.operation->stream == operation->stream));
  };
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), covered), accesses.end());
  accesses.push_back({use.begin, use.end, use.writes, operation});
}

// -------------------------------------------------------------------------------------------------------- later copies

void Machine::copy_later(const Use& from, const Use& to, const c10::Storage& pinned, const c10::Stream& stream) {
  const bool to_host = to.block->pinned;
  const auto operation = launch(to_host ? "copy to the host" : "copy from the host", stream, {from, to});
  std::unique_lock<std::mutex> lock(mutex_);
  Copy copy{operation->stream, operation->time, from, to, pinned, to_host, {}};
  copy.taken.assign(from.block->data + from.begin, from.block->data + from.end);
  if (to_host) {
    std::memset(to.block->data + to.begin, kPoison, to.end - to.begin);
  } else {
    ++from.block->copies;
    from_host_.push_back(copy);
  }
  ++to.block->copies;
  copies_.push_back(std::move(copy));
}

void Machine::perform(const Use& use, std::list<Copy>& done) {
  for (auto copy = copies_.begin(); use.block->copies > 0 && copy != copies_.end();) {
    const auto next = std::next(copy);
    if (same_memory(use, copy->to) || (use.writes && !copy->to_host && same_memory(use, copy->from))) {
      perform(copy, done);
    }
    copy = next;
  }
  for (auto copy = from_host_.begin(); use.writes && use.block->pinned && copy != from_host_.end();) {
    const auto next = std::next(copy);
    if (same_memory(use, copy->from)) { // from here on a device writes it, in the stream's order
      end_of(copy, done);
    }
    copy = next;
  }
}

void Machine::end_of(std::list<Copy>::iterator copy, std::list<Copy>& done) {
  const auto& [block, begin, end, writes] = copy->from;
  if (checks && std::memcmp(block->data + begin, copy->taken.data(), end - begin) != 0) {
    found_.push_back(
        "race: the host has written pinned memory before it waited for a copy from there, on " +
        stream_name(copy->stream) + ". The writer has to wait for an event behind the copy, or write other memory.");
  }
  done.splice(done.end(), from_host_, copy);
}

void Machine::perform(std::list<Copy>::iterator copy, std::list<Copy>& done) {
  const char* source = copy->to_host ? copy->taken.data() : copy->from.block->data + copy->from.begin;
  std::memcpy(copy->to.block->data + copy->to.begin, source, copy->to.end - copy->to.begin);
  if (!copy->to_host) {
    --copy->from.block->copies;
  }
  --copy->to.block->copies;
  done.splice(done.end(), copies_, copy);
}

// ------------------------------------------------------------------------------------------------ events and waiting

void Machine::record(Event& event, const c10::Stream& stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  event.clock = clocks_[number_of(stream)];
  event.clock.join(host());
  event.time = std::chrono::steady_clock::now();
  event.asked = false;
}

void Machine::wait(const Event& event, const c10::Stream& stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  clocks_[number_of(stream)].join(event.clock);
}

void Machine::wait(const c10::Stream& later, const c10::Stream& earlier) {
  std::unique_lock<std::mutex> lock(mutex_);
  clocks_[number_of(later)].join(clocks_[number_of(earlier)]);
}

void Machine::knows(const Clock& clock, std::unique_lock<std::mutex>& lock) {
  std::list<Copy> done;
  auto& known = host();
  known.join(clock);
  for (auto copy = copies_.begin(); copy != copies_.end();) {
    const auto next = std::next(copy);
    if (known.covers(copy->stream, copy->time)) {
      perform(copy, done);
    }
    copy = next;
  }
  for (auto copy = from_host_.begin(); copy != from_host_.end();) {
    const auto next = std::next(copy);
    if (known.covers(copy->stream, copy->time)) {
      end_of(copy, done);
    }
    copy = next;
  }
  lock.unlock();
}

bool Machine::query(Event& event) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!event.asked && !host().covers(event.clock)) {
      event.asked = true;
      return false;
    }
  }
  synchronize(event);
  return true;
}

bool Machine::query(const c10::Stream& stream) {
  synchronize(stream);
  return true;
}

void Machine::synchronize(const Event& event) {
  std::unique_lock<std::mutex> lock(mutex_);
  knows(event.clock, lock);
  raise_found();
}

void Machine::synchronize(const c10::Stream& stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  knows(clocks_[number_of(stream)], lock);
  raise_found();
}

void Machine::synchronize(c10::DeviceIndex device) {
  std::unique_lock<std::mutex> lock(mutex_);
  Clock all;
  for (StreamNumber stream = 0; stream < kStreams; ++stream) {
    all.join(clocks_[device * kStreams + stream]);
  }
  knows(all, lock);
  raise_found();
}

void Machine::blocked(const c10::Stream& stream, const std::string& name) {
  TORCH_CHECK(
      host_may_wait, "the host waits for ", stream_name(number_of(stream)), " in ", name,
      ", within torch.sim.no_synchronisation().");
  ++waits;
  synchronize(stream);
}

// -------------------------------------------------------------------------------------------------------------- memory

Block* Machine::allocate(size_t nbytes, bool pinned, const c10::Stream& home, c10::Storage adopted) {
  void* data = nullptr;
  if (adopted) {
    data = adopted.mutable_data();
  } else {
    TORCH_CHECK(posix_memalign(&data, 64, nbytes) == 0, "the host has no ", nbytes, " bytes for a simulated device.");
    std::memset(data, kPoison, nbytes);
  }
  auto* block =
      new Block{static_cast<char*>(data), nbytes, pinned, home.device(), number_of(home), std::move(adopted), {}, {}};
  std::unique_lock<std::mutex> lock(mutex_);
  if (pinned) {
    pinned_[block->data] = block;
  } else {
    stats_[home.device_index()].allocated_bytes[0].increase(nbytes);
    stats_[home.device_index()].allocation[0].increase(1);
  }
  return block;
}

// Freeing is a write in the stream of the allocation: whoever allocates there next may write into the memory at once.
void Machine::free(Block* block) {
  std::list<Copy> done;
  std::shared_ptr<const Operation> user;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (block->pinned) {
      pinned_.erase(block->data);
    } else {
      Clock clock = clocks_[block->home];
      clock.join(host());
      for (const auto stream : block->recorded) {
        clock.join(clocks_[stream]);
      }
      if (const auto* access = checks ? conflict({block, 0, block->nbytes, true}, clock) : nullptr) {
        user = access->operation;
      }
      stats_[block->device.index()].allocated_bytes[0].decrease(block->nbytes);
      stats_[block->device.index()].allocation[0].decrease(1);
    }
    for (auto copy = copies_.begin(); block->copies > 0 && copy != copies_.end();) {
      const auto next = std::next(copy);
      if (copy->to.block == block) { // nobody has used what it copies
        --copy->from.block->copies;
        --block->copies;
        done.splice(done.end(), copies_, copy);
      }
      copy = next;
    }
  }
  if (user) {
    auto text = "race: memory allocated on " + stream_name(block->home) + " is freed while nothing orders this after " +
        user->name + " on " + stream_name(user->stream) + ", which uses it. A record_stream, or a wait, is missing." +
        "\n  now: freed by" + shown(gather()) + "\n  before: " + shown(*user);
    std::unique_lock<std::mutex> lock(mutex_);
    found_.push_back(std::move(text));
  }
  if (!block->adopted) {
    std::memset(block->data, kPoison, block->nbytes);
    std::free(block->data);
  }
  delete block;
}

Block* Machine::pinned_at(const void* data) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto* byte = static_cast<const char*>(data);
  auto found = pinned_.upper_bound(byte);
  if (found == pinned_.begin()) {
    return nullptr;
  }
  auto* block = (--found)->second;
  return byte < block->data + block->nbytes ? block : nullptr;
}

void Machine::record_stream(Block* block, const c10::Stream& stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto& recorded = block->recorded;
  if (std::find(recorded.begin(), recorded.end(), number_of(stream)) == recorded.end()) {
    recorded.push_back(number_of(stream));
  }
}

c10::CachingDeviceAllocator::DeviceStats Machine::stats(c10::DeviceIndex device) {
  std::unique_lock<std::mutex> lock(mutex_);
  return stats_.at(device);
}

void Machine::reset_peak(c10::DeviceIndex device) {
  std::unique_lock<std::mutex> lock(mutex_);
  stats_.at(device).allocated_bytes[0].reset_peak();
}

void Machine::raise_found() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!found_.empty()) {
    const auto text = found_.front();
    found_.clear();
    lock.unlock();
    TORCH_CHECK(false, text);
  }
}

} // namespace sim

// Operations: memory, views and copies by hand; all others are the host's kernels, on the device's memory.
#include "machine.h"

#include "generator.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace sim {

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

bool is_sim(const Tensor& tensor) {
  return tensor.defined() && tensor.device().is_privateuseone();
}

Block* block_of(const Tensor& tensor) {
  if (!tensor.has_storage()) {
    return nullptr;
  }
  const auto& data = tensor.storage().data_ptr();
  return is_sim(tensor) ? static_cast<Block*>(data.get_context()) : Machine::get().pinned_at(data.get());
}

// The bytes from a tensor's first element to its last. (Of a view with gaps that is more than it uses.)
std::optional<Use> use_of(const Tensor& tensor, bool writes) {
  auto* block = tensor.numel() > 0 ? block_of(tensor) : nullptr;
  if (block == nullptr) {
    return std::nullopt;
  }
  const auto nbytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  const auto* first = static_cast<const char*>(tensor.const_data_ptr());
  const auto begin = static_cast<size_t>(first - block->data);
  return Use{block, begin, begin + nbytes, writes};
}

void add_use(std::vector<Use>& uses, const Tensor& tensor, bool writes) {
  if (const auto use = use_of(tensor, writes)) {
    uses.push_back(*use);
  }
}

c10::Stream stream_of(const Tensor& tensor) {
  return current_stream(tensor.device().index());
}

// Tensors of the host that have the memory of a device's tensors, and the way back.
class OnHost {
 public:
  explicit OnHost(c10::Device device) : device_(device) {}

  Tensor lend(const Tensor& tensor) {
    if (!is_sim(tensor)) {
      return tensor;
    }
    auto& found = lent_[tensor.unsafeGetTensorImpl()];
    if (!found.defined()) {
      TORCH_CHECK(
          tensor.layout() == c10::kStrided, "a simulated device has no tensors of layout ", tensor.layout(), ".");
      found = like(tensor, lend(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU));
      back_[found.unsafeGetTensorImpl()] = tensor;
    }
    return found;
  }

  // A result of the host's kernel: what was lent, a view of it, or new memory, which is not copied.
  Tensor take_back(const Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    const auto found = back_.find(tensor.unsafeGetTensorImpl());
    if (found != back_.end()) {
      return found->second;
    }
    TORCH_CHECK(tensor.layout() == c10::kStrided, "a simulated device has no tensors of layout ", tensor.layout(), ".");
    auto& storage = taken_[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) {
      storage = adopt(tensor.storage());
    }
    return like(tensor, storage, kKeys);
  }

  // Lent tensors that the kernel has resized.
  void follow() {
    for (const auto& [original, host] : lent_) {
      const auto& lent = host.storage();
      const auto& storage = original->storage();
      if (lent.data() != storage.data()) {
        auto& adopted = taken_[lent.unsafeGetStorageImpl()];
        adopted = adopt(lent);
        auto* impl = storage.unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(adopted.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, device_)));
        impl->set_nbytes(lent.nbytes());
        adopted = storage;
      }
      if (original->sizes() != host.sizes() || original->strides() != host.strides()) {
        original->set_sizes_and_strides(host.sizes(), host.strides());
      }
    }
  }

  const std::vector<Block*>& adopted() const { return adopted_; }

 private:
  static Tensor like(const Tensor& tensor, const c10::Storage& storage, c10::DispatchKeySet keys) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, tensor.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      impl->set_wrapped_number(true);
    }
    impl->_set_conj(tensor.is_conj());
    impl->_set_neg(tensor.is_neg());
    return made;
  }

  c10::Storage lend(const c10::Storage& storage) {
    auto& found = storages_[storage.unsafeGetStorageImpl()];
    if (!found) {
      c10::DataPtr data(const_cast<void*>(storage.data()), c10::Device(c10::DeviceType::CPU));
      found = c10::Storage(
          c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), at::getCPUAllocator(), true);
      taken_[found.unsafeGetStorageImpl()] = storage;
    }
    return found;
  }

  c10::Storage adopt(const c10::Storage& host) {
    c10::DataPtr data(nullptr, device_);
    if (host.nbytes() > 0) {
      auto* block = Machine::get().allocate(host.nbytes(), false, current_stream(device_.index()), host);
      adopted_.push_back(block);
      data = data_of(block);
    }
    return {c10::Storage::use_byte_size_t(), host.nbytes(), std::move(data), device_allocator(), true};
  }

  c10::Device device_;
  std::unordered_map<c10::TensorImpl*, Tensor> lent_;
  std::unordered_map<c10::TensorImpl*, Tensor> back_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> taken_;
  std::vector<Block*> adopted_;
};

// Each tensor of a value, by `change`.
template <typename Change>
IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) {
      list.push_back(change(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

template <typename See>
void each_tensor(const IValue& value, const See& see) {
  changed(value, [&](const Tensor& tensor) {
    if (tensor.defined()) {
      see(tensor);
    }
    return tensor;
  });
}

// Operations that may read tensors of the host beside the device's: positions.
bool takes_from_host(const std::string& name) {
  return name.find("index") != std::string::npos;
}

c10::Device device_of(const c10::FunctionSchema& schema, c10::ArrayRef<IValue> arguments) {
  std::optional<c10::Device> device;
  for (const auto& argument : arguments) {
    each_tensor(argument, [&](const Tensor& tensor) {
      const bool is_number = tensor.device().is_cpu() && (tensor.dim() == 0 || takes_from_host(schema.name()));
      if (is_number || (device && *device == tensor.device())) {
        return;
      }
      TORCH_CHECK(
          is_sim(tensor) && !device, "Expected all tensors to be on the same device, but ", schema.name(),
          " has tensors on ", device ? device->str() : "a simulated device", " and ", tensor.device(), ".");
      device = tensor.device();
    });
  }
  for (const auto& argument : arguments) {
    if (!device && argument.isDevice() && argument.toDevice().has_index()) {
      device = argument.toDevice();
    }
  }
  return device.value_or(c10::Device(c10::DeviceType::PrivateUse1, current_device()));
}

IValue generator_of(const IValue& given, c10::Device device) {
  const auto generator = given.isNone() ? default_generator(device.index()) : given.toGenerator();
  TORCH_CHECK(
      generator.device() == device, "Expected a generator of ", device, ", but found one of ", generator.device(), ".");
  return generator.get<Generator>()->own;
}

// These look at no memory.
const std::unordered_set<std::string> kOfShape{"aten::is_set_to", "aten::_has_same_storage_numel", "aten::is_same_size"};

// Runs a kernel of the host, `op`, for `name`, on arguments that lie on a device.
void run_on_host(const c10::OperatorHandle& op, const std::string& name, Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto given = torch::jit::last(*stack, count);
  const auto device = device_of(schema, given);
  const auto stream = current_stream(device.index());
  const c10::DeviceGuard guard(device);

  std::vector<Use> uses;
  for (size_t index = 0; index < count && kOfShape.count(name) == 0; ++index) {
    const auto* alias = schema.arguments()[index].alias_info();
    if (alias == nullptr || alias->isWrite()) { // others are views, which read nothing
      each_tensor(given[index], [&](const Tensor& tensor) {
        if (is_sim(tensor)) {
          add_use(uses, tensor, alias != nullptr);
        }
      });
    }
  }
  const auto operation = Machine::get().launch(name, stream, uses);

  OnHost host(device);
  std::vector<IValue> lent;
  for (size_t index = 0; index < count; ++index) {
    auto value = changed(given[index], [&](const Tensor& tensor) { return host.lend(tensor); });
    if (schema.arguments()[index].name() == "generator") {
      value = generator_of(value, device);
    } else if (value.isDevice()) {
      value = c10::Device(c10::DeviceType::CPU);
    }
    lent.push_back(std::move(value));
  }
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), lent.begin(), lent.end());
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    op.callBoxed(stack);
  }
  host.follow();
  const auto results = schema.returns().size();
  bool tells_host = false;
  for (auto& result : torch::jit::last(*stack, results)) {
    tells_host = tells_host || !(result.isTensor() || result.isTensorList() || result.isNone());
    const_cast<IValue&>(result) = changed(result, [&](const Tensor& tensor) { return host.take_back(tensor); });
  }
  for (auto* block : host.adopted()) {
    Machine::get().made(block, operation);
  }
  if (tells_host && !uses.empty()) {
    Machine::get().blocked(stream, name);
  }
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  run_on_host(op, op.schema().name(), stack);
}

c10::OperatorHandle operator_named(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

// torch gives other devices' convolutions names of their own.
void convolution(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = operator_named("aten::convolution");
  run_on_host(op, "aten::convolution", stack);
}

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = operator_named("aten::convolution_backward");
  const auto weight = torch::jit::peek(*stack, 2, 10).toTensor();
  const bool transposed = torch::jit::peek(*stack, 6, 10).toBool();
  const auto groups = torch::jit::peek(*stack, 8, 10).toInt();
  const int64_t outputs = transposed ? weight.size(1) * groups : weight.size(0);
  stack->insert(stack->end() - 7, IValue(c10::List<int64_t>({outputs})));
  run_on_host(op, "aten::convolution_backward", stack);
}

// ----------------------------------------------------------------------------------------------------- memory and views

c10::Device device_or_current(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(c10::DeviceType::PrivateUse1, current_device());
}

Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "a simulated device has dense tensors only.");
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "a simulated device has dense tensors only.");
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

Tensor efficient_zero_tensor(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  at::native::ZeroTensorAllocator allocator(device_or_current(device));
  const auto keys = kKeys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), std::nullopt);
}

void grow(const Tensor& tensor) {
  const auto needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes()) {
    resize(tensor.storage(), needed);
  }
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  if (self.sizes() != size) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    grow(self);
  }
  if (format && *format != c10::MemoryFormat::Preserve) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

Tensor& set_storage_offset(
    Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.data() == nullptr) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  grow(self);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage) {
  const auto size = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage_offset(self, std::move(storage), 0, {size}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, device_allocator(), true));
}

Tensor as_strided(
    const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

void record_stream(Tensor& self, c10::Stream stream) {
  if (self.has_storage()) {
    device_allocator()->recordStream(self.storage().data_ptr(), stream);
  }
}

// --------------------------------------------------------------------------------------------------------------- copies

bool same_layout(const Tensor& one, const Tensor& other) {
  return one.dtype() == other.dtype() && one.sizes() == other.sizes() && one.strides() == other.strides() &&
      one.is_non_overlapping_and_dense() && one.is_conj() == other.is_conj() && one.is_neg() == other.is_neg();
}

void copy_on_host(const Tensor& from, const Tensor& to) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  OnHost host(is_sim(to) ? to.device() : from.device());
  host.lend(to).copy_(host.lend(from));
}

// As on CUDA the source's stream copies; it and the stream of the target wait for each other.
void copy_between_devices(const Tensor& from, const Tensor& to) {
  auto& machine = Machine::get();
  std::vector<Use> uses;
  add_use(uses, from, false);
  add_use(uses, to, true);
  if (from.device() != to.device()) {
    machine.wait(stream_of(from), stream_of(to));
  }
  machine.launch("copy", stream_of(from), uses);
  copy_on_host(from, to);
  if (from.device() != to.device()) {
    machine.wait(stream_of(to), stream_of(from));
  }
}

void copy_with_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool to_host = is_sim(from);
  if (!same_layout(from, to)) { // by way of tensors that a plain copy of bytes will do for
    auto source = from.resolve_conj().resolve_neg();
    source = (to_host ? source : source.to(to.scalar_type())).expand_as(to).contiguous();
    const bool direct = to.is_contiguous() && to.dtype() == source.dtype() && !to.is_conj() && !to.is_neg();
    const auto target = direct ? to : at::empty(to.sizes(), to.options().dtype(source.dtype()));
    copy_with_host(source, target, non_blocking);
    if (!direct) {
      to.copy_(target, non_blocking);
    }
    return;
  }
  auto& machine = Machine::get();
  const auto stream = stream_of(to_host ? from : to);
  const auto& on_host = to_host ? to : from;
  const auto reads = use_of(from, false), writes = use_of(to, true);
  if (non_blocking && reads && writes) {
    machine.copy_later(*reads, *writes, on_host.storage(), stream);
    return;
  }
  std::vector<Use> uses;
  add_use(uses, from, false);
  add_use(uses, to, true);
  machine.launch(to_host ? "copy to the host" : "copy from the host", stream, uses);
  copy_on_host(from, to);
  if (to_host || !non_blocking) {
    machine.blocked(stream, to_host ? "a copy to the host" : "a copy from the host");
  }
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  if (target.numel() > 0) {
    const auto source = self.expand_as(target);
    const c10::DeviceGuard guard(is_sim(self) ? self.device() : target.device());
    if (is_sim(self) && is_sim(target)) {
      copy_between_devices(source, target);
    } else {
      copy_with_host(source, target, non_blocking);
    }
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar item(const Tensor& self) {
  std::vector<Use> uses;
  add_use(uses, self, false);
  Machine::get().launch("aten::item", stream_of(self), uses);
  Machine::get().blocked(stream_of(self), "aten::item");
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return OnHost(self.device()).lend(self).item();
}

// -------------------------------------------------------------------------------------------------------------- dropout

// The host's kernel would draw from the host's generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train && !*train) {
    return {input, at::ones_like(input, input.options().dtype(at::kBool))};
  }
  const auto mask = at::empty(input.sizes(), input.options().dtype(at::kBool)).bernoulli_(1.0 - p);
  return {input.mul(mask).mul_(p == 1.0 ? 0.0 : 1.0 / (1.0 - p)), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_efficientzerotensor", efficient_zero_tensor);
  library.impl("resize_", resize_);
  library.impl("set_", set_nothing);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_offset);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("as_strided", as_strided);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", unfold);
  library.impl("record_stream", record_stream);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("native_dropout", native_dropout);
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // For these torch has composite kernels, which round otherwise than the host's, or warn.
  for (const char* name : {"native_layer_norm", "native_group_norm", "mse_loss", "smooth_l1_loss"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// Torch resolves a lazy conjugate or negative by a copy, so copies take them as they are.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace

void resize(const c10::Storage& storage, size_t nbytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const c10::DeviceGuard guard(storage.device());
  auto data = device_allocator()->allocate(nbytes);
  const auto kept = std::min(nbytes, storage.nbytes());
  if (kept > 0) {
    auto* from = static_cast<Block*>(storage.data_ptr().get_context());
    auto* to = static_cast<Block*>(data.get_context());
    const auto stream = current_stream(storage.device().index());
    Machine::get().launch("resize", stream, {{from, 0, kept, false}, {to, 0, kept, true}});
    std::memcpy(data.get(), storage.data(), kept);
  }
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(nbytes);
}

} // namespace sim

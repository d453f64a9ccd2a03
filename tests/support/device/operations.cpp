#include "operations.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <mutex>
#include <set>
#include <unordered_map>

#include "devices.h"
#include "memory.h"

namespace standin {
namespace {

using torch::jit::Stack;

// Calls a function with every defined tensor of a value; true says that it has replaced the tensor.
template <class F>
void each_tensor(c10::IValue& value, F f) {
  if (value.isTensor()) {
    at::Tensor tensor = value.toTensor();
    if (tensor.defined() && f(tensor)) {
      value = tensor;
    }
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    bool any = false;
    for (at::Tensor& tensor : tensors) {
      any |= tensor.defined() && f(tensor);
    }
    if (any) {
      value = c10::List<at::Tensor>(tensors);
    }
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (std::optional<at::Tensor> each : value.toOptionalTensorVector()) {
      if (each && each->defined()) {
        f(*each);
      }
      tensors.push_back(each);
    }
    value = tensors;
  }
}

// ------------------------------------------------------------------ what a schema says
// Where accelerators have other operators than the CPU, or the same ones for more types.
enum class Special { no, convolution, convolution_backward, histogram };

struct Argument {
  bool generator = false;
  bool out = false;
  bool writes = false;
  bool indices = false;  // may be on the CPU; a mask among them is counted by the host
  bool scalars = false;  // numbers for each tensor of a list, which are on the CPU
  bool running = false;  // statistics that are written in training, though no schema says so
};

struct Facts {
  std::vector<Argument> arguments;
  std::vector<int> aliases;  // for each result, the argument that it is, or -1
  bool host_reads = false;
  int training = -1;  // the argument that says whether statistics are written
  Special special = Special::no;
};

// Operators whose results, or the shapes of those, the host has to know.
bool host_reads_result_of(const std::string& name) {
  static const std::set<std::string> names{"aten::_local_scalar_dense",
                                           "aten::equal",
                                           "aten::nonzero",
                                           "aten::masked_select",
                                           "aten::_unique",
                                           "aten::_unique2",
                                           "aten::unique_dim",
                                           "aten::unique_consecutive",
                                           "aten::unique_dim_consecutive",
                                           "aten::repeat_interleave",
                                           "aten::bincount"};
  return names.count(name) > 0;
}

Facts read_schema(const c10::FunctionSchema& schema) {
  Facts facts;
  for (const auto& each : schema.arguments()) {
    const auto type = each.type()->str();
    const auto* const alias = each.alias_info();
    Argument argument;
    argument.generator = type.find("Generator") != std::string::npos;
    argument.out = each.is_out();
    argument.writes = alias != nullptr && alias->isWrite();
    argument.indices = each.name() == "indices";
    argument.scalars = each.name() == "scalars";
    argument.running = each.name().rfind("running_", 0) == 0;
    facts.arguments.push_back(argument);
    if (each.name() == "training" || each.name() == "train") {
      facts.training = static_cast<int>(facts.arguments.size()) - 1;
    }
  }
  for (const auto& result : schema.returns()) {
    int found = -1;
    for (size_t i = 0; i < schema.arguments().size(); i++) {
      const auto* const alias = schema.arguments()[i].alias_info();
      if (alias && result.alias_info() && alias->isWrite() && *alias == *result.alias_info()) {
        found = static_cast<int>(i);
      }
    }
    facts.aliases.push_back(found);
  }
  facts.host_reads = host_reads_result_of(schema.name());
  if (schema.name() == "aten::convolution_overrideable") {
    facts.special = Special::convolution;
  } else if (schema.name() == "aten::convolution_backward_overrideable") {
    facts.special = Special::convolution_backward;
  } else if (schema.name() == "aten::histc" && schema.overload_name().empty()) {
    facts.special = Special::histogram;
  }
  return facts;
}

const Facts& facts_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* const known = new std::unordered_map<c10::OperatorName, Facts>;
  const std::lock_guard<std::mutex> guard(mutex);
  auto found = known->find(op.operator_name());
  if (found == known->end()) {
    found = known->emplace(op.operator_name(), read_schema(op.schema())).first;
  }
  return found->second;
}

// ------------------------------------------------------------------ arguments
int device_of_arguments(Stack arguments) {
  int device = -1;
  for (c10::IValue& value : arguments) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (device < 0 && tensor.is_privateuseone()) {
        device = tensor.device().index();
      }
      return false;
    });
    if (device < 0 && value.isDevice() && value.toDevice().has_index()) {
      device = value.toDevice().index();
    }
  }
  return device < 0 ? current_device() : device;
}

// The arguments of an operator as its kernel for the CPU sees them.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const Facts& facts, int device, Stack given)
      : cpu(std::move(given)), name_(op.schema().name()), device_(device) {
    const bool trains =
        facts.training >= 0 && cpu[facts.training].isBool() && cpu[facts.training].toBool();
    for (size_t i = 0; i < cpu.size(); i++) {
      Argument argument = facts.arguments[i];
      argument.writes |= argument.running && trains;
      take(cpu[i], argument);
    }
  }

  Stack cpu;
  std::vector<Range> ranges;
  std::vector<std::pair<at::Tensor, at::Tensor>> resized;  // one of the device, one for the kernel
  bool has_mask = false;

 private:
  void take(c10::IValue& value, const Argument& argument) {
    if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    } else if (argument.generator) {
      value = cpu_generator(value.isNone() ? default_generator(device_) : value.toGenerator());
    } else {
      each_tensor(value, [&](at::Tensor& tensor) { return take(tensor, argument); });
    }
  }

  bool take(at::Tensor& tensor, const Argument& argument) {
    const auto dtype = tensor.scalar_type();
    has_mask |= argument.indices && (dtype == at::kBool || dtype == at::kByte);
    const bool any_place = tensor.dim() == 0 || argument.indices || argument.scalars;
    if (tensor.is_cpu() && any_place) {
      return false;
    }
    const c10::Device expected(kDevice, static_cast<c10::DeviceIndex>(device_));
    TORCH_CHECK(tensor.device() == expected,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                expected, " and ", tensor.device(), "! (when calling ", name_, ")");
    if (argument.out && tensor.numel() == 0) {  // the kernel finds out the shape
      resized.emplace_back(tensor, at::empty({0}, at::TensorOptions(tensor.dtype())));
      tensor = resized.back().second;
    } else {
      ranges.push_back(range_of(tensor, argument.writes));
      tensor = views_.of(tensor);
    }
    return true;
  }

  const std::string& name_;
  const int device_;
  Views views_;
};

// ------------------------------------------------------------------ kernels and results
void call_kernel(const c10::OperatorHandle& op, const Facts& facts, Stack& stack) {
  const at::AutoDispatchBelowAutograd below;
  const c10::impl::ExcludeDispatchKeyGuard no_cast(c10::autocast_dispatch_keyset);
  auto& dispatcher = c10::Dispatcher::singleton();
  if (facts.special == Special::convolution) {
    static const auto convolution = dispatcher.findSchemaOrThrow("aten::convolution", "");
    convolution.callBoxed(&stack);
  } else if (facts.special == Special::convolution_backward) {
    static const auto backward = dispatcher.findSchemaOrThrow("aten::convolution_backward", "");
    stack.insert(stack.begin() + 3, c10::IValue());  // the shape of the bias, which it does without
    backward.callBoxed(&stack);
  } else if (facts.special == Special::histogram) {  // CUDA's takes integers too
    const at::Tensor values = stack.front().toTensor();
    const bool exact = !at::isIntegralType(values.scalar_type(), true);
    stack.front() = exact ? values : values.to(at::kDouble);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    stack.back() = stack.back().toTensor().to(values.scalar_type());
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  }
}

void fill(Launch& launch, const at::Tensor& tensor, const at::Tensor& from_cpu) {
  if (tensor.numel() > 0) {
    launch.wrote(range_of(tensor, true));
    at::Tensor view = Views().of(tensor);
    at::native::copy_(view, from_cpu, false);
  }
}

void bring_to_device(Launch& launch, int device, c10::IValue& result) {
  each_tensor(result, [&](at::Tensor& tensor) {
    if (!tensor.is_cpu()) {
      return false;
    }
    const at::Tensor made =
        tensor.is_non_overlapping_and_dense()
            ? empty_on(device, tensor.sizes(), tensor.strides(), tensor.scalar_type())
            : empty_on(device, tensor.sizes(), at::detail::defaultStrides(tensor.sizes()),
                       tensor.scalar_type());
    fill(launch, made, tensor);
    tensor = made;
    return true;
  });
}

bool returns_view(const c10::FunctionSchema& schema) {
  const auto& results = schema.returns();
  return std::any_of(results.begin(), results.end(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
    return argument.type()->str().find("Tensor") != std::string::npos;
  });
}

}  // namespace

at::Tensor Views::of(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  char* const base = storage.nbytes() > 0 ? kernel_address(storage.data()) : nullptr;
  auto found = storages_.find(base);
  if (found == storages_.end()) {
    c10::Storage made(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      at::DataPtr(base, at::kCPU), nullptr, false);
    found = storages_.emplace(base, std::move(made)).first;
  }
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* const impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) {
    impl->_set_conj(true);
  }
  if (tensor.is_neg()) {
    impl->_set_neg(true);
  }
  return view;
}

Range range_of(const at::Tensor& tensor, bool writes) {
  const auto size = static_cast<int64_t>(tensor.itemsize());
  char* const begin =
      static_cast<char*>(tensor.storage().mutable_data()) + tensor.storage_offset() * size;
  int64_t last = tensor.numel() > 0 ? 1 : 0;
  for (int64_t i = 0; i < tensor.dim() && last > 0; i++) {
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  return {begin, begin + last * size, writes};
}

at::Tensor empty_on(int device, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                    c10::ScalarType dtype) {
  const c10::DeviceGuard guard({kDevice, static_cast<c10::DeviceIndex>(device)});
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype);
}

void resize_memory(const at::Tensor& tensor, c10::IntArrayRef sizes) {
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  const size_t bytes = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize();
  if (bytes > tensor.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
  }
}

void host_waits_for_stream(Wait kind, int stream) { host_waits(kind, clock_of(stream)); }

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  initialize();
  const Facts& facts = facts_of(op);
  const size_t count = facts.arguments.size();
  const Stack given(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  const int device = device_of_arguments(given);
  const c10::DeviceGuard guard({kDevice, static_cast<c10::DeviceIndex>(device)});
  const int stream = current_stream(device);
  Arguments arguments(op, facts, device, given);
  Stack results = arguments.cpu;
  {
    Launch launch(stream, op.schema().name(), arguments.ranges);
    call_kernel(op, facts, results);
    for (auto& [tensor, from_cpu] : arguments.resized) {
      resize_memory(tensor, from_cpu.sizes());
      fill(launch, tensor, from_cpu);
    }
    for (size_t i = 0; i < results.size(); i++) {
      if (facts.aliases[i] >= 0) {
        results[i] = given[facts.aliases[i]];
      } else {
        bring_to_device(launch, device, results[i]);
      }
    }
  }
  // The ends of a histogram that are equal stand for the least and the greatest value.
  const bool finds_ends = facts.special == Special::histogram &&
                          given[2].toScalar().equal(given[3].toScalar().toDouble());
  if (facts.host_reads || arguments.has_mask || finds_ends) {
    host_waits_for_stream(Wait::item, stream);
  }
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), results.begin(), results.end());
}

void take_kernels_of_cpu() {
  static auto* const kept = new std::vector<c10::RegistrationHandleRAII>;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || name.name.rfind("aten::", 0) != 0) {
      continue;
    }
    const bool convolution =
        name.overload_name.empty() && name.name.find("_overrideable") != std::string::npos;
    const bool copy = name.name == "aten::_to_copy" || name.name == "aten::copy_";
    const bool wanted =
        convolution || (op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
                        !returns_view(op->schema()) && !copy && takes_tensors(op->schema()));
    if (wanted && !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      kept->push_back(
          dispatcher.registerImpl(name, c10::DispatchKey::PrivateUse1,
                                  c10::KernelFunction::makeFromBoxedFunction<&run_on_cpu>(),
                                  std::nullopt, nullptr, "the stand-in"));
    }
  }
}

}  // namespace standin

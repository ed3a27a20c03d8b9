// What PyTorch's core asks of a CUDA build, without one: devices and streams, and which kernel
// attention takes. Tensors of these devices are made in pretend.py.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceIndex kMostDevices = 8;
thread_local c10::DeviceIndex current_index = 0;
int forced_kernel = 0; // of attention; the numbers are those of at::native::SDPBackend

c10::Device cuda(c10::DeviceIndex index) {
  return {c10::DeviceType::CUDA, index < 0 ? current_index : index};
}

// --- streams: there is one for each device, and nothing on it is ever late -----------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  c10::DeviceType type() const override {
    return static_type;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kMostDevices;
  }
  c10::Device getDevice() const override {
    return cuda(-1);
  }
  c10::Device exchangeDevice(c10::Device next) const override {
    const auto before = getDevice();
    setDevice(next);
    return before;
  }
  void setDevice(c10::Device next) const override {
    uncheckedSetDevice(next);
  }
  void uncheckedSetDevice(c10::Device next) const noexcept override {
    current_index = cuda(next.index()).index();
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, cuda(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// --- attention: the forced kernel, else the best one that is switched on --------------------------

int64_t choose_kernel(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor&,
    const std::optional<at::Tensor>& bias,
    double,
    bool,
    std::optional<double>,
    bool) {
  const auto& context = at::globalContext();
  const bool is_half = q.scalar_type() != at::kFloat && q.scalar_type() != at::kDouble;
  const bool able[] = {
      true,
      context.userEnabledFlashSDP() && is_half && !bias,
      context.userEnabledMemEfficientSDP() && q.scalar_type() != at::kDouble &&
          q.size(1) == k.size(1), // it knows no grouped heads
      context.userEnabledCuDNNSDP() && is_half};
  for (const int kernel : {forced_kernel, 1, 2}) {
    if (kernel > 0 && able[kernel]) {
      return kernel;
    }
  }
  return 0;
}

const bool registered = [] {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_kernel);
  return true;
}();

} // namespace

extern "C" void force_kernel(int kernel) {
  forced_kernel = kernel;
}

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return kMostDevices;
  }
  int getNumGPUs() const override {
    return kMostDevices;
  }
  DeviceIndex current_device() const override {
    return current_index;
  }
  DeviceIndex getCurrentDevice() const override {
    return current_index;
  }
  void setCurrentDevice(DeviceIndex index) const override {
    current_index = index;
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return std::exchange(current_index, index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current_index : exchangeDevice(index);
  }
  bool isPinnedPtr(const void*) const override {
    return false;
  }
  void deviceSynchronize(DeviceIndex) const override {}
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    static const Generator generator = detail::createCPUGenerator();
    return generator;
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

} // namespace at

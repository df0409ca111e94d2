#include "deepnvme/cuda_host.hpp"

#include <dlfcn.h>

#include <stdexcept>
#include <utility>

namespace deepnvme {

namespace {

// The few functions of the driver that are needed, by their ABI: a result of 0 is success, a device
// is an int.
using Context = struct OpaqueContext*;

struct Driver {
    int (*init)(unsigned flags) = nullptr;
    int (*device_count)(int* count) = nullptr;
    int (*context_state)(int device, unsigned* flags, int* active) = nullptr;
    int (*retain_context)(Context* context, int device) = nullptr;
    int (*release_context)(int device) = nullptr;
    int (*push_context)(Context context) = nullptr;
    int (*pop_context)(Context* context) = nullptr;
    int (*host_register)(void* memory, std::size_t nbytes, unsigned flags) = nullptr;
    int (*host_unregister)(void* memory) = nullptr;
    int (*error_name)(int error, const char** name) = nullptr;
    std::shared_ptr<void> library;
};

constexpr unsigned portable =
    1;  // CU_MEMHOSTREGISTER_PORTABLE: page-locked for every context, not only this one

// Says what is missing in `why`.
bool bind(Driver& driver, const std::string& path, int flags, std::string& why) {
    driver.library = {::dlopen(path.c_str(), flags), [](void* handle) {
                          if (handle != nullptr) ::dlclose(handle);
                      }};
    if (!driver.library) {
        why = path + " is not there or not loaded";
        return false;
    }
    const auto find = [&](const char* name, auto& function) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(
            ::dlsym(driver.library.get(), name));
        if (function == nullptr) why = path + " has no " + name;
        return function != nullptr;
    };
    return find("cuInit", driver.init) && find("cuDeviceGetCount", driver.device_count) &&
           find("cuDevicePrimaryCtxGetState", driver.context_state) &&
           find("cuDevicePrimaryCtxRetain", driver.retain_context) &&
           find("cuDevicePrimaryCtxRelease_v2", driver.release_context) &&
           find("cuCtxPushCurrent_v2", driver.push_context) &&
           find("cuCtxPopCurrent_v2", driver.pop_context) &&
           find("cuMemHostRegister_v2", driver.host_register) &&
           find("cuMemHostUnregister", driver.host_unregister) &&
           find("cuGetErrorName", driver.error_name);
}

std::string named(const Driver& driver, int error) {
    const char* name = nullptr;
    if (driver.error_name(error, &name) == 0 && name != nullptr) return name;
    return "CUDA error " + std::to_string(error);
}

// The first device whose primary context is active; -1: none.
int active_device(const Driver& driver) {
    int count = 0;
    if (driver.device_count(&count) != 0) return -1;  // not initialised, so nothing is in use
    for (int device = 0; device < count; ++device) {
        unsigned flags = 0;
        int active = 0;
        if (driver.context_state(device, &flags, &active) == 0 && active != 0) return device;
    }
    return -1;
}

class RetainedContext final : public CudaHost {
  public:
    RetainedContext(Driver driver, int device) : driver_(std::move(driver)), device_(device) {
        check(driver_.retain_context(&context_, device_), "retaining the device's context");
    }

    ~RetainedContext() override { driver_.release_context(device_); }

    void register_memory(void* memory, std::size_t nbytes) override {
        const Current current(*this);
        check(driver_.host_register(memory, nbytes, portable),
              "registering " + std::to_string(nbytes) + " bytes");
    }

    void unregister_memory(void* memory) noexcept override {
        try {
            const Current current(*this);
            driver_.host_unregister(memory);
        } catch (const std::runtime_error&) {
            // The context is gone, at the program's end, and its registrations with it.
        }
    }

  private:
    // Makes the context this thread's for a while; whatever was current before is so again.
    class Current {
      public:
        explicit Current(RetainedContext& owner) : driver_(owner.driver_) {
            owner.check(driver_.push_context(owner.context_),
                        "making the device's context current");
        }
        ~Current() {
            Context ignored = nullptr;
            driver_.pop_context(&ignored);
        }
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;

      private:
        const Driver& driver_;
    };

    void check(int error, const std::string& what) const {
        if (error != 0)
            throw std::runtime_error("CUDA: " + what + " failed: " + named(driver_, error));
    }

    Driver driver_;
    int device_;
    Context context_ = nullptr;
};

}  // namespace

std::shared_ptr<CudaHost> CudaHost::open(When when, const std::string& library) {
    Driver driver;
    std::string why;
    const bool demanded = when == When::demanded;
    const int flags = RTLD_NOW | (demanded ? 0 : RTLD_NOLOAD);
    if (!bind(driver, library, flags, why)) {
        if (demanded) throw std::runtime_error("CUDA: " + why);
        return nullptr;
    }
    int device = -1;
    if (demanded) {
        const int error = driver.init(0);
        if (error != 0)
            throw std::runtime_error("CUDA: initialising failed: " + named(driver, error));
        device = active_device(driver);
        int count = 0;
        if (device < 0 && driver.device_count(&count) == 0 && count > 0) device = 0;
        if (device < 0) throw std::runtime_error("CUDA: there is no device");
    } else {
        device = active_device(driver);
        if (device < 0) return nullptr;
    }
    return std::make_shared<RetainedContext>(std::move(driver), device);
}

}  // namespace deepnvme

// A stand-in for the CUDA driver library, loaded by test_cuda_host.cpp: it keeps count and refuses
// on demand.
#include <cstddef>
#include <map>

namespace {

struct State {
    bool initialised = false;
    bool active = false;
    int retained = 0;
    int pushed = 0;
    int misuse = 0;  // calls that the real driver would have refused or that would have leaked
    int refuse_registration = 0;
    std::map<void*, std::size_t> registered;
};

State& state() {
    static State all;
    return all;
}

constexpr int not_initialised = 3;
constexpr int already_registered = 712;
constexpr int not_registered = 713;

}  // namespace

extern "C" {
// What the tests look at and set.
__attribute__((visibility("default"))) void fake_reset(bool initialised, bool active, int refuse) {
    state() = {};
    state().initialised = initialised;
    state().active = active;
    state().refuse_registration = refuse;
}
__attribute__((visibility("default"))) int fake_retained() {
    return state().retained;
}
__attribute__((visibility("default"))) int fake_misuse() {
    return state().misuse + state().pushed;
}
__attribute__((visibility("default"))) std::size_t fake_registered_bytes() {
    std::size_t total = 0;
    for (const auto& entry : state().registered) total += entry.second;
    return total;
}

// The driver's functions.
__attribute__((visibility("default"))) int cuInit(unsigned) {
    state().initialised = true;
    return 0;
}
__attribute__((visibility("default"))) int cuDeviceGetCount(int* count) {
    *count = 1;
    return state().initialised ? 0 : not_initialised;
}
__attribute__((visibility("default"))) int cuDevicePrimaryCtxGetState(int, unsigned*, int* active) {
    *active = state().active ? 1 : 0;
    return 0;
}
__attribute__((visibility("default"))) int cuDevicePrimaryCtxRetain(void** context, int) {
    ++state().retained;
    state().active = true;
    *context = &state();
    return 0;
}
__attribute__((visibility("default"))) int cuDevicePrimaryCtxRelease_v2(int) {
    --state().retained;
    return 0;
}
__attribute__((visibility("default"))) int cuCtxPushCurrent_v2(void* context) {
    if (context != &state()) ++state().misuse;
    ++state().pushed;
    return 0;
}
__attribute__((visibility("default"))) int cuCtxPopCurrent_v2(void**) {
    --state().pushed;
    return 0;
}
__attribute__((visibility("default"))) int cuMemHostRegister_v2(void* memory, std::size_t nbytes,
                                                                unsigned flags) {
    if (state().refuse_registration != 0) return state().refuse_registration;
    if (state().pushed != 1 || flags != 1) ++state().misuse;
    return state().registered.emplace(memory, nbytes).second ? 0 : already_registered;
}
__attribute__((visibility("default"))) int cuMemHostUnregister(void* memory) {
    if (state().pushed != 1) ++state().misuse;
    return state().registered.erase(memory) == 1 ? 0 : not_registered;
}
__attribute__((visibility("default"))) int cuGetErrorName(int error, const char** name) {
    *name = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OTHER";
    return 0;
}
}

// `memory`: each request is carried out in the submitting call, on the descriptor given (a memfd,
// in tests), and completes in the order pushed.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "backends.hpp"

namespace deepnvme {
namespace {

class MemoryBackend final : public Backend {
  public:
    explicit MemoryBackend(unsigned depth) : depth_(depth) {
        pushed_.reserve(depth);
        done_.reserve(depth);
    }

    [[nodiscard]] std::string_view name() const noexcept override { return "memory"; }
    [[nodiscard]] unsigned capacity() const noexcept override { return depth_; }

    [[nodiscard]] bool push(const Request& request) override {
        if (pushed_.size() + done_.size() == depth_) return false;
        pushed_.push_back(request);
        return true;
    }

    [[nodiscard]] std::size_t submit_and_reap(std::span<Completion> out, Wait wait) override {
        for (const Request& request : pushed_) done_.push_back({request.token, execute(request)});
        pushed_.clear();
        if (wait != Wait::none) {
            if (done_.empty()) woken_.wait(false);
            woken_.store(false);
        }
        const auto count = static_cast<std::ptrdiff_t>(std::min(out.size(), done_.size()));
        std::copy_n(done_.begin(), count, out.begin());
        done_.erase(done_.begin(), done_.begin() + count);
        return static_cast<std::size_t>(count);
    }

    void wake() noexcept override {
        woken_.store(true);
        woken_.notify_one();
    }

  private:
    unsigned depth_;
    std::vector<Request> pushed_;
    std::vector<Completion> done_;
    std::atomic<bool> woken_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_memory_backend(unsigned depth) {
    return std::make_unique<MemoryBackend>(depth);
}

}  // namespace deepnvme
